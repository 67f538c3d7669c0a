"""Tensors for tests: objects that tell their memory by DLPack, or as memory of a GPU."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any, ClassVar

__all__ = ["CudaArray", "Refusing", "Tensor", "made_capsule"]


class Tensor:
    """As a tensor of torch: DLPack, by numpy, and no buffer.

    Args:
        array: Its memory.
        old: Whether it knows no versions.
    """

    def __init__(self, array: Any, *, old: bool = False) -> None:
        self.array = array
        self.old = old

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **words: Any) -> Any:
        if words and self.old:
            msg = "unexpected keyword"
            raise TypeError(msg)
        return self.array.__dlpack__(**words)


if sys.version_info >= (3, 12):

    class _NoBuffer:
        def __buffer__(self, flags: int) -> memoryview:
            msg = "there is no name for the type of the items"
            raise BufferError(msg)

else:

    class _NoBuffer(mmap.mmap):  # closed, it refuses a buffer by a ValueError
        def __new__(cls, *_: Any, **__: Any) -> Any:
            self = super().__new__(cls, -1, 1)
            self.close()
            return self


class Refusing(_NoBuffer):
    """As an array of JAX of small floats: the buffer protocol, which it refuses, and DLPack.

    Args:
        array: Its memory.
        old: Whether it knows no versions; as JAX 0.10.
        error: Raised in place of a capsule.
    """

    def __init__(self, array: Any, *, old: bool = True, error: Exception | None = None) -> None:
        self.array, self.old, self.error = array, old, error

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **words: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.array.__dlpack__(**({} if self.old else words))


class CudaArray:
    """Memory of a GPU, by the CUDA Array Interface."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: Any = None) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False), "shape": shape, "strides": strides, "typestr": "<f4",
            "version": 3,
        }  # fmt: skip


class _Capsules:
    """Capsules, and the memory that they point to."""

    kept: ClassVar[list[Any]] = []


def made_capsule(device: tuple[int, int], array: Any, gone: Callable[[], None]) -> Any:
    """A capsule of before version 1, of memory on some device; `gone` is called at its end."""

    class Managed(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("id", ctypes.c_int32),
            ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
            ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        )  # fmt: skip

    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    managed = Managed(
        array.ctypes.data, *device, array.ndim, 2, array.itemsize * 8, 1,
        ctypes.addressof(shape), None, 0, None, None,
    )  # fmt: skip
    destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gone())
    _Capsules.kept += [shape, managed, destructor, array]
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(
        ctypes.addressof(managed), b"dltensor", ctypes.cast(destructor, ctypes.c_void_p).value
    )
