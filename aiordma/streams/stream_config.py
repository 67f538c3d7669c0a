"""StreamConfig: every number of a stream connection, with its unit."""

from __future__ import annotations

from dataclasses import dataclass

from aiordma.link.config_check import check_numbers, check_seconds, check_wait
from aiordma.verbs.rnr_timer import rnr_timer_code

__all__ = ["DEFAULTS", "StreamConfig"]


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
        recv_depth: Messages that the peer may send ahead, 16 to 16,000.  Each `write` is one or
            more.
        send_depth: Messages of this side that may be on their way, 16 to 16,000.
        iomap_slots: Mappings of its memory that the peer may publish to this side at a time, 0 to
            128; see docs/interop.md.
        wait: How a wait for completions begins. "event": the event loop sleeps until the adapter
            raises an event.  "spin": the completion queue is polled for up to `spin_us` before the
            loop sleeps, which takes a processor.  "adaptive": the same while recent waits were
            shorter than `spin_us`, otherwise as "event".  On a machine with a single processor all
            are as "event".  See docs/connecting.md.
        spin_us: Microseconds of polling in each wait, 1 to 1,000,000.
        tos: Type of service of the packets (IPv4), or traffic class (IPv6), 0 to 255; None for the
            system's.  The connecting side chooses for both.
        min_rnr_timer_ms: Milliseconds that the peer waits when it found no receive posted here,
            0.01 to 655.36.
        ack_timeout: Exponent e of the adapter's acknowledgement timeout, 4.096 us * 2**e; 16 is
            268 ms.  A dead peer is noticed after (retry_count + 1) timeouts.
        retry_count: Retries without acknowledgement, 0 to 6.  7 is refused: on Soft-RoCE it
            means for ever.
        rnr_retry_count: Retries of each side when the other is not ready, 0 to 7; 7 means for
            ever, as rsockets programs have it.
        connect_timeout_s: Seconds for a connection to be made, names and all addresses included;
            the time in which other connects of this loop to the address go first does not count.
        handshake_timeout_s: Seconds that a server gives a client to complete the handshake, in
            which the time does not count that its own loop is late.
        close_timeout_s: Seconds without progress after which `close()` gives up and bytes that were
            not sent are lost.
        linger_s: Seconds in which posted bytes have to arrive after `abort()`, or when the event
            loop ends before the connection; 0 to break the connection at once, which the peer gets
            as `ConnectionLostError`.
        keepalive_s: Seconds of silence after which the peer's adapter is asked for a sign of life;
            None for never.  A host that is gone is noticed so; a program that has stopped is not.
        idle_timeout_s: Seconds without a word of the peer's program after which the connection is
            given up; None for never.  A quarter of it is the time after which this side says a word
            by itself, so that two programs of aiordma that have nothing to say stay connected; a
            foreign program of rsockets has to say something.
    """

    receive_buffer_size: int = 256 * 1024
    send_buffer_size: int = 256 * 1024
    recv_depth: int = 100
    send_depth: int = 60
    iomap_slots: int = 0
    wait: str = "event"
    spin_us: float = 50
    tos: int | None = None
    min_rnr_timer_ms: float = 0.64
    ack_timeout: int = 16
    retry_count: int = 6
    rnr_retry_count: int = 7
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0
    close_timeout_s: float = 10.0
    linger_s: float = 5.0
    keepalive_s: float | None = 10.0
    idle_timeout_s: float | None = 7200.0

    def __post_init__(self) -> None:
        check_numbers(
            self,
            (
                ("receive_buffer_size", 4096, 1 << 30),
                ("send_buffer_size", 4096, 1 << 30),
                ("recv_depth", 16, 16_000),
                ("send_depth", 16, 16_000),
                ("iomap_slots", 0, 128),
                ("ack_timeout", 8, 31),
                ("retry_count", 0, 6),
                ("rnr_retry_count", 0, 7),
                ("tos", 0, 255),
            ),
            optional=("tos",),
        )
        if self.receive_buffer_size % 2:
            msg = f"receive_buffer_size is {self.receive_buffer_size}: it is used in two halves"
            raise ValueError(msg)
        check_wait(self)
        rnr_timer_code(self.min_rnr_timer_ms)
        if self.linger_s != 0:
            check_seconds(self, ("linger_s",))
        check_seconds(
            self,
            (
                "connect_timeout_s", "handshake_timeout_s", "close_timeout_s", "keepalive_s",
                "idle_timeout_s",
            ),
            optional=("keepalive_s", "idle_timeout_s"),
        )  # fmt: skip


#: The settings of a stream without its own; one object, so that its plan is kept.
DEFAULTS = StreamConfig()
