"""Slabs: page-aligned memory of connections, kept for the next connection.

Theory of operation
    A slab is an anonymous mapping of its own: small objects would share pages with others.
    Mapping memory and making its pages takes longer than registering it: for a connection with
    default settings eight milliseconds of emulated time against a half.  So memory that neither the
    adapter nor a message of the program uses any more is not unmapped but kept, up to `KEEP` bytes
    in all.  It is cleared only for a use in which another than its writer reads it; in any other
    use no byte is read that was not written before.

    The last view of a slab may go in any thread, and whenever the collector runs.

    A forked child has none of it: memory that was registered may not be mapped there.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiordma._ffi import ffi, lib
from aiordma.errors import os_error
from aiordma.loop import fork

if TYPE_CHECKING:
    from aiordma._ffi import CData

__all__ = ["KEEP", "slab"]

KEEP = 32 << 20
_kept = 0
_lock = fork.new_lock()


class _Shelf:
    """Unused memory of one size; the functions that cffi calls to allocate and to free."""

    __slots__ = ("_pointers", "_size", "allocate", "allocate_cleared", "kind")

    def __init__(self, size: int) -> None:
        self._size = size
        self._pointers: list[CData] = []
        #: The C type of the memory, which `ffi` would look up for each slab.
        self.kind: Any = ffi.typeof(f"char[{size}]")
        #: A function that makes a `char[]` of the memory.
        self.allocate: Callable[[Any], CData] = ffi.new_allocator(
            self.take, self.give, should_clear_after_alloc=False
        )
        self.allocate_cleared: Callable[[Any], CData] = ffi.new_allocator(
            self.take_cleared, self.give, should_clear_after_alloc=False
        )

    def take(self, size: int) -> CData:
        """Memory whose bytes are not cleared."""
        # Usually there is none, or only this thread: `_old` looks again under the lock.
        return (self._old() if self._pointers else None) or self._new(size)

    def take_cleared(self, size: int) -> CData:
        """Memory of zeros, which a new mapping has without clearing."""
        pointer = self._old()
        if pointer is None:
            return self._new(size)
        lib.aio_clear(pointer, self._size)  # other threads go on meanwhile
        return pointer

    def _old(self) -> CData | None:
        global _kept
        with _lock:
            if not self._pointers:
                return None
            _kept -= self._size
            return self._pointers.pop()

    def _new(self, size: int) -> CData:
        pointer = lib.aio_map(size)
        if not pointer:  # of NULL cffi would make a MemoryError, which is no OSError
            raise os_error(ffi.errno or errno.ENOMEM, "mmap", detail=f"({size} bytes)")
        return pointer

    def give(self, pointer: CData) -> None:
        """Take back a slab that is not used any more."""
        global _kept
        with _lock:
            if _kept + self._size <= KEEP and _shelves.get(self._size) is self:
                _kept += self._size
                self._pointers.append(pointer)
                return
        lib.aio_unmap(pointer, self._size)


#: By size: one for each configuration.  `KEEP` limits the bytes that they keep.
_shelves: dict[int, _Shelf] = {}


def _forget() -> None:
    global _kept
    _kept = 0
    _shelves.clear()


fork.renew(_forget)


def slab(size: int, *, clear: bool = False) -> CData:
    """At least `size` bytes, as a `char[]`; they live as long as that, or any buffer of it.

    Args:
        size: Bytes.
        clear: Whether to fill them with zeros; otherwise they may hold anything.

    Raises:
        OSError: ENOMEM, the memory or the number of mappings is at its limit.
    """
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    shelf = _shelves.get(room)
    if shelf is None:
        shelf = _shelves.setdefault(room, _Shelf(room))
    allocate = shelf.allocate_cleared if clear else shelf.allocate
    return allocate(shelf.kind)
