"""A fake adapter that the lane's C posts to and completes at; see fabric.

`FakeLink` has everything go through Python.  Here a queue pair stands behind the lane, as
libibverbs lays it out, whose two functions hand on what C posts; and completions are offered to C
first.  What the model checks at every frame and every receive it checks of C's, too, and whether
the key is that of the slot's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

from aiordma._ffi import ffi, lib
from aiordma.endpoint.config import ConnectionConfig
from aiordma.verbs.enums import WCOpcode

from .fabric import FakeLink
from .fake_memory import AnyFakeArena

__all__ = ["FastLink"]

_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_RECV = 0x8000
# struct ibv_context: the device, and a table of functions.
_POST_SEND, _POST_RECV = 1 + 25, 1 + 26
_REFUSED = 5


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
        self._wrong: BaseException | None = None
        self._calls = [_POST(self._called(self._send)), _POST(self._called(self._receive))]
        self._context = (ctypes.c_void_p * 64)()
        for place, call in zip((_POST_SEND, _POST_RECV), self._calls, strict=True):
            self._context[place] = ctypes.cast(call, ctypes.c_void_p).value
        self._qp = ffi.new("struct ibv_qp *")
        self._qp.context = ffi.cast("struct ibv_context *", ctypes.addressof(self._context))
        c = self.lane.c
        self.lane.bind(self._qp, cast("Any", self.send), cast("Any", self.recv), 0, 0)
        for slots, arena in ((c.send, self.send), (c.recv, self.recv)):
            # The arena keeps the bytes; a view of cffi's in a cycle is what Python crashes over.
            slots.addr = int(ffi.cast("uintptr_t", ffi.from_buffer(arena.view)))
        self._sink = ffi.cast("struct aio_sink *", c)
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

    # What C posts

    def _called(self, function: Callable[[int], None]) -> Callable[[int, int, int], int]:
        def call(qp: int, wr: int, bad: int) -> int:
            try:
                function(wr)
            except BaseException as exc:  # C has no way to pass it on
                self._wrong = exc
                return _REFUSED
            return 0

        return call

    def _send(self, address: int) -> None:
        wr = ffi.cast("struct ibv_send_wr *", address)
        slot = wr.wr_id >> 24
        self._check(self.send, slot, wr.sg_list[0], self.lane.c.send)
        self.sent_by_c += 1
        self.post_send(slot, wr.sg_list[0].length)

    def _receive(self, address: int) -> None:
        wr = ffi.cast("struct ibv_recv_wr *", address)
        while wr:
            slot = wr.wr_id >> 24 & ~_RECV
            self._check(self.recv, slot, wr.sg_list[0], self.lane.c.recv)
            assert wr.sg_list[0].length == self.recv.slot_size
            self.post_recv([slot])
            wr = wr.next

    def _check(self, arena: AnyFakeArena, slot: int, sge: Any, slots: Any) -> None:
        assert sge.addr == slots.addr + slot * arena.slot_size
        assert sge.lkey == arena.key(slot), "the key of other memory"

    def fail(self, cause: BaseException) -> None:
        super().fail(self._wrong or cause)

    # What the adapter does

    def process(self) -> None:
        slot, length, _ = self.landed[0]
        if self._taken((_RECV | slot) << 24, WCOpcode.RECV, length):
            self.landed.popleft()
        else:
            super().process()

    def acknowledge(self) -> None:
        slot = self.unacked[0]
        self.busy.discard(slot)
        if self._taken(slot << 24, WCOpcode.SEND, 0):
            self.unacked.popleft()
        else:
            super().acknowledge()

    def _taken(self, wr_id: int, opcode: WCOpcode, length: int) -> bool:
        wc = ffi.new("struct ibv_wc *")
        wc.wr_id, wc.opcode, wc.byte_len = wr_id, int(opcode), length
        if not lib.aio_lane_take(self._sink, wc):
            return False
        self.taken_by_c += 1
        if news := self.lane.c.sink.news:
            self.lane.c.sink.news = 0
            self.loop.call_soon(self._on_news, news)
        return True

    def sweep(self) -> None:
        super().sweep()
        while self.unacked:
            self.acknowledge()
