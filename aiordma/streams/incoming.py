"""Incoming: the received bytes of a stream, from the ring to the protocol.

Theory of operation
    Bytes are copied out of the ring, the room is given back to the peer, and then the protocol is
    called: so a protocol that takes its time does not hold up the peer, and a protocol that raises
    loses nothing but its own connection.

    A task in `wait` (of our own reader) gets the bytes without the protocol: as long as it waits,
    they are left in the ring for it.  It says how many it wants, and C keeps silent until they are
    there, or until the peer needs room or credits to send more.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from aiordma._core import StreamState, Wakeup
from aiordma.arguments import refuse_objects
from aiordma.rsocket.machine import Machine

__all__ = ["Incoming"]

_BUDGET = 256 * 1024  # bytes that a protocol is given before other tasks have a turn


class Port(Protocol):
    """The port of a stream, as its receiving half sees it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The stream's."""

    @property
    def state(self) -> StreamState:
        """The numbers of the stream."""

    def check(self, code: int) -> None:
        """End the stream if `code` is the errno of a post that was refused."""


class Receiving(Protocol):
    """A stream, as its receiving half sees it."""

    def _soon(self) -> None:
        """Call `Incoming.deliver` in the loop's next turn."""

    def _fatal_error(self, exc: BaseException, message: str) -> None:
        """A callback of the protocol has raised `exc`; `message` describes it."""

    def close(self) -> None:
        """The protocol does not want to stay open after the peer's end."""


class Incoming:
    """The receiving half of a stream.

    Args:
        port: Owner of the ring.
        machine: Knows whether more will come.
        stream: The stream; its methods are called until `part`.

    Attributes:
        paused: Whether the program wants no bytes now.
        eof_given: Whether `eof_received` of the protocol was called.
        wakeup: Resumes the task that waits for bytes.
    """

    __slots__ = (
        "_buffered", "_end_is_due", "_end_is_next", "_machine", "_port", "_protocol", "_stream",
        "eof_given", "paused", "state", "wakeup",
    )  # fmt: skip

    def __init__(self, port: Port, machine: Machine, stream: Receiving) -> None:
        self._port = port
        self.state: StreamState = port.state
        self._machine = machine
        self._stream: Receiving | None = stream
        self._protocol: Any = None
        self._buffered = False
        self.paused: bool = False
        self.wakeup: Wakeup = self.state.park(port.loop)
        self.eof_given: bool = False
        self._end_is_next = self._end_is_due = False

    def set_protocol(self, protocol: Any) -> None:
        """Call another protocol from now on."""
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self._choose()

    def pause(self, paused: bool) -> None:
        """Say whether the program wants no bytes now."""
        self.paused = paused
        if not paused:
            self.eof_given = False  # as over TCP: a new protocol gets `eof_received`, too
        self._choose()

    def stop(self) -> None:
        """Give the program no further bytes."""
        self.state.stop()

    def _choose(self) -> None:
        self.state.deliver_to(None if self._buffered else self._protocol, self.paused)

    @property
    def waiting(self) -> bool:
        """Whether a task waits for bytes."""
        return self.state.waiting

    def part(self) -> None:
        """Forget the stream: the connection was given back, and no bytes will arrive."""
        self._stream = None
        self.state.part()

    def _soon(self) -> None:
        if self._stream is not None:
            self._stream._soon()

    def _fatal(self, exc: BaseException, message: str) -> None:
        if self._stream is not None:
            self._stream._fatal_error(exc, message)

    # To the protocol

    def deliver(self) -> bool:
        """Give arrived bytes to task or protocol; return whether another turn is needed."""
        more = False
        if not self.waiting or not self.state.readable:
            more = self._deliver()
        if self.waiting and (self.eof_given or self.enough()):
            self.wakeup.wake_soon()
        return more

    def _deliver(self) -> bool:
        state, left = self.state, _BUDGET
        while not (self.paused or state.stopped):
            length = state.readable
            if not length:
                if not self._machine.eof or self.eof_given:
                    return False
                if self._end_is_due:
                    self._give_eof()
                elif not self._end_is_next:
                    # A turn of its own, as over TCP: callbacks of data_received run before.
                    self._end_is_next = True
                    self._port.loop.call_soon(self._turn_of_the_end)
                return False
            if left <= 0:
                return True
            if self._buffered:
                length = self._into_buffer(length)
            else:
                self._call("data_received", state.cut(length))
            left -= length
        return False

    def _turn_of_the_end(self) -> None:
        self._end_is_due = True
        self._soon()

    def _into_buffer(self, length: int) -> int:
        protocol = self._protocol
        try:
            buffer = protocol.get_buffer(-1)
            with memoryview(buffer) as view:
                refuse_objects("the buffer of get_buffer()", view)
                size = view.nbytes
            if not size:
                msg = "get_buffer() returned an empty buffer"
                raise RuntimeError(msg)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._fatal(exc, "Fatal error: protocol.get_buffer() call failed.")
            return 0
        if self.state.stopped:
            return 0
        try:
            length = self._read(buffer, min(length, size))
        except (TypeError, BufferError) as exc:  # `buffer` is read-only
            self._fatal(exc, "Fatal read error on an RDMA stream")
            return 0
        self._call("buffer_updated", length)
        return length

    def _read(self, buffer: Any, length: int) -> int:
        count = self.state.read(buffer, length)
        if self.state.error:
            self._port.check(self.state.error)
        return count

    def _give_eof(self) -> None:
        self.eof_given = True
        try:
            keep_open = self._call("eof_received")
        except BaseException:
            self.eof_given = False  # as over TCP: it is called again when the loop runs again
            raise
        if not keep_open and self._stream is not None:
            self._stream.close()

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._protocol, name)(*args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._fatal(exc, f"Fatal error: protocol.{name}() call failed.")

    # To our own reader

    def some(self, most: int) -> bytes:
        """The bytes that are there, at most so many."""
        readable = self.state.readable
        return (readable and self.state.cut(min(readable, most))) or b""

    def take(self, buffer: memoryview) -> int:
        """Copy arrived bytes straight into `buffer`; return how many."""
        if self.state.stopped or not self.state.readable or not len(buffer):
            return 0
        count = self._read(buffer, len(buffer))
        if self.state.readable:
            self._soon()
        return count

    def enough(self) -> bool:
        """Whether the task that waits has to be woken."""
        return self.state.enough()

    async def wait(self, length: int) -> None:
        """Wait until there are bytes to take, or `eof_received` of the protocol was called.

        Args:
            length: Bytes that are wanted; fewer are possible when the wait is over.

        Bytes that arrive meanwhile are kept from the protocol.

        Raises:
            RuntimeError: A task waits already.
        """
        if self.waiting:
            msg = "another coroutine is already waiting for incoming data"
            raise RuntimeError(msg)
        state = self.state
        if not state.wait_for(length):
            return
        if self._machine.eof:  # the end is near: `_soon` reports it
            self._soon()
        try:
            await self.wakeup
        except BaseException:
            self.canceled()
            raise
        state.done()

    def canceled(self) -> None:
        """The wait was broken off: bytes that have come go to the protocol."""
        self.state.done()
        self._soon()

    def wake(self) -> None:
        """End the wait of `wait`, if there is one."""
        if self.waiting:
            self.wakeup.wake_soon()
