"""Slabs: memory that nobody looks at any more is used again, and not more of it kept than said."""

from __future__ import annotations

import errno
import gc
from typing import Any

import pytest

from aiordma._ffi import ffi, lib, load_error
from aiordma.verbs import slab as slabs
from tests.inside.verbs import empty_slabs, kept_in_slabs

pytestmark = pytest.mark.skipif(load_error() is not None, reason="the extension is not built")

SIZE = 5 * 4096 + 1


def address(memory: Any) -> int:
    return int(ffi.cast("uintptr_t", memory))


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept at first, and what a test has kept is its own."""
    empty_slabs(monkeypatch)


def test_what_nobody_looks_at_is_used_again() -> None:
    memory = slabs.slab(SIZE)
    assert len(memory) == 6 * 4096
    assert address(memory) % 4096 == 0
    view = memoryview(ffi.buffer(memory, SIZE))
    view[:] = bytes([7]) * SIZE
    where = address(memory)
    del memory
    gc.collect()
    other = slabs.slab(SIZE)  # a view of the first is still there
    assert address(other) != where
    assert bytes(view) == bytes([7]) * SIZE
    view.release()
    del view
    gc.collect()
    assert kept_in_slabs() == 6 * 4096
    assert address(slabs.slab(SIZE)) == where


def test_no_more_is_kept_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "KEEP", 2 * 4096)
    several = [slabs.slab(4096) for _ in range(5)]
    del several
    gc.collect()
    assert kept_in_slabs() == 2 * 4096


def test_no_memory_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> Any:
        ffi.errno = errno.ENOMEM
        return ffi.NULL

    monkeypatch.setitem(vars(lib), "aio_map", refuse)
    with pytest.raises(OSError, match="mmap") as caught:
        slabs.slab(4096)
    assert caught.value.errno == errno.ENOMEM
