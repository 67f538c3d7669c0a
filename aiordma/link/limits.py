"""ListenerLimits: how much of the machine the clients of a listener may use, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from aiordma.link.settings import SECONDS, Between, check_settings, suggesting
from aiordma.memory.memlock import memory_of_machine

__all__ = [
    "DEFAULT_LIMITS", "MOST_TLS_HANDSHAKES", "PATIENCE_S", "PRESSED_HANDSHAKE_S", "PRESSED_TLS_S",
    "ListenerLimits",
]  # fmt: skip

#: How many bytes all half-open clients of a listener may pin together.
_HALF_OPEN_BYTES = 128 << 20
#: How long a half-open client has, in seconds, when other requests wait for its place.
PRESSED_HANDSHAKE_S = 1.0
#: How long a request waits for a place, in seconds, before it is refused.
PATIENCE_S = 3.0
#: How many TLS handshakes a server has at a time; a single source may have half of them.
MOST_TLS_HANDSHAKES = 256
#: How long a TLS handshake may take, in seconds, when others wait for its place.
PRESSED_TLS_S = 5.0


@suggesting
@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """How many connections, bytes and seconds the clients of one listener may have.

    The defaults suit an ordinary server; docs/limits.md explains all limits.  A *source* is an IPv4
    address or an IPv6 /64 network.  A client is *half-open* from the moment when the listener
    allocates memory for it until the client has confirmed the connection (a stream) or has sent a
    message (`Connection`).

    Attributes:
        max_connections: Largest number of connections, including half-open ones.  Beyond it a
            request is refused.  A request is also refused if its source already has its share:
            three quarters of what all other sources leave.
        max_connections_per_source: Largest number of connections of a single source.
        max_half_open: Largest number of half-open clients, half of which may be of one source.
            Together they may pin 128 MiB; but a single client is admitted however much it pins.
            Further requests wait for up to 3 seconds, without using memory of the adapter.  Then
            they are refused, and aiordma's clients try again.
        max_pinned_bytes: Bytes that the slots and rings of all connections of this listener may
            pin.  Beyond it a request is refused.  A request is also refused if its source already
            pins its share: three quarters of what all other sources leave.  None: half of
            the memory of the machine, or of the container if its control group has a limit.
        max_process_pinned_bytes: The same for all listeners of the process together, checked when
            this listener admits a client.  None: half of that memory.
        max_large_message_bytes: Bytes of large messages of all connections of this listener:
            messages that are being fetched, messages that `recv()` has not returned yet, and
            buffers that stay registered for the next message, in either direction.  A message that
            does not fit waits.  In addition the process has a budget, see
            `set_large_message_budget`.
        max_request_bytes: Bytes of requests of all connections of this listener, whether they still
            wait or a handler has them; the first 64 KiB of each connection do not count.  Beyond it
            a request is refused (`RequestRefusedError`).  A request is also refused if its source
            already has its share: three quarters of what all other sources leave.  None: a quarter
            of that memory.
        handshake_timeout_s: Seconds within which a client has to complete the handshake, not
            counting the time that the event loop is late; and within which a program that uses
            `requests()` has to answer.  While requests wait for a place, clients that have been
            half-open for more than a second are dropped, the oldest of the source with the most
            half-open clients first.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    max_connections: Annotated[int, Between(1, 1 << 24)] = 16_384
    max_connections_per_source: Annotated[int, Between(1, 1 << 24)] = 4_096
    max_half_open: Annotated[int, Between(1, 1 << 16)] = 64
    max_pinned_bytes: Annotated[int | None, Between(1, 1 << 50)] = None
    max_process_pinned_bytes: Annotated[int | None, Between(1, 1 << 50)] = None
    max_large_message_bytes: Annotated[int, Between(1 << 20, 1 << 50)] = 128 << 20
    max_request_bytes: Annotated[int | None, Between(1, 1 << 50)] = None
    handshake_timeout_s: Annotated[float, SECONDS] = 10.0

    def __post_init__(self) -> None:
        check_settings(self)

    def half_open(self, size: int) -> int:
        """How many clients may be half-open at a time, if each pins `size` bytes."""
        return max(1, min(self.max_half_open, _HALF_OPEN_BYTES // max(1, size)))

    @property
    def pinned_bytes(self) -> int:
        """How many bytes the connections of the listener may pin."""
        return self.max_pinned_bytes or _half_of_memory()

    @property
    def process_pinned_bytes(self) -> int:
        """How many bytes the connections of all listeners may pin."""
        return self.max_process_pinned_bytes or _half_of_memory()

    @property
    def request_bytes(self) -> int:
        """How many bytes of requests the connections of the listener may have."""
        return self.max_request_bytes or _half_of_memory() // 2


def _half_of_memory() -> int:
    return memory_of_machine() // 2


#: The limits of a listener that was given none.
DEFAULT_LIMITS = ListenerLimits()
