"""ConnectionParameter: the values that two ends agree on when they connect; and private data."""

from __future__ import annotations

from typing import Self

from aiordma.arguments import check_kind, check_seconds, payload_of
from aiordma.verbs.context import DeviceAttributes

__all__ = [
    "ANSWER_ROOM", "REFUSAL_ROOM", "REQUEST_ROOM", "SERVICE_ANSWER_ROOM", "SERVICE_REQUEST_ROOM",
    "ConnectionParameter", "Offer", "check_offer", "check_room",
]  # fmt: skip

#: Depths, flow control and retries, as `aio_connect` and `aio_accept` take them.
Offer = tuple[int, int, bool, int, int]

_MAX_DEPTH = 255
_DEFAULT_RETRIES = 7
#: Private data of a request and of its answer on InfiniBand and RoCE, in bytes.
REQUEST_ROOM = 56
ANSWER_ROOM = 196
REFUSAL_ROOM = 148
#: The same of a datagram service: the kernel takes 36 bytes of the 216 of a request for itself.
SERVICE_REQUEST_ROOM = 180
SERVICE_ANSWER_ROOM = 136
_MAX_PRIVATE_DATA = 255  # iWARP's


class ConnectionParameter:
    """Depths and retries for `ConnectionId.connect` and `accept` (`rdma_connect(3)`).

    Values out of range fall back instead of raising: a depth below 1 or above the device's limit
    means that limit, a retry count outside 0..7 means 7.  `exact()` makes parameters that are
    sent as they are, 0 included.

    Args:
        responder_resources: RDMA reads and atomics of the peer that this side will serve at a
            time; None for the device's limit.
        initiator_depth: Reads and atomics that this side will have under way; None for the
            device's limit.
        retry_count: Retries of a send, read or write that is not acknowledged, 0 to 7.  On
            Soft-RoCE 7 means for ever: a dead peer is then never noticed.
        rnr_retry_count: Retries of the peer when this side has no receive posted, 0 to 7; 7 means
            for ever.  `QPPolicy.min_rnr_timer` is the time before each: 0.64 ms by default, so that
            6 retries last a few milliseconds, and 0.1 to 0.2 s on Soft-RoCE.

    Until the parameters meet a device, at `connect` or `accept`, the depths that depend on it
    read as 255.
    """

    __slots__ = (
        "_exact", "_initiator_depth", "_limit", "_responder_resources", "_retry_count",
        "_rnr_retry_count", "flow_control",
    )  # fmt: skip

    def __init__(
        self,
        responder_resources: int | None = None,
        initiator_depth: int | None = None,
        retry_count: int = _DEFAULT_RETRIES,
        rnr_retry_count: int = _DEFAULT_RETRIES,
    ) -> None:
        self._exact = False
        self._limit = _MAX_DEPTH
        self.flow_control: bool = True
        self.responder_resources = responder_resources
        self.initiator_depth = initiator_depth
        self.retry_count = retry_count
        self.rnr_retry_count = rnr_retry_count

    @classmethod
    def exact(
        cls,
        responder_resources: int = 0,
        initiator_depth: int = 0,
        retry_count: int = 6,
        rnr_retry_count: int = 6,
    ) -> Self:
        """Parameters that are sent exactly as given.

        Raises:
            ValueError: A depth outside 0..255 or a count outside 0..7.
        """
        self = cls()
        self._exact = True
        self.responder_resources = responder_resources
        self.initiator_depth = initiator_depth
        self.retry_count = retry_count
        self.rnr_retry_count = rnr_retry_count
        return self

    def _checked(self, name: str, value: int | None, top: int) -> int | None:
        """The value for a setter; exact parameters raise where others fall back."""
        known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= top
        if self._exact and not known:
            msg = f"{name} {value} is not in 0..{top}"
            raise ValueError(msg)
        return value

    def bind(self, max_qp_rd_atom: int) -> None:
        """Set the device's limit for both depths (`max_qp_rd_atom`)."""
        self._limit = min(max_qp_rd_atom, _MAX_DEPTH)

    def _depth(self, value: int | None) -> int:
        if self._exact and value is not None:
            return value
        return self._limit if value is None or not 1 <= value <= self._limit else value

    @property
    def responder_resources(self) -> int:
        """Reads and atomics of the peer served at a time."""
        return self._depth(self._responder_resources)

    @responder_resources.setter
    def responder_resources(self, value: int | None) -> None:
        self._responder_resources = self._checked("responder_resources", value, _MAX_DEPTH)

    @property
    def initiator_depth(self) -> int:
        """Reads and atomics of this side under way at a time."""
        return self._depth(self._initiator_depth)

    @initiator_depth.setter
    def initiator_depth(self, value: int | None) -> None:
        self._initiator_depth = self._checked("initiator_depth", value, _MAX_DEPTH)

    @property
    def retry_count(self) -> int:
        """Retries without acknowledgement."""
        return self._retry_count

    @retry_count.setter
    def retry_count(self, value: int) -> None:
        self._checked("retry_count", value, 7)
        self._retry_count = value if 0 <= value <= 7 else _DEFAULT_RETRIES

    @property
    def rnr_retry_count(self) -> int:
        """Retries when the receiver was not ready."""
        return self._rnr_retry_count

    @rnr_retry_count.setter
    def rnr_retry_count(self, value: int) -> None:
        self._checked("rnr_retry_count", value, 7)
        self._rnr_retry_count = value if 0 <= value <= 7 else _DEFAULT_RETRIES

    def _numbers(self, limits: DeviceAttributes) -> Offer:
        """As the C calls take them."""
        self.bind(limits.max_qp_rd_atom)
        depth = self._depth(self._initiator_depth)
        # The kernel refuses more than the device can start; the getter keeps the program's value.
        depth = min(depth, limits.max_qp_init_rd_atom, 255)
        responder_resources = self._depth(self._responder_resources)
        return (
            responder_resources, depth, self.flow_control, self._retry_count, self._rnr_retry_count,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"<ConnectionParameter responder_resources={self.responder_resources} "
            f"initiator_depth={self.initiator_depth} retry_count={self.retry_count} "
            f"rnr_retry_count={self.rnr_retry_count}>"
        )


def check_offer(
    param: ConnectionParameter | None, private_data: bytes, timeout: float | None
) -> bytes:
    """Check an offer before anything is changed; return the private data as C takes it."""
    check_kind("param", param, ConnectionParameter)
    check_seconds("timeout", timeout, zero=True)
    return payload_of("private data", private_data, _MAX_PRIVATE_DATA)


def check_room(private_data: bytes, room: int, carrier: str, where: str = "") -> None:
    """Refuse private data that its carrier has no room for, before anything is changed.

    Raises:
        ValueError: There are more bytes than `room`.
    """
    if len(private_data) > room:
        msg = (
            f"{carrier} carries at most {room} bytes of private data{where}, "
            f"not {len(private_data)}"
        )
        raise ValueError(msg)
