"""The receiving half of a stream without an adapter: `Stream`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, cast

import pytest

from aiordma._core import STREAM_MESSAGE, STREAM_RECV, SUB_SHIFT, Readable, StreamState
from aiordma._ffi import ffi
from aiordma.rsocket import Hello, Machine, Place
from aiordma.streams.incoming import Incoming

from ..core.completing import QueuePair
from ..core.fake_verbs import Adapter

RING, SLOTS = 64, 8
PEER = Hello(40, 0x10000, 0x77, 2, 0x20000, 0x88, 40)


def _address(memory: Any) -> int:
    return int(ffi.cast("uintptr_t", memory))


class Stream:
    """The receiving half of a stream, whose peer and adapter are the test.

    Attributes:
        form: How the protocol gets its bytes.
        raised: Exceptions of the protocol, of which the transport is notified.
        ended: What came out of the drain, to the loop.
        soon: How often another turn was asked for.
        told: How often Python had to deliver.
        report: Called with an exception of the protocol.
    """

    def __init__(self, form: str, loop: asyncio.AbstractEventLoop) -> None:
        self.form = form
        self.raised: list[BaseException] = []
        self.ended: list[BaseException] = []
        self.soon = self.told = 0
        self.report: Callable[[BaseException], None] = self.raised.append
        self._ring = ffi.new("uint8_t[]", RING)
        self._table = ffi.new("uint8_t[]", 32)
        self._words = ffi.new("uint32_t[]", SLOTS)
        self._own = ffi.new("uint8_t[]", RING + 96)
        self._qp = QueuePair(self._posted, lambda _: None)
        ring = (_address(self._ring), 0x11, RING)
        self.state = StreamState(
            ring=ring, table=_address(self._table), send=(_address(self._own), RING, 0),
            credits=SLOTS, send_depth=10, iwarp=True, inline_size=0, memory=None,
        )  # fmt: skip
        self.state.bind(self._qp.address, 0, _address(self._words), 0, 0)
        machine = Machine(
            ring=Place(*ring), table=Place(_address(self._table), 0x22, 32),
            memory=memoryview(ffi.buffer(self._table)), credits=SLOTS, iwarp=True,
            state=self.state,
        )  # fmt: skip
        machine.meet(PEER.pack())
        machine.open()
        self.machine = machine
        self.loop = loop
        self.incoming = Incoming(self, machine, self)
        self.adapter = Adapter()
        self._queue = self.adapter.queue()
        self._said = self._messages = self._completed = 0
        # Without `run` C gives the protocol nothing.
        run = (lambda function, data: function(data)) if form == "by C" else None
        self.state.attach(self, run, None, None)
        self.adapter.drain.add(0, self.state, cast("Any", self.state))
        self.readable = Readable(self.adapter.drain, self._slow)

    def check(self, code: int) -> None:
        pytest.fail("the stream has no reason to end")

    def _posted(self, _: object) -> None:
        self._messages += 1

    # What C and the receiving half tell a stream

    def _on_events(self, events: int) -> None:
        self.told += 1
        self.incoming.deliver()

    def _on_attention(self) -> None:
        self._soon()

    def _on_raised(self, exc: BaseException) -> None:
        self.report(exc)

    def _soon(self) -> None:
        self.soon += 1

    def _fatal_error(self, exc: BaseException, message: str) -> None:
        self.report(exc)

    def close(self) -> None:
        self.check(0)

    def _slow(self) -> None:
        """What the channel does with an exception: it is the loop's."""
        try:
            self.adapter.drain.drain()
        except BaseException as exc:
            self.ended.append(exc)

    def lay(self, data: bytes) -> None:
        """The bytes of one message land, and the word that follows completes a receive."""
        at = self._said % RING
        assert at + len(data) <= RING
        ffi.memmove(self._ring + at, data, len(data))
        slot = self._said % SLOTS
        self._words[slot] = len(data)
        self._said += len(data)
        self._queue.complete((STREAM_RECV | slot) << SUB_SHIFT, length=4)

    def say(self, data: bytes) -> None:
        """The same, and the loop calls the drain."""
        self.lay(data)
        self.drain()

    def drain(self) -> None:
        """As the loop does it, which is the running loop meanwhile: it may resume a task."""
        outside = asyncio._get_running_loop()
        asyncio._set_running_loop(self.loop)
        try:
            self.readable.run()
        finally:
            asyncio._set_running_loop(outside)

    def open(self) -> None:
        """Let a `write` send from now on."""
        self.state.hold(False)

    def send(self, data: bytes) -> None:
        """The same as `say` of a peer that has room for half of the ring at a time."""
        while data:
            if self._messages > self._completed:  # a completion stands for all before it
                self._completed = self._messages
                self._queue.complete((STREAM_MESSAGE | (self._messages - 1)) << SUB_SHIFT)
                self.drain()
            length = min(len(data), RING // 2 - self._said % (RING // 2))
            self.lay(data[:length])
            self.drain()
            data = data[length:]

    def free(self) -> None:
        """Close the descriptors."""
        os.close(self.adapter.read_fd)
        os.close(self.adapter.write_fd)

    def forget(self) -> None:
        """As at the end: nothing leads to the state any more but its caller."""
        self.adapter.drain.remove(0)
        self.incoming.part()
        self.report = lambda _: None
        self.state.deliver_to(None, False)
        self.state.attach(None, None, None, None)
        del self.incoming, self.state, self.readable
