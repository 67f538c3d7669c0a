"""StreamConfig: every number of a stream connection, with its unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from aiordma.link.settings import (
    SECONDS,
    WAITS,
    Between,
    OneOf,
    Seconds,
    check_settings,
    suggesting,
)

__all__ = ["DEFAULTS", "StreamConfig"]


@suggesting
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings of a stream connection; the defaults suit an ordinary server and its clients.

    Attributes:
        receive_buffer_size: Bytes that the peer may send ahead of the program, registered for the
            peer to write to; even, at least 4,096.  A stream begins with 16 KiB, and has more when
            the peer has sent more and the program has taken it; above 1 MiB all from the beginning.
        send_buffer_size: Bytes of registered memory that data is sent from, at least 4,096.  A
            stream begins with 16 KiB in the same way.  Bytes that are written beyond it wait in
            ordinary memory, see `set_write_buffer_limits`.
        iomap_slots: Mappings of its memory that the peer may publish to this side at a time, 0 to
            128; see docs/interop.md.
        wait: How a wait for completions begins. "event": the event loop sleeps until the adapter
            raises an event.  "spin": the completion queue is polled for up to `spin_us` before the
            loop sleeps, which takes a processor.  "adaptive": the same while recent waits were
            shorter than `spin_us`, otherwise as "event".  On a machine with a single processor all
            work as "event".  See docs/connecting.md.
        spin_us: Microseconds of polling in each wait, 1 to 1,000,000.
        tos: Type of service of the packets (IPv4), or traffic class (IPv6), 0 to 255; None for the
            system's.  The connecting side chooses for both.
        ack_timeout: Exponent e of the adapter's acknowledgement timeout, 4.096 us * 2**e; 16 is
            268 ms.  A dead peer is noticed after seven timeouts, as the adapter tries again six
            times.
        close_timeout_s: Seconds without progress after which `close()` gives up and bytes that were
            not sent are lost.
        linger_s: Seconds in which posted bytes have to arrive after `abort()`, or when the event
            loop ends before the connection; 0 to break the connection at once, which the peer sees
            as `ConnectionLostError`.
        keepalive_s: Seconds of silence after which the peer's adapter is asked for a sign of life;
            None for never.  This notices a host that is gone, but not a program that hangs.
        idle_timeout_s: Seconds without a sign of life from the peer's program after which the
            connection is given up; None for never.  After a quarter of it this side sends a sign of
            life, so two aiordma programs that have nothing to send stay connected; another program
            that uses rsockets has to send something.
    """

    receive_buffer_size: Annotated[int, Between(4096, 1 << 30)] = 256 * 1024
    send_buffer_size: Annotated[int, Between(4096, 1 << 30)] = 256 * 1024
    iomap_slots: Annotated[int, Between(0, 128)] = 0
    wait: Annotated[str, OneOf(WAITS)] = "event"
    spin_us: Annotated[float, Between(1, 1_000_000)] = 50
    tos: Annotated[int | None, Between(0, 255)] = None
    ack_timeout: Annotated[int, Between(8, 31)] = 16
    close_timeout_s: Annotated[float, SECONDS] = 10.0
    linger_s: Annotated[float, Seconds(zero=True)] = 5.0
    keepalive_s: Annotated[float | None, SECONDS] = 10.0
    idle_timeout_s: Annotated[float | None, SECONDS] = 7200.0

    def __post_init__(self) -> None:
        check_settings(self)
        if self.receive_buffer_size % 2:
            msg = f"receive_buffer_size is {self.receive_buffer_size}: it is used in two halves"
            raise ValueError(msg)


#: The settings of a stream without its own; one object, so that its plan is kept.
DEFAULTS = StreamConfig()
