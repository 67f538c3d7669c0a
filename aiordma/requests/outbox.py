"""Outbox: sends short frames that no task of the program waits for: ERROR, CANCEL and GRANT.

If there is room, a frame is sent at once.  Otherwise it is queued, and a task that exists as long
as the queue is not empty sends it.  So the task that reads from a connection never has to wait for
room.  The limits of `Served` and `Calls` bound the length of the queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiordma.loop import background
from aiordma.requests.wire import Carrier

__all__ = ["Outbox"]


class Outbox:
    """The short frames of one connection that wait for room."""

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
            sent: Called when the frame was sent; never, if the connection ends before.
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
        """Wait `limit_s` seconds for the queue to become empty.  Cancellation: ends the wait."""
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
            # A number whose final frame never reaches the peer would stay in use forever.
            if not self._carrier.is_closing():
                self._carrier._break_requests(exc)
        finally:
            self._frames.clear()
            self._task = None
