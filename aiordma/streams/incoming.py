"""Incoming: what a stream has received, from the ring to the protocol.

Theory of operation
    Bytes are copied out of the ring, the room is given back to the peer, and then the protocol is
    called: so a protocol that takes its time does not hold up the peer, and one that raises loses
    nothing but its own connection.

    Who waits in `readinto` gets the bytes without the protocol: as long as it waits, they are left
    in the ring for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiordma.rsocket.machine import Machine
from aiordma.streams.stream_port import StreamPort

__all__ = ["Incoming"]

_BUDGET = 256 * 1024  # bytes that a protocol is given before other tasks have a turn


class Incoming:
    """The receiving half of a stream.

    Args:
        port: Has the ring.
        machine: Knows what is in it.
        control: Posts what the peer is to be told.
        fatal: Called with what a callback of the protocol raised, and with words about it.
        close: Called when the protocol does not want to stay open after the peer's end.

    Attributes:
        paused: The program wants no bytes now.
        stopped: It will never want any.
        eof_given: The protocol has heard that there are no more.
    """

    __slots__ = (
        "_buffered", "_close", "_control", "_fatal", "_machine", "_protocol", "_ring", "_taker",
        "eof_given", "paused", "stopped",
    )  # fmt: skip

    def __init__(
        self,
        port: StreamPort,
        machine: Machine,
        control: Callable[[], None],
        fatal: Callable[[BaseException, str], None],
        close: Callable[[], None],
    ) -> None:
        self._ring = port.ring
        self._machine = machine
        self._control = control
        self._fatal = fatal
        self._close = close
        self._protocol: Any = None
        self._buffered = False
        self._taker: asyncio.Future[None] | None = None
        self.paused = False
        self.stopped = False
        self.eof_given = False

    def set_protocol(self, protocol: Any) -> None:
        """Call another protocol from now on."""
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    # To the protocol

    def deliver(self) -> bool:
        """Give what has come to whoever wants it; whether there is more, for another turn."""
        more = False
        if self._taker is None or not self._machine.readable:
            more = self._deliver()
        if self._taker is not None and (self._machine.readable or self.eof_given):
            self.wake()
        return more

    def _deliver(self) -> bool:
        machine, ring, left = self._machine, self._ring, _BUDGET
        while not (self.paused or self.stopped):
            offset, length = machine.peek()
            if not length:
                if machine.eof and not self.eof_given:
                    self._give_eof()
                return False
            if left <= 0:
                return True
            if self._buffered:
                length = self._into_buffer(offset, length)
            else:
                data = bytes(ring[offset : offset + length])
                machine.consume(length)
                self._control()
                self._call("data_received", data)
            left -= length
        return False

    def _into_buffer(self, offset: int, length: int) -> int:
        protocol = self._protocol
        try:
            buffer = protocol.get_buffer(-1)
            size = memoryview(buffer).nbytes
            if not size:
                msg = "get_buffer() returned an empty buffer"
                raise RuntimeError(msg)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._fatal(exc, "Fatal error: protocol.get_buffer() call failed.")
            return 0
        if self.stopped:
            return 0
        length = min(length, size)
        try:
            memoryview(buffer).cast("B")[:length] = self._ring[offset : offset + length]
        except TypeError as exc:  # it can be read only
            self._fatal(exc, "Fatal read error on an RDMA stream")
            return 0
        self._machine.consume(length)
        self._control()
        self._call("buffer_updated", length)
        return length

    def _give_eof(self) -> None:
        self.eof_given = True
        keep_open = self._call("eof_received")
        if not keep_open:
            self._close()

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._protocol, name)(*args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as exc:
            self._fatal(exc, f"Fatal error: protocol.{name}() call failed.")

    # To a reader's own memory

    def take(self, buffer: memoryview) -> int:
        """Copy what has arrived straight into `buffer`; how many bytes that were."""
        machine = self._machine
        done = 0
        while done < len(buffer) and not self.stopped:
            offset, length = machine.peek()
            length = min(length, len(buffer) - done)
            if not length:
                break
            buffer[done : done + length] = self._ring[offset : offset + length]
            machine.consume(length)
            done += length
        if done:
            self._control()
        return done

    async def wait_readable(self) -> None:
        """Wait until there is something to take, or the protocol has heard of the end.

        What arrives meanwhile is kept from the protocol.

        Raises:
            RuntimeError: Somebody waits already.
        """
        if self._taker is not None:
            msg = "another coroutine is already waiting for incoming data"
            raise RuntimeError(msg)
        self._taker = asyncio.get_running_loop().create_future()
        try:
            await self._taker
        finally:
            self._taker = None

    def wake(self) -> None:
        """End the wait of `wait_readable`, if there is one."""
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)
