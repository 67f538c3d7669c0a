"""The forms of a connection: on the State in Python, on C's, and with words that C takes.

A module that uses the fixture `form` of conftest.py runs with each of them; `new` makes a
connection of the form whose turn it is.  `Compiled` gives the commands that a transport gives, and
its posts are those that an adapter would get.
"""

from __future__ import annotations

import ctypes
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from aiordma._core import (
    STREAM_CONTROL_SIZE,
    STREAM_CONTROLS,
    STREAM_MESSAGE,
    STREAM_RECV,
    SUB_SHIFT,
    StreamState,
)
from aiordma._ffi import ffi, lib
from aiordma.rsocket import Place
from aiordma.rsocket.wire import MAX_VALUE

from ..core.completing import Completing, QueuePair
from .whole import Connection, Post, Whole

__all__ = ["FORMS", "Compiled", "Drained", "memory_of", "new", "of_turn", "post_of"]

#: Python alone; C; and each word offered to the drain before Python has it.
FORMS = ("plain", "compiled", "drained")
#: Bytes of a ring for sending that has room for the longest message.  It is nowhere, because all
#: bytes go in the requests themselves.
_SEND = 4 * MAX_VALUE

of_turn = FORMS[0]


def new(
    *,
    ring: Place,
    table: Place,
    memory: memoryview,
    credits: int,
    send_depth: int,
    iwarp: bool = False,
) -> Connection:
    """A connection of the form whose turn it is."""
    kinds: dict[str, Callable[..., Connection]]
    kinds = {"plain": Whole, "compiled": Compiled, "drained": Drained}
    return kinds[of_turn](
        ring=ring,
        table=table,
        memory=memory,
        credits=credits,
        send_depth=send_depth,
        iwarp=iwarp,
    )


def memory_of(size: int, key: int) -> tuple[Place, Any]:
    """Memory that a connection reads, and its place."""
    memory = ffi.new("uint8_t[]", size)
    return Place(int(ffi.cast("uintptr_t", memory)), key, size), ffi.buffer(memory)


def post_of(wr: Any, iwarp: bool) -> Post:
    """The message of a `struct ibv_send_wr *`: on iWARP the word follows in a second request."""
    data, wrs = wr, 1
    if wr.opcode == lib.IBV_WR_RDMA_WRITE:
        wr, wrs = wr.next, 2
    if iwarp:
        assert wr.opcode == lib.IBV_WR_SEND
        word = int(ffi.cast("uint32_t *", wr.sg_list.addr)[0])
    else:
        word = socket.ntohl(wr.imm_data)
    if data.opcode == lib.IBV_WR_SEND or not data.num_sge:
        return Post(0, 0, 0, word, b"", wrs)
    piece, rdma = data.sg_list, data.wr.rdma
    payload = b""
    if word > MAX_VALUE:
        payload = bytes(ffi.buffer(ffi.cast("char *", piece.addr), piece.length))
    return Post(rdma.remote_addr, rdma.rkey, piece.length, word, payload, wrs)


class Compiled(Connection):
    """On a `StreamState`, by the commands of a transport."""

    __slots__ = ("_completed", "_counts", "_kept", "_words", "state")

    def __init__(
        self,
        *,
        ring: Place,
        table: Place,
        memory: memoryview,
        credits: int,
        send_depth: int,
        iwarp: bool,
    ) -> None:
        controls = ffi.new("uint8_t[]", STREAM_CONTROLS * STREAM_CONTROL_SIZE)
        self._words = ffi.new("uint32_t[1]")
        posted: deque[Post] = deque()
        self.posted = posted
        self._completed = 0
        counts = self._counts = [0]

        def note(wr: Any) -> None:
            counts[0] += 1
            posted.append(post_of(wr, iwarp))

        qp = QueuePair(note, lambda _: None)
        self.state = StreamState(
            ring=(ring.addr, ring.key, ring.size),
            table=ctypes.addressof(ctypes.c_char.from_buffer(memory)),
            send=(int(ffi.cast("uintptr_t", controls)) - _SEND, _SEND, 0), credits=credits,
            send_depth=send_depth, iwarp=iwarp, inline_size=MAX_VALUE, memory=None,
        )  # fmt: skip
        words = int(ffi.cast("uintptr_t", self._words)) if iwarp else 0
        assert self.state.bind(qp.address, 0, words, 0, 0) == 0
        self.state.hold(False)
        self._kept = memory, controls, qp
        super().__init__(
            ring=ring, table=table, memory=memory, credits=credits, iwarp=iwarp, state=self.state
        )

    def on_sent(self, post: Post) -> None:
        sub = STREAM_MESSAGE | self._completed & 0x3FFF
        self._completed += 1
        words = self.state.complete_send(sub, False)
        assert words == ([post.word] if post.word > MAX_VALUE else [])
        for word in words:
            self.completed(word)

    @property
    def readable(self) -> int:
        return self.state.readable

    @property
    def room(self) -> int:
        return self.state.next_place()[1]

    @property
    def idle(self) -> bool:
        return self._completed == self._counts[0]

    def _read(self, length: int) -> bytes:
        data = self.state.cut(length)
        assert data is not None
        return data

    def _write(self, length: int) -> Post:
        assert self.state.send(bytes(length)) == length
        return self.posted.pop()


class Drained(Compiled):
    """As a port has it: a word completes a receive, and goes to Python if C does not take it.

    Attributes:
        taken: Words that C has taken.
    """

    __slots__ = ("_completing", "taken")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._completing = Completing(self.state)
        self.taken = 0

    def on_word(self, word: int) -> None:
        wc = ffi.new("struct ibv_wc *")
        wc.wr_id, wc.byte_len = STREAM_RECV << SUB_SHIFT, 4
        wc.imm_data, wc.wc_flags = socket.htonl(word), 2
        self._words[0] = word
        if self._completing.take(wc):
            self.taken += 1
            return
        assert self.state.complete_receive(0, False) == 0
        super().on_word(word)
