"""ConnectionEvent: one event of a connection id, copied out of C."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma.cm.enums import EventType
from aiordma.loop.uncopied import Uncopied
from aiordma.verbs.ah import AHAttributes

if TYPE_CHECKING:
    from aiordma.cm.connection_id import ConnectionId
    from aiordma.cm.event_channel import EventChannel

__all__ = ["ConnectionEvent"]

_NOTHING = (0, 0, 0, 0, 0, 0, 0)


class ConnectionEvent(Uncopied):
    """A connection-management event (`rdma_get_cm_event(3)`).

    It is a copy: the C event was acknowledged before the object existed.  `ack()` is for events
    that `EventChannel.get_event` has returned.

    Attributes:
        type: Kind of the event; an unknown number becomes `UNKNOWN_<n>`.
        status: 0, a negative errno, or a positive reject reason.
        connection_id: The id that it concerns; for CONNECT_REQUEST the new id, which the receiver
            of the event owns.
        listen_id: The listening id for CONNECT_REQUEST, else None.
        private_data: Bytes from the peer.  InfiniBand and RoCE deliver the whole field of the
            message, padded with zeros.
        responder_resources: Reads and atomics that the peer wants to have under way at a time.
            Both depths are as seen from here, not as the peer named them.
        initiator_depth: Reads and atomics of this side that the peer serves at a time.
        flow_control: Whether the peer uses end-to-end flow control.
        retry_count: The peer's retries.
        rnr_retry_count: Retries that the peer wants of this side when it has no receive posted.
        qp_num: The peer's queue pair; 0xFFFFFF for a multicast group.
        qkey: The key that the datagrams to it need; 0 for connections.
        ah_attr: The way to a datagram service (ESTABLISHED) or a group (MULTICAST_JOIN), for an
            `AddressHandle`; else None.
    """

    __slots__ = (
        "_account", "ah_attr", "channel", "connection_id", "flow_control", "hidden",
        "initiator_depth", "listen_id", "private_data", "qkey", "qp_num", "responder_resources",
        "retry_count", "rnr_retry_count", "status", "type",
    )  # fmt: skip

    responder_resources: int
    initiator_depth: int
    flow_control: int
    retry_count: int
    rnr_retry_count: int
    qp_num: int
    qkey: int

    def __init__(
        self,
        channel: EventChannel,
        type: EventType,
        status: int,
        connection_id: ConnectionId | None,
        listen_id: ConnectionId | None = None,
        private_data: bytes = b"",
        numbers: tuple[int, ...] | None = None,
    ) -> None:
        self.channel: EventChannel = channel
        self.type: EventType = type
        self.status: int = status
        self.connection_id: ConnectionId | None = connection_id
        self.listen_id: ConnectionId | None = listen_id
        self.private_data: bytes = private_data
        # Before a connection is asked for there is nothing that two ends could have agreed on.
        (
            self.responder_resources, self.initiator_depth, self.flow_control, self.retry_count,
            self.rnr_retry_count, self.qp_num, self.qkey,
        ) = numbers or _NOTHING  # fmt: skip
        self.ah_attr: AHAttributes | None = None
        # Answers a step that goes on by itself, so that no reader of the channel gets it.
        self.hidden: bool = False
        # The id that counts this event as unacknowledged, once `get_event` has returned it.
        self._account: ConnectionId | None = None

    def ack(self) -> None:
        """Acknowledge the event, exactly once (`rdma_ack_cm_event(3)`).

        Raises:
            ValueError: `get_event` did not return it, or it is acknowledged already.
        """
        self.channel.ack_event(self)

    def __repr__(self) -> str:
        return f"<ConnectionEvent {self.type.name} status={self.status} {self.connection_id!r}>"
