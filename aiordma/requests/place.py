"""Place: memory of the program for the answer to one request.

Theory of operation
    An answer that does not fit into a slot is a message of its own, and has the number of the
    request as its immediate.  The carrier knows the immediate when the answer is announced, before
    a byte of it is read; it finds the place by the number, and offers the answer to the task that
    has the place.  The task itself has it read.  So a task that leaves takes its memory along: it
    waits until nothing writes there any more.

    Any other answer arrives as a message: a short answer, or an answer that the carrier copies in
    any case.  The task copies it.  An answer that is larger than the memory stays a message.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiordma._core import Message
from aiordma.errors import MessageTooLargeError

__all__ = ["COPY_STEP", "Filling", "Place"]

#: Bytes of a large message that are copied at a time.
COPY_STEP = 1 << 20


class Filling(Protocol):
    """An answer that the carrier has announced, and not begun to read."""

    async def fill(self, view: memoryview) -> bool:
        """Read it into this memory; False: it comes as a message, or the connection is over.

        Cancellation: the answer is dropped; ends when nothing writes to the memory any more.
        """

    def leave(self) -> None:
        """Drop it; instead of `fill`."""


class Place:
    """The memory for one answer.

    Args:
        loop: The connection's loop.
        view: The memory.

    Attributes:
        left: Whether the task has left.
        size: Bytes of the answer that was read into the memory; 0 if it comes as a message.
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
        """Whether an answer of so many bytes may be offered."""
        return not (self.left or self._offered) and length <= len(self._view)

    def offer(self, filling: Filling, length: int) -> None:
        """Offer the answer to the task."""
        self._filling, self._length, self._offered = filling, length, True
        self._wake(None)

    def _wake(self, _: object) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    async def answered(self, answer: asyncio.Future[Message]) -> Message:
        """Wait for the answer, and have it read into the memory if it is offered.

        Raises:
            BaseException: As the future.

        Cancellation: `leave` has to follow.
        """
        answer.add_done_callback(self._wake)
        try:
            await self._ready
            if self._filling is not None and not answer.done():
                filling, self._filling = self._filling, None
                if await filling.fill(self._view):
                    self.size = self._length
            return await answer
        finally:
            del answer  # its exception has this frame: a cycle

    def leave(self) -> None:
        """The task waits no more; an answer that was offered and not read is dropped."""
        self.left = True
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.leave()

    async def take(self, message: Message) -> int:
        """Take the answer, by a copy if it is not there yet; returns its bytes.

        Raises:
            MessageTooLargeError: It has more bytes than the memory; it is `answer` of the error.

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
                        await asyncio.sleep(0)  # each copy holds up the loop
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
