"""dask_memory: memory for received frames, which later frames use again.

Theory of operation
    The kernel clears each page of fresh memory when it is touched first, and a huge page twice if
    it clears pages on allocation, too.  The C library gives large memory back to the kernel when
    it is freed, so that each message would pay again.  Here it is kept instead, up to a limit.

    A piece of memory is an anonymous mapping.  Each frame is lent an array of its own over it; when
    that is collected, nothing refers to the memory any more: a view of any kind refers to the
    array, because the owner of the array's memory is no array itself.

    Finalizers run in any thread, and in the middle of any call, even one of this class.  So nothing
    waits for the lock: a finalizer leaves the memory in a queue, and takes it out again only if the
    lock is free; otherwise the owner of the lock does so.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import weakref
from typing import Any

from distributed.protocol.utils import host_array

__all__ = ["FrameMemory"]

try:
    import numpy as np
except ImportError:  # distributed does without
    np = None  # type: ignore[assignment]

#: Below, the C library keeps freed memory itself.
LEAST_BYTES = 1 << 18
#: From here on the kernel is asked for huge pages, as numpy does.
_HUGE_BYTES = 4 << 20
_UNIT = 1 << 16  # sizes are multiples, so that similar frames fit


class FrameMemory:
    """The memory of a process for frames, which later frames use again.

    Args:
        most_bytes: Bytes that are kept for later frames.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._returned: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._idle: list[mmap.mmap] = []  # the oldest first
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Lend writable memory, whose bytes may be anything, until no view of it is left.

        Raises:
            MemoryError: There is not enough.
            ValueError: No machine has so much.
        """
        if np is None or not LEAST_BYTES <= size <= self.most_bytes:
            return host_array(size)
        return self._lent(self._kept(size) or _mapped(size), size)

    def _lent(self, memory: mmap.mmap, size: int) -> memoryview:
        array: Any = np.frombuffer(memory, "u1", size)
        weakref.finalize(array, self._give_back, memory).atexit = False
        return memoryview(array)

    def _kept(self, size: int) -> mmap.mmap | None:
        """The smallest piece that fits, but not a much larger one, much of which would lie idle."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            fits = [each for each in self._idle if size <= len(each) <= size + size // 4 + _UNIT]
            if not fits:
                return None
            chosen = min(fits, key=len)
            self._idle = [each for each in self._idle if each is not chosen]
            return chosen
        finally:
            self._lock.release()
            self._sort()

    def _give_back(self, memory: mmap.mmap) -> None:
        self._returned.put(memory)
        self._sort()

    def _sort(self) -> None:
        """Keep what has been given back, and free the oldest above the limit."""
        while not self._returned.empty() and self._lock.acquire(blocking=False):
            try:
                while not self._returned.empty():
                    self._idle.append(self._returned.get_nowait())
                while sum(map(len, self._idle)) > self.most_bytes:
                    del self._idle[0]
            finally:
                self._lock.release()


def _mapped(size: int) -> mmap.mmap:
    """Fresh memory."""
    whole = -(-size // _UNIT) * _UNIT
    try:
        memory = mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError(str(exc)) from exc
    if whole >= _HUGE_BYTES:
        with contextlib.suppress(OSError):  # the kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
