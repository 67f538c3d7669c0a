"""The common parts of the measurements of streams.

A stream has no messages, so their size is agreed on before.  The last message of a bandwidth test
ends with another byte than the others, and the server answers it: so the client's clock stops when
everything has arrived, however much that is.
"""

from __future__ import annotations

import asyncio

from aiordma.streams.stream_config import StreamConfig

__all__ = ["ALL_HERE", "STREAM_CONFIG", "ended", "fail", "last"]

#: No keepalive: no packet goes beside the measured ones.
STREAM_CONFIG = StreamConfig(keepalive_s=None)

#: The server's answer when everything has arrived.
ALL_HERE = b"\x06"
_LAST = 1


def last(size: int) -> bytes:
    """The last message of a bandwidth test; the others are zeros."""
    return bytes(size - 1) + bytes([_LAST])


def ended(data: bytes | bytearray | memoryview) -> bool:
    """Whether data that has arrived ends with the last message."""
    return bool(data) and data[-1] == _LAST


def fail(future: asyncio.Future[None], exc: Exception | None) -> None:
    """The connection has ended before `future` was done."""
    if not future.done():
        future.set_exception(exc or ConnectionResetError("the connection has ended"))
        future.exception()  # it may be that no task waits for it
