"""Two exchanges joined in memory: messages arrive in order, and room is what a test gives."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from types import EllipsisType
from typing import Any

from aiordma._core import Message
from aiordma.errors import (
    ConnectionEndedError,
    ConnectionLostError,
    MessageTooLargeError,
    ResourceClosedError,
)
from aiordma.memory.governor import Lease
from aiordma.requests.exchange import Exchange
from aiordma.requests.served import Requests
from aiordma.requests.wire import BODY_FOLLOWS, Kind, frame

ROOM = 256
LARGEST = 1 << 20
#: What calls hold when none is under way.
NOTHING = (0, 0, 0)
#: More than there is room for.
LARGE = bytes(range(256)) * 8


class End:
    """A connection, as its requests see it.

    Attributes:
        credits: Messages that it may send; None for any number.
        sent: All that it has sent: bytes, immediate.
        cause: The reason for which its requests ended it.
        stopping: Whether the peer serves no further request.
    """

    def __init__(self, lease: Lease | None = None, limit_s: float | None = None) -> None:
        self.lease = lease
        self._request_timeout_s = limit_s
        self._message_state = None
        self.loop = asyncio.get_running_loop()
        self.peer: End | None = None
        self.credits: int | None = None
        self.sent: list[tuple[bytes, int | None]] = []
        self.cause: BaseException | None = None
        self.over: BaseException | None = None
        self.stopping = False
        self._inbox: deque[Message] = deque()
        self._room = asyncio.Event()
        self._line = asyncio.Lock()
        self.exchange = Exchange(self.loop, self)

    # What the exchange asks for

    def _connection(self) -> None:
        return None

    def _send_frame(self, data: Any, imm: int | None) -> Any:
        return self._send(data, imm)

    async def _send(self, data: Any, imm: int | None) -> None:
        async with self._line:
            if len(data) > self._frame_room:
                await asyncio.sleep(0)  # as a large message, of which the peer may get all
                self._put(data, imm)
                await asyncio.sleep(0)
                return
            while not self._may_send():
                self._room.clear()
                await self._room.wait()
            self._put(data, imm)

    def _may_send(self) -> bool:
        if self.over is not None:
            raise self.failure()
        return self.credits is None or self.credits > 0

    def _put(self, data: Any, imm: int | None) -> None:
        if self.over is not None:
            raise self.failure()
        if self.credits is not None:
            self.credits -= 1
        self.sent.append((bytes(data), imm))
        if self.peer is not None:
            self.peer.arrive(bytes(data), imm)

    def _frame_sender(self, data: bytes, _: None) -> int:
        if self.over is not None or self._line.locked() or not self._may_send():
            return -1
        self._put(data, None)
        return 0

    def _next_frame(self) -> Message | None:
        if not self._inbox and self.over is not None:
            raise self.failure()
        return self._inbox.popleft() if self._inbox else None

    def _require_size(self, size: int) -> None:
        if size > LARGEST:
            msg = f"{size} bytes"
            raise MessageTooLargeError(msg)

    def _frame_failed(self, code: int) -> None:
        raise AssertionError(code)

    def _break_requests(self, cause: BaseException) -> None:
        self.cause = cause
        self.end(cause)

    @property
    def _frame_room(self) -> int:
        return ROOM

    @property
    def _request_lease(self) -> Lease | None:
        return self.lease

    def is_closing(self) -> bool:
        return self.over is not None

    def _note_stopping(self) -> None:
        self.stopping = True

    # What a test does

    def failure(self) -> BaseException:
        assert self.over is not None
        if isinstance(self.over, ResourceClosedError):
            return ResourceClosedError(errno.ECONNABORTED, "closed")
        if isinstance(self.over, ConnectionEndedError):
            return self.over
        return ConnectionLostError(errno.ECONNRESET, "lost")

    def end(self, cause: BaseException | None = None) -> None:
        """The connection is over: lost, by default."""
        if self.over is None:
            self.over = cause or ConnectionLostError(errno.ECONNRESET, "lost")
            self.loop.call_soon(self.exchange.read)
            self._room.set()

    def arrive(self, data: bytes, imm: int | None = None) -> None:
        """A message of the peer."""
        self._inbox.append(Message(memoryview(data), imm))
        self.loop.call_soon(self.exchange.read)

    def ask(self, number: int, body: bytes) -> None:
        """A request of the peer with a body of its own."""
        self.arrive(frame(Kind.REQUEST, number, flags=BODY_FOLLOWS))
        self.arrive(body, number)

    def give(self, credits: int | None) -> None:
        """Room for so many more messages; None for any number."""
        if credits is None or self.credits is None:
            self.credits = None  # also for a timer that is late
        else:
            self.credits += credits
        self._room.set()

    async def request(self, data: Any, timeout: float | EllipsisType | None = None) -> bytes:
        return bytes(await self.exchange.calls.request(data, timeout))

    def requests(self, limit: int = 256, limit_bytes: int = 1 << 20) -> Requests:
        self.exchange.served.grant(limit, limit_bytes)
        return Requests(self.exchange.served)


async def lone(limit_s: float | None = None) -> End:
    """An end whose peer is the test; its calls have a limit by default."""
    return End(limit_s=limit_s)


async def joined(lease: Lease | None = None) -> tuple[End, End]:
    """Client, server; the server has a lease of a budget."""
    client, server = End(), End(lease)
    client.peer, server.peer = server, client
    return client, server


async def part(*ends: End) -> None:
    """Close the ends, and see that no task is left."""
    for end in ends:
        end.end(ResourceClosedError(errno.ECONNABORTED, "closed"))
    for _ in range(10):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left


async def echo(requests: Requests) -> None:
    """Answer each request with its own bytes."""
    async for request in requests:
        await request.reply(request.body)
