"""The forms of a machine: on the plain State, on C's StreamState, and with words that C takes.

A module that uses the fixture `form` of conftest.py runs with each of them; `new` makes a machine
of the form whose turn it is.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from aiordma._core import STREAM_RECV, SUB_SHIFT, StreamState
from aiordma._ffi import ffi
from aiordma.rsocket import Place

from ..core.completing import Completing, QueuePair
from .whole import Whole

__all__ = ["FORMS", "Drained", "new", "of_turn"]

#: Python alone; the numbers in a C type; and each word offered to the drain before Python has it.
FORMS = ("plain", "compiled", "drained")
_SEND = 64

of_turn = FORMS[0]


def new(
    *,
    ring: Place,
    table: Place,
    memory: memoryview,
    credits: int,
    send_depth: int,
    iwarp: bool = False,
) -> Whole:
    """A machine of the form whose turn it is."""
    kinds: dict[str, Callable[..., Whole]]
    kinds = {"plain": Whole, "compiled": _compiled, "drained": Drained}
    return kinds[of_turn](
        ring=ring,
        table=table,
        memory=memory,
        credits=credits,
        send_depth=send_depth,
        iwarp=iwarp,
    )


def _state(ring: Place, table: Any, credit: int, send_depth: int, iwarp: bool) -> StreamState:
    """A state in C; the ring is nowhere, as no bytes are copied."""
    return StreamState(
        ring=(ring.addr, ring.key, ring.size), table=int(ffi.cast("uintptr_t", table)),
        send=(0, _SEND, 0), credits=credit, send_depth=send_depth, iwarp=iwarp, inline_size=0,
        memory=None,
    )  # fmt: skip


def _compiled(**options: Any) -> Whole:
    table = ffi.from_buffer(options["memory"])
    state = _state(
        options["ring"], table, options["credits"], options["send_depth"], options["iwarp"]
    )
    return Whole(**options, state=state)


class Drained(Whole):
    """As a port has it: a word completes a receive, and goes to Python if C does not take it.

    Attributes:
        taken: Words that C has taken.
    """

    __slots__ = ("_completing", "_kept", "_offered", "_words", "taken")

    def __init__(self, **options: Any) -> None:
        table = ffi.from_buffer(options["memory"])
        iwarp = options["iwarp"]
        state = self._offered = _state(
            options["ring"], table, options["credits"], options["send_depth"], iwarp
        )
        self._words = ffi.new("uint32_t[1]")
        qp = QueuePair(lambda _: None, lambda _: None)
        words = int(ffi.cast("uintptr_t", self._words)) if iwarp else 0
        state.bind(qp.address, 0, words, 0)
        self._completing = Completing(state)
        self._kept = table, qp
        self.taken = 0
        super().__init__(**options, state=state)
        self.begin()

    def on_word(self, word: int) -> None:
        wc = ffi.new("struct ibv_wc *")
        wc.wr_id, wc.byte_len = STREAM_RECV << SUB_SHIFT, 4
        wc.imm_data, wc.wc_flags = socket.htonl(word), 2
        self._words[0] = word
        if self._completing.take(wc):
            self.taken += 1
            return
        self._offered.used(0)
        super().on_word(word)
