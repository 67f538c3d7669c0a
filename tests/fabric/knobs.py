"""The switches of the fabric that no program needs: see `docs/fabric.md`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "library",
    "raised",
    "raised_by_manager",
    "set_addresses",
    "set_link",
    "taken_away",
    "wire",
]

#: Chances are in a million.
ALWAYS = 1_000_000
MS = 1_000_000


@functools.cache
def library() -> ctypes.CDLL:
    """The library that is the fabric."""
    found = ctypes.CDLL("libibverbs.so.1")
    found.fabric_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    found.fabric_harmed.restype = ctypes.c_int64
    found.fabric_link.argtypes = [ctypes.c_uint, ctypes.c_int]
    found.fabric_address.argtypes = [ctypes.c_uint, ctypes.c_int]
    found.fabric_remove.argtypes = [ctypes.c_uint]
    found.fabric_raise.argtypes = [ctypes.c_int, ctypes.c_uint]
    found.fabric_cm_raise.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_int]
    return found


def _set(name: str, value: int) -> None:
    assert library().fabric_set(name.encode(), value) == 0, name


@contextmanager
def wire(faults: dict[str, int]) -> Iterator[None]:
    """The wire of this process has these faults in the block: names and values of fabric_set().

    They have struck a packet when the block ends: what did not has tested nothing.
    """
    before = library().fabric_harmed()
    for name, value in faults.items():
        _set(name, value)
    try:
        yield
    finally:
        for name in faults:
            _set(name, 0)
    assert library().fabric_harmed() > before


def set_link(device: int, *, up: bool) -> None:
    """The port of a device goes up or down."""
    assert library().fabric_link(device, up) == 0


def set_addresses(device: int, *, present: bool) -> None:
    """The addresses of a device go, or come back."""
    assert library().fabric_address(device, present) == 0


def taken_away(device: int) -> None:
    """A device is removed from this process, for good."""
    assert library().fabric_remove(device) == 0


def raised(event: int, number: int) -> None:
    """An asynchronous event, of a device or of a queue pair by its number."""
    assert library().fabric_raise(event, number) == 0


def raised_by_manager(event: int, device: int, status: int = 0) -> None:
    """An event of the connection manager, for each connected id of a device."""
    assert library().fabric_cm_raise(event, device, status) == 0
