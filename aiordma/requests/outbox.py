"""Outbox: short frames that no task of the program waits for: refusals, cancellations, grants.

A frame is sent at once where there is room; else it waits, in order, for a task that exists as long
as frames wait.  So the reader of a connection never waits for room.  The number of frames that wait
is bounded by the numbers that `Served` and `Calls` have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiordma.loop import background
from aiordma.requests.wire import Carrier

__all__ = ["Outbox"]


class Outbox:
    """The frames of one connection that wait for room."""

    __slots__ = ("_carrier", "_frames", "_loop", "_sender", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, carrier: Carrier) -> None:
        self._loop = loop
        self._carrier = carrier
        self._sender = carrier._frame_sender
        self._frames: deque[tuple[bytes, Callable[[], object] | None]] = deque()
        self._task: asyncio.Task[None] | None = None

    def post(self, data: bytes, sent: Callable[[], object] | None = None) -> None:
        """Send a frame that fits into a slot, as soon as there is room.

        Args:
            data: The frame.
            sent: Called when it is sent; not if the connection ends before.
        """
        if self._carrier.is_closing():
            return
        if not self._frames:
            code = self._sender(data, None)
            if code == 0 and sent is not None:
                sent()
            if code > 0:
                self._carrier._frame_failed(code)
            if code >= 0:
                return
        self._frames.append((data, sent))
        if self._task is None:
            self._task = background.start(self._loop, self._run)

    async def sent(self, limit_s: float) -> None:
        """Wait for so many seconds until no frame waits for room.  Cancellation: ends the wait."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit_s)

    async def _run(self) -> None:
        try:
            while self._frames:
                data, sent = self._frames[0]
                await self._carrier._send_frame(data, None)
                self._frames.popleft()
                if sent is not None:
                    sent()
        except Exception as exc:
            # A frame that the peer never gets would leave a number taken for ever.
            if not self._carrier.is_closing():
                self._carrier._break_requests(exc)
        finally:
            self._frames.clear()
            self._task = None
