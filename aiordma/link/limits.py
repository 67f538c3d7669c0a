"""ListenerLimits: the objects, bytes and seconds that the clients of a listener may hold."""

from __future__ import annotations

import os
from dataclasses import dataclass

from aiordma.link.config_check import check_numbers, check_seconds

__all__ = ["DEFAULT_LIMITS", "ListenerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """The objects, bytes and seconds that the clients of one listener may hold.

    The defaults suit an ordinary server; docs/limits.md has them all.  A source is an IPv4 address
    or an IPv6 /64.  A client is half-open from the moment the listener allocates memory for it
    until the client has confirmed the connection (a stream) or has sent a message (`Connection`).

    Attributes:
        max_connections: Connections at a time, half-open ones included.  A request beyond them is
            refused, and so is a request of a source that has its share: three quarters of the
            number that the other sources leave.
        max_connections_per_source: Likewise, of one source.
        max_half_open: Half-open clients at a time.  Further requests wait, and hold no memory of
            the adapter while they do.
        max_half_open_per_source: Likewise, of one source.
        max_half_open_bytes: Bytes that half-open clients pin at a time; a single client is let in
            whatever it pins.
        max_pinned_bytes: Bytes that the slots and rings of all connections of this listener pin at
            a time.  A request beyond them is refused, and so is a request of a source that pins its
            share: three quarters of the bytes that the other sources leave.  None: half of the
            machine's memory.
        max_process_pinned_bytes: Likewise, for all listeners of the process together; checked when
            this listener lets in a client.  None: half of the machine's memory.
        max_large_message_bytes: Bytes of large messages that the connections of this listener hold
            at a time: messages that are being fetched, messages that `recv()` has not returned yet,
            and buffers that stay registered for the next message, in either direction.  A message
            that does not fit waits.  The process has a budget besides, see
            `set_large_message_budget`.
        max_request_bytes: Bytes of requests that wait, or that handlers have, of all connections of
            this listener at a time; 64 KiB of each connection do not count.  A request beyond them
            is refused (`RequestOverloadedError`), and so is a request of a source that has its
            share: three quarters of the bytes that the other sources leave.  None: a quarter of the
            machine's memory.
        pressed_handshake_timeout_s: Seconds that a half-open client has to act while requests wait
            for its place, instead of `handshake_timeout_s`.  After that the client that has been
            half-open for longest is dropped, of the source that has most of them.
        max_wait_s: Seconds that a request waits for a place; after them it is refused, and
            aiordma's clients try again.
        max_tls_handshakes: TLS handshakes at a time.  Further clients wait and stay half-open.
        max_tls_handshakes_per_source: Likewise, of one source.
        pressed_tls_handshake_timeout_s: Seconds for a TLS handshake while others wait for its
            place, instead of `ssl_handshake_timeout`.

    Raises:
        TypeError: A number is of another type.
        ValueError: A number is out of its range.
    """

    max_connections: int = 16_384
    max_connections_per_source: int = 4_096
    max_half_open: int = 64
    max_half_open_per_source: int = 32
    max_half_open_bytes: int = 128 << 20
    max_pinned_bytes: int | None = None
    max_process_pinned_bytes: int | None = None
    max_large_message_bytes: int = 128 << 20
    max_request_bytes: int | None = None
    pressed_handshake_timeout_s: float = 1.0
    max_wait_s: float = 3.0
    max_tls_handshakes: int = 256
    max_tls_handshakes_per_source: int = 128
    pressed_tls_handshake_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_numbers(
            self,
            (
                ("max_connections", 1, 1 << 24),
                ("max_connections_per_source", 1, 1 << 24),
                ("max_half_open", 1, 1 << 16),
                ("max_half_open_per_source", 1, 1 << 16),
                ("max_half_open_bytes", 1, 1 << 50),
                ("max_pinned_bytes", 1, 1 << 50),
                ("max_process_pinned_bytes", 1, 1 << 50),
                ("max_large_message_bytes", 1 << 20, 1 << 50),
                ("max_request_bytes", 1, 1 << 50),
                ("max_tls_handshakes", 1, 1 << 16),
                ("max_tls_handshakes_per_source", 1, 1 << 16),
            ),
            optional=("max_pinned_bytes", "max_process_pinned_bytes", "max_request_bytes"),
        )
        check_seconds(
            self,
            ("pressed_handshake_timeout_s", "max_wait_s", "pressed_tls_handshake_timeout_s"),
        )

    def half_open(self, size: int) -> int:
        """Half-open clients at a time, if each pins `size` bytes."""
        return max(1, min(self.max_half_open, self.max_half_open_bytes // max(1, size)))

    @property
    def pinned_bytes(self) -> int:
        """Bytes that connections of the listener may pin."""
        return self.max_pinned_bytes or _half_of_memory()

    @property
    def process_pinned_bytes(self) -> int:
        """Bytes that connections of all listeners may pin."""
        return self.max_process_pinned_bytes or _half_of_memory()

    @property
    def request_bytes(self) -> int:
        """Bytes of requests that connections of the listener may hold."""
        return self.max_request_bytes or _half_of_memory() // 2


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


#: Limits of a listener without settings of its own.
DEFAULT_LIMITS = ListenerLimits()
