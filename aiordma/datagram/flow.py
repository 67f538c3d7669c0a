"""FlowControl: `pause_writing` and `resume_writing` of a protocol, by asyncio's rules."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["FlowControl", "tell_protocol"]

_DEFAULT_HIGH = 64 * 1024


class FlowControl:
    """Pauses a protocol when too many bytes wait to be sent, and resumes it when few wait.

    The water marks work as in `asyncio.WriteTransport.set_write_buffer_limits`: above the high one
    the protocol is paused, once, and at the low one or below it goes on.

    Args:
        loop: Its exception handler reports an exception of the protocol.
        transport: The transport, for the exception handler.
        protocol: The protocol to pause and resume.
    """

    __slots__ = ("_loop", "_protocol", "_transport", "high", "low", "paused", "size")

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: Any, protocol: Any) -> None:
        self._loop = loop
        self._transport = transport
        self._protocol = protocol
        self.size = 0
        self.paused = False
        self.high = _DEFAULT_HIGH
        self.low = _DEFAULT_HIGH // 4

    def set_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the water marks, bytes; without `high` it is four times `low`, or 64 KiB.

        Raises:
            ValueError: Not 0 <= low <= high.
        """
        if high is None:
            high = _DEFAULT_HIGH if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            msg = f"high ({high!r}) must be >= low ({low!r}) must be >= 0"
            raise ValueError(msg)
        self.high, self.low = high, low
        self._pause_if_full()

    def set_protocol(self, protocol: Any) -> None:
        """Pause and resume another protocol from now on."""
        self._protocol = protocol

    def add(self, size: int) -> None:
        """Count `size` bytes in that wait to be sent."""
        self.size += size
        self._pause_if_full()

    def remove(self, size: int) -> None:
        """Count `size` bytes out."""
        self.size -= size
        if self.paused and self.size <= self.low:
            self.paused = False
            self._tell("resume_writing")

    def _pause_if_full(self) -> None:
        if self.size > self.high and not self.paused:
            self.paused = True
            self._tell("pause_writing")

    def _tell(self, name: str) -> None:
        tell_protocol(self._loop, self._transport, self._protocol, name)


def tell_protocol(
    loop: asyncio.AbstractEventLoop, transport: Any, protocol: Any, name: str, *args: Any
) -> None:
    """Call a method of a protocol; the loop reports an exception, as it does with asyncio's own."""
    try:
        getattr(protocol, name)(*args)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as exc:
        loop.call_exception_handler({
            "message": f"protocol.{name}() failed",
            "exception": exc,
            "transport": transport,
            "protocol": protocol,
        })  # fmt: skip
