"""DatagramPort: the queue pair, slots and connection ids of a datagram endpoint.

Theory of operation
    One queue pair of type UD serves the endpoint and all its peers.  There are three kinds of
    connection ids beside it:

    - the home id, bound to the local address, gives the queue pair its port and its key, and is
      the member of multicast groups;
    - the listener, if the endpoint has an address of its own, answers each request with the number
      of the queue pair, and forgets it: no request costs anything afterwards;
    - destinations ask with ids of their own (datagram/destinations.py).

    As with connections, one entry of the channel's slot table serves the queue pair, and the
    sub-index of a wr_id is the number of the slot.

    A receive slot is posted again only after the endpoint has copied its datagram.  So the
    datagrams that wait for the program are bounded, and the adapter drops a datagram that finds no
    receive, as is usual for datagrams.

    A send that cannot leave, because the network device is down or the route is gone, puts the
    queue pair into the error state.  The endpoint goes on: when each posted request has completed,
    the queue pair is reset and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiordma._core import SUB_RECV, SUB_SHIFT
from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.enums import EventType, PortSpace
from aiordma.datagram.config import DatagramConfig
from aiordma.datagram.slots import RecvSlots, SendSlots
from aiordma.errors import NotSupportedError, cm_error, completion_error, errno_error, os_error
from aiordma.link.adapter_side import AdapterSide, Closing, Owner
from aiordma.link.completions import Completions
from aiordma.link.dialing import shared_channel
from aiordma.logs import log_of
from aiordma.memory.governor import FIRST
from aiordma.verbs.ah import GRH, AddressHandle
from aiordma.verbs.comp_channel import shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import QPAttrMask, QPState, QPType
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WCRecord

__all__ = ["SEND_DEPTH", "DatagramPort"]

_log = log_of("datagram")
_FLUSH_GRACE_S = 0.5
SEND_DEPTH = 64  # datagrams that the adapter has at a time


class DatagramOwner(Owner, Protocol):
    """An endpoint, as its port sees it."""

    def _on_received(self, slot: int, record: WCRecord) -> None:
        """A datagram is in a receive slot."""

    def _on_sent(self) -> None:
        """A datagram has left, and its slot is free."""

    def _on_restarted(self, cause: OSError, lost: int) -> None:
        """The queue pair was started again: `lost` posted datagrams are lost."""


@dataclass(slots=True)
class _Broken:
    """The queue pair is in the error state."""

    cause: OSError
    timer: asyncio.TimerHandle  # restarts the queue pair, even if some posts have not completed
    lost: int = 0  # datagrams that came back


class DatagramPort(AdapterSide):
    """Queue pair, slots and ids of one endpoint; made by `open`."""

    __slots__ = ("_broken", "_listener", "_recv", "_send")

    _owner: DatagramOwner | None

    def __init__(
        self,
        home: ConnectionId,
        context: Context,
        completions: Completions,
        pd: ProtectionDomain,
        qp: QueuePair,
        recv: RecvSlots,
        send: SendSlots,
    ) -> None:
        super().__init__(home, context, completions, pd, qp)
        self._recv = recv
        self._send = send
        self._listener: ConnectionId | None = None
        self._broken: _Broken | None = None

    @classmethod
    async def open(
        cls, host: str, listen_on: Address | None, config: DatagramConfig
    ) -> DatagramPort:
        """Allocate all resources on the device that has the address `host`.

        Args:
            host: Numeric local address of a device.
            listen_on: Address where clients can ask for the endpoint, or None.
            config: Depths.

        Raises:
            NotSupportedError: The device speaks iWARP.
            OSError: No device has the address, the port is taken, or out of resources.

        Cancellation: the resources are destroyed.
        """
        with contextlib.ExitStack() as undo:
            events, release_events = shared_channel()
            undo.callback(release_events)
            home = ConnectionId(events, PortSpace.UDP)
            undo.callback(home.close)
            home.bind_addr((host, 0))
            context = home.context
            assert context is not None
            if context.is_iwarp:
                msg = f"{context.name} speaks iWARP, which has no datagrams"
                raise NotSupportedError(errno.EOPNOTSUPP, msg)
            channel, release = shared_completions(context)
            undo.callback(release)
            pd = ProtectionDomain(context)
            undo.callback(pd.close)
            mtu = context.query_port(home.port_num).active_mtu.in_bytes
            room = GRH.SIZE + mtu
            incoming = await MemoryRegion.register(pd, config.recv_depth * room)
            undo.callback(incoming.close)
            outgoing = await MemoryRegion.register(pd, SEND_DEPTH * mtu)
            undo.callback(outgoing.close)
            for region in (incoming, outgoing):
                FIRST.count(region)
            cq = CompletionQueue(context, config.recv_depth + SEND_DEPTH, channel)
            undo.callback(cq.close)
            attr = QPInitAttr(
                send_cq=cq, max_send_wr=SEND_DEPTH, max_recv_wr=config.recv_depth,
                qp_type=QPType.UD,
            )  # fmt: skip
            qp = home.create_qp(pd, attr, (incoming, outgoing))
            undo.callback(qp.close)
            recv = RecvSlots(incoming, config.recv_depth, room)
            send = SendSlots(outgoing, SEND_DEPTH, mtu)
            port = cls(home, context, Completions(channel, cq), pd, qp, recv, send)
            if listen_on is not None:
                port._listener = ConnectionId(events, PortSpace.UDP)
                undo.callback(port._listener.close)
                port._listener._sink = port._on_request
                port._listener.bind_addr(listen_on)
            undo.pop_all()
        port.at_close(release)
        port.at_close(release_events)
        return port

    @property
    def mtu(self) -> int:
        """Bytes that a datagram may have."""
        return self._send.size

    @property
    def pinned_bytes(self) -> int:
        """Bytes of its slots; in any thread."""
        return self._recv.mr.length + self._send.mr.length

    def start(self, owner: DatagramOwner) -> None:
        """Call `owner` from now on; datagrams can be sent."""
        self._owner = owner
        self.cm_id._sink = self._on_home_event
        # Not `_begin`: here the queue pair is started again after a failure.
        self.completions.begin(self)

    def receive(self) -> None:
        """Post all receives, and listen for clients that ask."""
        self.post_recv(range(self._recv.count))
        if self._listener is not None:
            self._listener.listen(0)

    @property
    def sockname(self) -> Address:
        """Local (address, port); if the endpoint listens, clients can ask for the port."""
        bound = self._listener or self.cm_id
        source = bound.source
        assert source is not None
        return source

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """Take a completion of the queue pair."""
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        slot, good, owner = sub & ~SUB_RECV, not record[1], self._owner
        assert owner is not None  # nothing is delivered after the end
        if sub & SUB_RECV:
            self._recv.filled(slot)
            if good:
                owner._on_received(slot, record)
            else:
                self._recv.keep((slot,))
        else:
            self._send.done(slot)
            if good:
                owner._on_sent()
        if not good:
            self._break(sub, record)
            if self._broken is not None and not sub & SUB_RECV:
                self._broken.lost += 1
        if self._broken is not None and not self._recv and not self._send:
            self.loop.call_soon(self._restart)

    def _operation(self, sub: int) -> str:
        return "receive" if sub & SUB_RECV else "send"

    def _break(self, sub: int, record: WCRecord) -> None:
        """Note the error state of the queue pair, in which all posted requests come back."""
        if self._broken is not None or self.closed:
            return
        first = completion_error(
            record[1], operation=self._operation(sub), vendor_err=record[3], qp_num=record[6]
        )
        # Soft-RoCE flushes even the request that failed, so its status does not show the reason.
        text = f"a datagram could not leave ({first.status_name}): `ip link`, `ip route`"
        cause = errno_error(errno.ENETDOWN, text)
        cause.__cause__ = first
        self._broken = _Broken(cause, self.loop.call_later(_FLUSH_GRACE_S, self._restart))

    def _restart(self) -> None:
        broken, self._broken = self._broken, None
        if broken is None or self.closed:
            return
        broken.timer.cancel()
        try:
            self.qp.modify(QPAttrMask.STATE, qp_state=QPState.RESET)
            self.cm_id._start_qp(self.qp)
        except OSError as exc:
            self.fail(exc)
            return
        # Completions from before the reset that arrive late belong to no slot.
        self.completions.begin_anew(self)
        lost = broken.lost + len(self._send)
        self._send.all_done()
        self.post_recv(self._recv.take_all())
        if self._owner is not None:
            self._owner._on_restarted(broken.cause, lost)

    # Posting

    @property
    def sending(self) -> int:
        """Number of datagrams that the adapter has."""
        return len(self._send)

    def post_send(self, data: Any, ah: AddressHandle, qpn: int, qkey: int) -> bool:
        """Copy a datagram and send it; False if no send slot is free now.

        Args:
            data: Contiguous bytes, at most `mtu`.
            ah: Address handle of the receiver.
            qpn: Number of the receiver's queue pair.
            qkey: Key of that queue pair.
        """
        if self._send.full or self.closed or self._broken is not None:
            return False
        code = self._send.post(self._qp_handle, self.completions.id, data, ah, qpn, qkey)
        if code:
            self.fail(os_error(code, "ibv_post_send"))
        return True

    def post_recv(self, slots: Iterable[int]) -> None:
        """Post receive slots, in one chain."""
        if self.closed:
            return
        if self._broken is not None:
            self._recv.keep(slots)
            return
        code = self._recv.post(self._qp_handle, self.completions.id, slots)
        if code:
            self.fail(os_error(code, "ibv_post_recv"))

    def received(self, slot: int, length: int) -> memoryview:
        """Return header and datagram in a receive slot."""
        return self._recv.view(slot, length)

    # Events

    def _on_request(self, event: ConnectionEvent) -> bool:
        """Answer a client that asks for the endpoint."""
        if event.type != EventType.CONNECT_REQUEST:
            return self._on_home_event(event)
        asking = event.connection_id
        assert asking is not None
        try:
            if asking.context is self.context:
                asking._answer_service(b"", self.qp)
            else:
                asking.reject()
        except OSError as exc:
            _log.debug("a client that asked for %s has gone: %s", self.sockname, exc)
        asking.close()
        return True

    def _on_home_event(self, event: ConnectionEvent) -> bool:
        if event.type == EventType.DEVICE_REMOVAL:
            self.fail(cm_error(event.type.name, event.status))
        return True

    # End

    def _give_back(self) -> Sequence[Closing]:
        if self._broken is not None:
            self._broken.timer.cancel()
        pins = self._send.pinned()

        def let_go() -> None:
            for ah in pins:
                ah._let_go()

        self.qp._when_gone(let_go)
        parts: list[Resource] = [self.completions.cq, self._recv.mr, self._send.mr]
        if self._listener is not None:
            parts.append(self._listener)
        for part in parts:
            part.close()
        return parts

    def describe(self) -> dict[str, Any]:
        """Device, port, GID and so on, as `get_extra_info` returns them."""
        return {**super().describe(), "mtu": self.mtu}
