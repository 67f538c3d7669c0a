"""Sinks: entries of a channel's table whose plain completions are taken in C.

Theory of operation
    A sink is a C struct that begins with a `struct aio_sink` (glue.cdef.h).  While a drain polls,
    it is handed its completions one by one (`aio_take` in glue.c): it takes one, or it leaves it to
    Python without having changed anything.  Behind one that Python was left with, all go to
    Python, until the entry has counted `spilled` down, once for each that it was called with; so
    their order is kept.

    What the program is to hear of, a sink notes in `news`.  Its owner is told once, when the drain
    is over, and may run the program's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiordma._ffi import ffi
from aiordma._ffi.fast import Reader
from aiordma.loop.slots import INDEX_BITS

__all__ = ["Sinks"]

_FIRST = 64
_INDEX_MASK = (1 << INDEX_BITS) - 1


class Sinks:
    """Those of one channel.

    Args:
        drain: The channel's `struct aio_drain`.
        budget: How many completions a drain takes at most.

    Attributes:
        ready: The sinks that have news after a drain; C fills it, and `Reader` tells them.
        reader: Tells of it; set before the first `add`.
        memory: What the drain's pointers lead to; the drain's owner keeps this list.
    """

    __slots__ = ("_drain", "_sinks", "memory", "reader", "ready")

    def __init__(self, drain: Any, budget: int) -> None:
        self._drain = drain
        self.reader: Reader
        self._sinks = ffi.new("struct aio_sink *[]", _FIRST)
        self.ready = ffi.new("uint32_t[]", budget)
        drain.sinks, drain.n_sinks, drain.ready = self._sinks, _FIRST, self.ready
        self.memory: list[Any] = [self.ready, self._sinks]

    def add(self, wr_id: int, sink: Any, news: Callable[[int], None]) -> None:
        """Hand an entry's completions to a sink.

        Args:
            wr_id: The entry's id, with sub-index 0.
            sink: Its `struct aio_sink *`, which has to live until `remove`.
            news: Called with what it has noted; the program's code may run.
        """
        index = wr_id & _INDEX_MASK
        count = len(self._sinks)
        if index >= count:
            larger = ffi.new("struct aio_sink *[]", max(2 * count, index + 1))
            ffi.memmove(larger, self._sinks, ffi.sizeof(self._sinks))
            self._sinks = self._drain.sinks = self.memory[1] = larger
            self._drain.n_sinks = len(larger)
        sink.id = wr_id
        self._sinks[index] = sink
        self.reader.own(index, news)

    def remove(self, wr_id: int) -> None:
        """Give the entry of `wr_id` all its completions from now on."""
        index = wr_id & _INDEX_MASK
        self._sinks[index] = ffi.NULL
        self.reader.own(index, None)
