"""Protocols that write down every call, and hold the order of the calls against the contract.

A call that is wrong in every check (a second `connection_made`, data after `connection_lost`, data
while reading is paused) is noted in `violations`, which every check has to leave empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

__all__ = ["BufferedRecorder", "Record", "Recorder"]


class Record(asyncio.BaseProtocol):
    """The base of the two kinds of protocol: the calls, the arrived bytes, and the wait for them.

    Attributes:
        name: of this end, for messages.
        on: functions by the name of the call; a function is called with the call's arguments after
            the call was noted, and its result is the call's result. May be changed at any time.
        calls: names of all calls so far.
        received: all bytes that arrived.
        violations: broken rules.
        lost: the argument of `connection_lost`, once `is_lost`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.on: dict[str, Callable[..., Any]] = {}
        self.calls: list[str] = []
        self.received: bytearray = bytearray()
        self.violations: list[str] = []
        self.lost: BaseException | None = None
        self.is_paused: bool = False
        self._reading_at_eof: bool | None = None
        self._transport: asyncio.Transport | None = None
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    @property
    def transport(self) -> asyncio.Transport:
        """The transport; `connection_made` has been called."""
        assert self._transport is not None, f"{self.name}: connection_made was not called"
        return self._transport

    @property
    def is_made(self) -> bool:
        """Whether `connection_made` was called."""
        return self._transport is not None

    @property
    def is_lost(self) -> bool:
        """Whether `connection_lost` was called."""
        return "connection_lost" in self.calls

    @property
    def has_eof(self) -> bool:
        """Whether `eof_received` was called."""
        return "eof_received" in self.calls

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked after every call of the protocol."""
        if condition():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, future)
        self._waiters.append(entry)
        try:
            await future
        finally:
            if entry in self._waiters:
                self._waiters.remove(entry)

    async def until_received(self, count: int) -> None:
        """Wait until at least `count` bytes have arrived."""
        await self.until(lambda: len(self.received) >= count)

    async def until_lost(self) -> None:
        """Wait for `connection_lost`."""
        await self.until(lambda: self.is_lost)

    def forget(self) -> None:
        """Let go of the transport, so that nothing here keeps it alive."""
        self._transport = None

    def describe(self) -> str:
        """One line for a message."""
        calls = self.calls if len(self.calls) <= 12 else [*self.calls[:6], "...", *self.calls[-6:]]
        return f"{self.name}: {len(self.received)} bytes, lost={self.lost!r}, calls {calls}"

    def note(self, call: str, *arguments: Any) -> Any:
        """Note a call, answer it by the function in `on`, and wake the tasks that wait."""
        self._judge(call)
        self.calls.append(call)
        if call.endswith("_writing"):
            self.is_paused = call == "pause_writing"
        try:
            answer = self.on.get(call)
            return None if answer is None else answer(*arguments)
        finally:
            for entry in self._waiters[:]:
                if entry[0]():
                    self._waiters.remove(entry)
                    if not entry[1].done():
                        entry[1].set_result(None)

    def judge_end(self, reading: bool) -> None:
        """Note it if `is_reading` said anything but `reading` within `eof_received`."""
        if self._reading_at_eof not in (None, reading):
            self.violations.append(f"is_reading() was {not reading} within eof_received")

    def _judge(self, call: str) -> None:
        """Note the rules that this call breaks."""
        if self.is_lost:
            self.violations.append(f"{call} after connection_lost")
        elif call == "connection_made":
            if self.calls:
                self.violations.append(f"connection_made after {self.calls}")
        elif "connection_made" not in self.calls:
            self.violations.append(f"{call} before connection_made")
        elif call in ("data_received", "get_buffer", "buffer_updated", "eof_received"):
            if self.has_eof:
                self.violations.append(f"{call} after eof_received")
            elif self.transport.is_closing():
                self.violations.append(f"{call} after close")
            elif call == "eof_received":
                self._reading_at_eof = self.transport.is_reading()
            elif call != "buffer_updated" and not self.transport.is_reading():
                self.violations.append(f"{call} while reading is paused")
        elif call == "pause_writing" and self.is_paused:
            self.violations.append("pause_writing twice")
        elif call == "resume_writing" and not self.is_paused:
            self.violations.append("resume_writing without pause_writing")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        # uvloop's transport has the methods, but another class.
        self._transport = cast("asyncio.Transport", transport)
        self.note("connection_made", transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio."""
        if not self.is_lost:
            self.lost = exc
        self.note("connection_lost", exc)

    def pause_writing(self) -> None:
        """See asyncio."""
        self.note("pause_writing")

    def resume_writing(self) -> None:
        """See asyncio."""
        self.note("resume_writing")


class Recorder(Record, asyncio.Protocol):
    """A streaming protocol that notes its calls."""

    received: bytearray

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if not data:
            self.violations.append("data_received without data")
        self.received += data
        self.note("data_received", data)

    def eof_received(self) -> bool | None:
        """Return the answer of `on`; without an answer the transport closes, as asyncio's do."""
        answer: bool | None = self.note("eof_received")
        return answer


class BufferedRecorder(Record, asyncio.BufferedProtocol):
    """A protocol with its own receive buffer that notes its calls.

    Args:
        name: of this end.
        size: of the buffer that it offers, in bytes.
    """

    received: bytearray

    def __init__(self, name: str, size: int = 4096) -> None:
        super().__init__(name)
        self.buffer: bytearray = bytearray(size)

    def get_buffer(self, sizehint: int) -> Any:
        """Return the answer of `on`, or the buffer."""
        if not isinstance(sizehint, int):
            self.violations.append(f"get_buffer({sizehint!r})")
        answer = self.note("get_buffer", sizehint)
        return self.buffer if answer is None else answer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        if not 0 < nbytes <= len(self.buffer):
            self.violations.append(f"buffer_updated({nbytes}) of {len(self.buffer)}")
        self.received += self.buffer[:nbytes]
        self.note("buffer_updated", nbytes)

    def eof_received(self) -> bool | None:
        """Return the answer of `on`; without an answer the transport closes."""
        answer: bool | None = self.note("eof_received")
        return answer
