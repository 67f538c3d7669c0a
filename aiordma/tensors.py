"""Tensors: the memory of arrays and tensors that give no buffer.

Theory of operation
    An object tells its memory by DLPack (`__dlpack_device__`, `__dlpack__`), or, if it is a GPU's,
    also by `__cuda_array_interface__`.  Memory of the processor becomes a buffer: the bytes are not
    copied.  The capsule of DLPack is not consumed but kept as long as the buffer, and its own
    destructor gives the memory back.

    The buffer protocol names the type of the items, and has no names for some: the times of numpy,
    and the small floats and integers of ml_dtypes, which JAX uses.  An array of these refuses a
    buffer although it has the protocol.  Then an array of JAX is asked for DLPack, which has more
    names, and of an array of numpy the bytes are looked at without their type.

    A capsule of before version 1 does not say whether the memory may be written to.  An object that
    refuses a buffer may be immutable, as JAX's arrays are, so that its memory is read alone.  Of
    an object without the buffer protocol, such as a tensor of an older torch, it is written to.

    numpy is never imported here: an array of numpy exists only if the program has done so.

    Sources: the Python specification and the C API of DLPack, and the CUDA Array Interface,
    version 3.
"""

from __future__ import annotations

import ctypes
import errno
import math
import sys
from typing import Any, NamedTuple

from aiordma.errors import DeviceMemoryError

__all__ = [
    "DeviceMemory",
    "buffer_of",
    "device_memory_of",
    "has_memory",
    "refuse_masked",
    "view_of",
]

#: Devices of DLPack whose memory the processor reads and writes: its own, and pinned for a GPU.
_CPU = (1, 3, 11)
_CUDA = (2, 13)
_NAMES = {
    2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI", 10: "ROCm", 12: "a device",
    13: "CUDA", 14: "oneAPI", 15: "WebGPU", 16: "Hexagon", 17: "MAIA", 18: "Trainium",
}  # fmt: skip
#: Flags of a tensor: its memory is read-only, or is a copy, so that it is for reading alone.
_READ_ONLY, _IS_COPIED = 1, 2
_MOST_DIMENSIONS = 64


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class DeviceMemory(NamedTuple):
    """Memory of a device.

    Attributes:
        name: Of the device, such as "CUDA device 0".
        is_cuda: Whether it is CUDA's.
        address: Address of the first byte.
        nbytes: Bytes.
        readonly: Whether it is not to be written to.
        owner: The object that keeps it.
        versioned: Whether the object would have said that it is read-only.
    """

    name: str
    is_cuda: bool
    address: int
    nbytes: int
    readonly: bool
    owner: object
    versioned: bool = True


def has_memory(value: Any) -> bool:
    """Whether an object tells its memory in one of these ways."""
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def refuse_masked(name: str, value: Any) -> None:
    """Raise for a masked array of numpy, whose buffer has the values without the mask.

    Raises:
        TypeError: It is one.
    """
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        msg = (
            f"{name} is a masked array, whose mask would be lost: give its `filled()`, or its "
            "`data` and its `mask` as two buffers"
        )
        raise TypeError(msg)


def buffer_of(name: str, value: Any) -> Any:
    """The value; or the bytes of an array or tensor that gives no buffer.

    Raises:
        TypeError: It is a masked array.
        Others: as `view_of`.
    """
    refuse_masked(name, value)
    if not has_memory(value):
        return value
    try:
        memoryview(value).release()
    except (TypeError, ValueError, BufferError) as exc:
        return view_of(name, value, refused=not isinstance(exc, TypeError))
    return value


def view_of(name: str, value: Any, *, refused: bool = False) -> memoryview:
    """The bytes of an array or tensor in memory of the processor; not copied.

    Args:
        name: Of the argument.
        value: The array or tensor.
        refused: Whether it has the buffer protocol, and refuses a buffer.

    Raises:
        DeviceMemoryError: It is memory of another device.
        TypeError: It has references in it.
        ValueError: It is not contiguous.
        BufferError: It refuses a buffer, and DLPack, too.
        BaseException: Of the tensor, as torch raises it for a tensor that requires a gradient.
    """
    if refused and (view := _view_of_array(name, value)) is not None:
        return view
    try:
        memory = _memory_of(name, value)
    except (TypeError, ValueError):
        raise
    except Exception as exc:
        if not refused:
            raise
        msg = (
            f"{name} gives its bytes neither as a buffer nor by DLPack ({exc}): copy it, as by "
            "numpy.asarray()"
        )
        raise BufferError(msg) from None
    if memory.name:
        text = (
            f"{name} is memory of {memory.name}, which the processor does not copy: register it "
            "with Connection.register(), and read() or write() with the region"
        )
        raise DeviceMemoryError(errno.EOPNOTSUPP, text) from None
    array: Any = bytearray()
    if memory.nbytes:
        array = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)
        array.owner = memory.owner  # the view keeps the array
    view = memoryview(array).cast("B")
    return view.toreadonly() if memory.readonly or (refused and not memory.versioned) else view


def _view_of_array(name: str, value: Any) -> memoryview | None:
    """The bytes of an array of numpy; None of any other object.

    Raises:
        TypeError: It has references in it.
        ValueError: It is not contiguous.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    if value.dtype.hasobject:
        msg = f"{name} has references in it ({value.dtype}): use an array of numbers or of bytes"
        raise TypeError(msg) from None
    if not value.flags.c_contiguous:
        raise _gaps(name) from None
    return memoryview(numpy.asarray(value).reshape(-1).view(numpy.uint8))


def device_memory_of(name: str, value: Any) -> DeviceMemory | None:
    """The memory of a tensor on a device; None if it is the processor's, or no tensor.

    Raises:
        As `view_of`.
    """
    if not has_memory(value):
        return None
    if hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) in _CPU:
        return None
    return _memory_of(name, value)


def _memory_of(name: str, value: Any) -> DeviceMemory:
    """The memory of a tensor; without a name of the device it is the processor's."""
    if hasattr(value, "__cuda_array_interface__"):
        return _of_interface(name, value)
    capsule = _capsule_of(value)
    tensor, flags = _tensor_in(name, capsule)
    if not 0 <= tensor.ndim <= _MOST_DIMENSIONS:
        msg = f"{name} has {tensor.ndim} dimensions"
        raise ValueError(msg)
    shape = [int(tensor.shape[n]) for n in range(tensor.ndim)]
    strides = [int(tensor.strides[n]) for n in range(tensor.ndim)] if tensor.strides else None
    bits = tensor.bits * tensor.lanes
    if bits % 8 or not bits:
        msg = f"{name} has elements of {bits} bits"
        raise ValueError(msg)
    _check_contiguous(name, shape, strides)
    device = int(tensor.device_type)
    return DeviceMemory(
        "" if device in _CPU else f"{_NAMES.get(device, 'a')} device {tensor.device_id}",
        device in _CUDA,
        int(tensor.data or 0) + int(tensor.byte_offset),
        math.prod(shape) * bits // 8,
        bool(flags and flags & (_READ_ONLY | _IS_COPIED)),
        capsule,
        flags is not None,
    )


def _of_interface(name: str, value: Any) -> DeviceMemory:
    """By the CUDA Array Interface: its strides count bytes, and its names have the item's size."""
    facts = value.__cuda_array_interface__
    address, readonly = facts["data"]
    size = int(facts["typestr"][2:])
    shape, strides = [int(n) for n in facts["shape"]], facts.get("strides")
    if strides is not None:
        strides = [n // size if n % size == 0 else -1 for n in strides]
    _check_contiguous(name, shape, strides)
    device = "CUDA device"
    if hasattr(value, "__dlpack_device__"):
        device = f"CUDA device {value.__dlpack_device__()[1]}"
    return DeviceMemory(
        device, True, int(address), math.prod(shape) * size, bool(readonly), value
    )  # fmt: skip


def _check_contiguous(name: str, shape: list[int], strides: list[int] | None) -> None:
    """Raise ValueError unless the elements lie one behind the other, in C order."""
    if strides is None or 0 in shape:
        return
    step = 1
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        if count > 1 and stride != step:
            raise _gaps(name) from None
        step *= count


def _gaps(name: str) -> ValueError:
    remedy = "copy it, as by tensor.contiguous() or numpy.ascontiguousarray()"
    return ValueError(f"{name} has to be contiguous: {remedy}")


def _capsule_of(value: Any) -> Any:
    try:
        return value.__dlpack__(max_version=(1, 0))
    except TypeError:  # of before version 1
        return value.__dlpack__()


def _tensor_in(name: str, capsule: Any) -> tuple[_Tensor, int | None]:
    """The tensor that a capsule describes, and its flags; None of before version 1.

    Raises:
        TypeError: It is no capsule of DLPack.
        ValueError: It is of a version that is not known here.
    """
    at = _pointer_in(capsule, b"dltensor_versioned")
    if at is not None:
        versioned = _Versioned.from_address(at)
        if versioned.major != 1:
            msg = f"{name} comes by version {versioned.major} of DLPack, this library knows 1"
            raise ValueError(msg)
        return versioned.tensor, int(versioned.flags)
    at = _pointer_in(capsule, b"dltensor")
    if at is None:
        msg = f"the __dlpack__ of {name} returned no capsule of a tensor"
        raise TypeError(msg)
    return _Tensor.from_address(at), None


def _pointer_in(capsule: Any, name: bytes) -> int | None:
    """The pointer in a capsule of this name; None of any other object."""
    if not _is_valid(capsule, name):
        return None
    at: int = _pointer(capsule, name)
    return at


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
