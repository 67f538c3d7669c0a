"""Slabs: page-aligned memory of connections, kept for the next one.

Theory of operation
    A slab is an anonymous mapping of its own: small objects would share pages with strangers.  To
    map memory and to make its pages takes longer than to register it: for a connection with
    default settings eight milliseconds of emulated time against a half.  So memory that nobody
    looks at any more, neither the adapter nor a message that the program still has, is not
    unmapped but kept, up to `KEEP` bytes in all.  It is not cleared: nobody reads what was not
    written before, and to clear it would take as long as to make it.

    The last view of a slab may go in any thread; a shelf is a list, whose operations are whole.
"""

from __future__ import annotations

import errno
import functools
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma._ffi import ffi, lib
from aiordma.errors import os_error

if TYPE_CHECKING:
    from aiordma._ffi import CData

__all__ = ["KEEP", "slab"]

KEEP = 32 << 20
_kept = 0


class _Shelf:
    """Memory of one size that nobody uses; what cffi calls to allocate and to free."""

    __slots__ = ("_pointers", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._pointers: list[CData] = []

    def take(self, size: int) -> CData:
        """Memory with whatever is in it."""
        global _kept
        try:
            pointer = self._pointers.pop()
        except IndexError:
            pointer = lib.aio_map(size)
            if not pointer:  # of NULL cffi would make a MemoryError, which is no OSError
                raise os_error(
                    ffi.errno or errno.ENOMEM, "mmap", detail=f"({size} bytes)"
                ) from None
            return pointer
        _kept -= self._size
        return pointer

    def give(self, pointer: CData) -> None:
        """Nobody looks at it any more."""
        global _kept
        if _kept + self._size > KEEP:
            lib.aio_unmap(pointer, self._size)
        else:
            _kept += self._size
            self._pointers.append(pointer)


@functools.cache  # a size for each configuration; what lies there is limited
def _allocator(size: int) -> Callable[[str], CData]:
    shelf = _Shelf(size)
    return ffi.new_allocator(shelf.take, shelf.give, should_clear_after_alloc=False)


def slab(size: int) -> CData:
    """At least `size` bytes, a `char[]`, not cleared; they live as long as it, or a buffer of it.

    Raises:
        OSError: ENOMEM, the memory or the number of mappings is at its limit.
    """
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return _allocator(room)(f"char[{room}]")
