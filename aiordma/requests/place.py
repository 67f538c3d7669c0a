"""Place: memory of the program for the answer to one request.

Theory of operation
    An answer that does not fit into a slot is a message of its own, with the number of the request
    as its immediate.  The connection learns the immediate from the announcement, before any byte is
    read.  It finds the place by the number, and offers the answer to the task that waits there; the
    task itself reads it into the memory.  So when the task is canceled, it can wait until nothing
    writes to the memory any more, before it gives the memory back to the program.

    Any other answer, for instance a short one, arrives as a message, and the task copies it.  An
    answer that is larger than the memory stays a message.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiordma._core import Call, Message
from aiordma.errors import MessageTooLargeError

__all__ = ["COPY_STEP", "Filling", "Place"]

#: How many bytes of a large message are copied before other tasks get a turn.
COPY_STEP = 1 << 20


class Filling(Protocol):
    """An answer that was announced, and can be read into memory of the program."""

    async def fill(self, view: memoryview) -> bool:
        """Read the answer into `view`; False if it comes as a message, or the connection is over.

        Cancellation: the answer is lost.  The call ends when nothing writes to the memory any more.
        """

    def leave(self) -> None:
        """Discard the answer, instead of `fill`."""


class Place:
    """The memory for one answer.

    Args:
        loop: The loop of the connection.
        view: The memory.

    Attributes:
        left: Whether the task no longer waits for the answer.
        size: The size of the answer that was read into the memory; 0 if it comes as a message.
    """

    __slots__ = ("_filling", "_length", "_offered", "_ready", "_view", "left", "size")

    def __init__(self, loop: asyncio.AbstractEventLoop, view: memoryview) -> None:
        self._view = view
        self._ready: asyncio.Future[None] = loop.create_future()
        self._filling: Filling | None = None
        self._offered = False
        self._length = 0
        self.left: bool = False
        self.size: int = 0

    def takes(self, length: int) -> bool:
        """Whether an answer of `length` bytes may be offered."""
        return not (self.left or self._offered) and length <= len(self._view)

    def offer(self, filling: Filling, length: int) -> None:
        """Offer an answer of `length` bytes to the task."""
        self._filling, self._length, self._offered = filling, length, True
        self._wake()

    def _wake(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    async def answered(self, call: Call) -> Message:
        """Wait for the answer, and read it into the memory if it is offered.

        Args:
            call: Gets the answer; after it was read into the memory, a message without it.

        Raises:
            BaseException: The exception of the call.

        Cancellation: ends the wait; the caller has to call `leave`.
        """
        call.call_instead(self._wake)
        try:
            if not call.ended:
                await self._ready
            call.call_instead(None)
            if self._filling is not None and not call.ended:
                filling, self._filling = self._filling, None
                if await filling.fill(self._view):
                    self.size = self._length
            return await call
        finally:
            del call  # the traceback of its exception refers to this frame: a cycle

    def leave(self) -> None:
        """Note that the task no longer waits; an answer that was offered is discarded."""
        self.left = True
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.leave()

    async def take(self, message: Message) -> int:
        """Copy the answer into the memory, unless it is there already, and return its size.

        Raises:
            MessageTooLargeError: The answer is larger than the memory; it is the `answer` of the
                exception.

        Cancellation: the answer is lost.
        """
        if self.size:
            message.release()
            return self.size
        size = len(message)
        if size > len(self._view):
            raise _too_large(message, len(self._view))
        try:
            with memoryview(message) as data:
                for start in range(0, size, COPY_STEP):
                    if start:
                        await asyncio.sleep(0)  # let other tasks run: a copy blocks the loop
                    end = min(start + COPY_STEP, size)
                    self._view[start:end] = data[start:end]
        finally:
            message.release()
        return size


def _too_large(message: Message, room: int) -> MessageTooLargeError:
    hint = "it is the `answer` of this exception"
    text = f"the answer has {len(message)} bytes, the buffer {room} ({hint})"
    error = MessageTooLargeError(text)
    error.hint, error.size, error.answer = hint, len(message), message
    return error
