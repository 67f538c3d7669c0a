"""A fake adapter that the C of a connection posts to and completes at; see fabric.

`FakeLink` has everything go through Python.  Here a queue pair stands behind the state, which hands
on what C posts; and completions are offered to C first.  What the model checks at every frame and
every receive it checks of C's, too, and whether the key is that of the slot's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiordma._core import SUB_RECV, SUB_SHIFT
from aiordma._ffi import ffi
from aiordma.endpoint.config import ConnectionConfig
from aiordma.verbs.enums import WCOpcode

from ..core.completing import Completing, QueuePair
from ..memory.fake_memory import AnyFakeArena, FakeElastic
from .fabric import FakeLink

__all__ = ["FastLink"]


def _address(arena: AnyFakeArena) -> int:
    # The arena keeps the bytes; a view of cffi's in a cycle is what Python crashes over.
    return int(ffi.cast("uintptr_t", ffi.from_buffer(arena.view)))


class FastLink(FakeLink):
    """As FakeLink, but what is plain is done in C.

    Attributes:
        sent_by_c: Messages.
        taken_by_c: Completions.
    """

    def __init__(
        self, config: ConnectionConfig, arenas: tuple[AnyFakeArena, AnyFakeArena] | None = None
    ) -> None:
        super().__init__(config, arenas)
        self.sent_by_c = self.taken_by_c = 0
        self._qp = QueuePair(self._send, self._receive)
        crowded = 0
        if isinstance(self.recv, FakeElastic):
            crowded = int(ffi.cast("uintptr_t", self.recv.crowded))
        self._send_at, self._recv_at = _address(self.send), _address(self.recv)
        self.state.bind(
            self._qp.address, 0, 0,
            (self._send_at, self.send.slot_size, self.send.lkey, self.send.count),
            (self._recv_at, self.recv.slot_size, self.recv.lkey, self.recv.count),
            crowded,
        )  # fmt: skip
        self.fit()
        self._completing = Completing(self.state)
        self._on_news: Callable[[int], None] = lambda news: None

    def start(
        self,
        on_frame: Callable[[int, Any], None],
        on_sent: Callable[[int], None],
        on_read: Callable[[int], None],
        on_failed: Callable[[], None],
        on_ended: Callable[[int, Any], None],
        on_news: Callable[[int], None],
    ) -> None:
        self._on_news = on_news
        super().start(on_frame, on_sent, on_read, on_failed, on_ended, on_news)

    def fit(self) -> None:
        for receives, arena in ((True, self.recv), (False, self.send)):
            if isinstance(arena, FakeElastic):
                self.state.fit(receives, arena.step, arena.keys, arena.some_leave, arena.full)

    # What C posts

    def _send(self, wr: Any) -> None:
        slot = wr.wr_id >> SUB_SHIFT
        self._check(self.send, self._send_at, slot, wr.sg_list[0])
        self.sent_by_c += 1
        self.post_send(slot, wr.sg_list[0].length)

    def _receive(self, wr: Any) -> None:
        while wr:
            slot = wr.wr_id >> SUB_SHIFT & ~SUB_RECV
            self._check(self.recv, self._recv_at, slot, wr.sg_list[0])
            assert wr.sg_list[0].length == self.recv.slot_size
            self.post_recv([slot])
            wr = wr.next

    def _check(self, arena: AnyFakeArena, start: int, slot: int, sge: Any) -> None:
        assert sge.addr == start + slot * arena.slot_size
        assert sge.lkey == arena.key(slot), "the key of other memory"

    def fail(self, cause: BaseException) -> None:
        super().fail(self._qp.wrong or cause)

    # What the adapter does

    def process(self) -> None:
        slot, length, _ = self.landed[0]
        if self._taken((SUB_RECV | slot) << SUB_SHIFT, WCOpcode.RECV, length):
            self.landed.popleft()
        else:
            super().process()

    def acknowledge(self) -> None:
        slot = self.unacked[0]
        self.busy.discard(slot)
        if self._taken(slot << SUB_SHIFT, WCOpcode.SEND, 0):
            self.unacked.popleft()
        else:
            super().acknowledge()

    def _taken(self, wr_id: int, opcode: WCOpcode, length: int) -> bool:
        wc = ffi.new("struct ibv_wc *")
        wc.wr_id, wc.opcode, wc.byte_len = wr_id, int(opcode), length
        if not self._completing.take(wc):
            return False
        self.taken_by_c += 1
        if events := self._completing.events:
            self._completing.events = 0
            self.loop.call_soon(self._on_news, events)
        return True

    def sweep(self) -> None:
        super().sweep()
        while self.unacked:
            self.acknowledge()
