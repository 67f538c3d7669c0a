"""Access to the memory of arrays and tensors that do not support the buffer protocol.

Theory of operation
    An object describes its memory through DLPack (`__dlpack_device__`, `__dlpack__`), or, on a GPU,
    also through `__cuda_array_interface__`.  Host memory is wrapped in a buffer, without copying
    it.  The DLPack capsule is not consumed; it is kept as long as the buffer, and then its own
    destructor releases the memory.

    The buffer protocol describes the type of the items by a format, and some types have none:
    numpy's datetimes, and the small floats and integers of ml_dtypes, which JAX uses.  An array of
    such items has the buffer protocol and yet refuses to export a buffer.  In this case a numpy
    array is viewed as plain bytes, and a JAX array is asked for DLPack, which knows more types.

    A capsule older than DLPack 1.0 does not say whether the memory is read-only.  If the object has
    the buffer protocol and refuses a buffer, it may be immutable, as JAX arrays are, so the memory
    is taken to be read-only.  If it does not have the protocol at all, as a tensor of an older
    torch, the memory is taken to be writable.

    numpy is never imported here: a numpy array can only exist if the program has imported it.

    Sources: the Python specification and the C API of DLPack, and the CUDA Array Interface,
    version 3.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple

from aiordma.errors import device_memory_error

__all__ = [
    "DeviceMemory",
    "buffer_of",
    "device_memory_of",
    "has_memory",
    "refuse_masked",
    "view_of",
]

#: DLPack device types whose memory is host memory: kDLCPU, kDLCUDAHost and kDLROCMHost.
_CPU = (1, 3, 11)
_CUDA = (2, 13)
_NAMES = {
    2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI", 10: "ROCm", 12: "a device",
    13: "CUDA", 14: "oneAPI", 15: "WebGPU", 16: "Hexagon", 17: "MAIA", 18: "Trainium",
}  # fmt: skip
#: Flags of a tensor: the memory is read-only, or a copy, to which writing would have no effect.
_READ_ONLY, _IS_COPIED = 1, 2
_MOST_DIMENSIONS = 64


class _Tensor(ctypes.Structure):
    """DLTensor, with its DLDevice and DLDataType as plain members."""

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
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class DeviceMemory(NamedTuple):
    """The memory of an array or tensor.

    Attributes:
        name: The name of the device, such as "CUDA device 0"; empty for host memory.
        is_cuda: Whether the memory can be accessed through CUDA.
        address: The address of the first byte.
        nbytes: The size in bytes.
        readonly: Whether the object says that the memory must not be written to.
        owner: The object that keeps the memory alive.
        versioned: Whether the object can say so: a capsule older than DLPack 1.0 cannot.
    """

    name: str
    is_cuda: bool
    address: int
    nbytes: int
    readonly: bool
    owner: object
    versioned: bool = True


def has_memory(value: Any) -> bool:
    """Whether an object has DLPack or the CUDA Array Interface."""
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def refuse_masked(name: str, value: Any) -> None:
    """Refuse a masked array of numpy, whose buffer has the values without the mask.

    Raises:
        TypeError: The value is a masked array.
    """
    # A module is there without its names while another thread imports it.
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if masked is not None and isinstance(value, masked):
        msg = (
            f"{name} is a masked array, whose mask would be lost: give its `filled()`, or its "
            "`data` and its `mask` as two buffers"
        )
        raise TypeError(msg)


def buffer_of(name: str, value: Any) -> Any:
    """Return the value itself, or a view of its bytes if it is a tensor that exports no buffer.

    Args:
        name: The name of the argument, for exceptions.
        value: Anything; what is neither a buffer nor a tensor is returned as it is.

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
    """Return a view of the bytes of an array or tensor in host memory, without copying them.

    Args:
        name: The name of the argument, for exceptions.
        value: The array or tensor.
        refused: Whether it has the buffer protocol, but has refused to export a buffer.

    Raises:
        NotSupportedError: The memory belongs to another device.
        TypeError: The items are references to Python objects.
        ValueError: The items are not contiguous.
        BufferError: The object supports neither a buffer nor DLPack for these items.
        Exception: Whatever the object raises, such as torch for a tensor that requires a gradient.
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
        raise device_memory_error(text) from None
    array: Any = bytearray()
    if memory.nbytes:
        array = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)
        array.owner = memory.owner  # the view keeps the array, and so the owner
    view = memoryview(array).cast("B")
    return view.toreadonly() if memory.readonly or (refused and not memory.versioned) else view


def _view_of_array(name: str, value: Any) -> memoryview | None:
    """A view of the bytes of a numpy array; None for any other object.

    Raises:
        TypeError: The items are references to Python objects.
        ValueError: The items are not contiguous.
    """
    numpy: Any = sys.modules.get("numpy")
    array = getattr(numpy, "ndarray", None)  # as for `refuse_masked`
    if array is None or not isinstance(value, array):
        return None
    if value.dtype.hasobject:
        msg = f"{name} has references in it ({value.dtype}): use an array of numbers or of bytes"
        raise TypeError(msg) from None
    if not value.flags.c_contiguous:
        raise _not_contiguous_error(name) from None
    return memoryview(numpy.asarray(value).reshape(-1).view(numpy.uint8))


def device_memory_of(name: str, value: Any) -> DeviceMemory | None:
    """The memory of a tensor on a device; None for host memory, and for anything but a tensor.

    Raises:
        As `view_of`.
    """
    if not has_memory(value):
        return None
    if hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) in _CPU:
        return None
    return _memory_of(name, value)


def _memory_of(name: str, value: Any) -> DeviceMemory:
    """The memory of an array or tensor on any device."""
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
    """The memory of an object that has the CUDA Array Interface."""
    facts = value.__cuda_array_interface__
    address, readonly = facts["data"]
    # "<f4": byte order, kind, and bytes of an item.  The strides are in bytes, too.
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
    """Raise ValueError unless the items are contiguous in C order; `strides` counts items."""
    if strides is None or 0 in shape:
        return
    step = 1
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        if count > 1 and stride != step:
            raise _not_contiguous_error(name) from None
        step *= count


def _not_contiguous_error(name: str) -> ValueError:
    remedy = "copy it, as by tensor.contiguous() or numpy.ascontiguousarray()"
    return ValueError(f"{name} has to be contiguous: {remedy}")


def _capsule_of(value: Any) -> Any:
    try:
        return value.__dlpack__(max_version=(1, 0))
    except TypeError:  # older than DLPack 1.0, without this argument
        return value.__dlpack__()


def _tensor_in(name: str, capsule: Any) -> tuple[_Tensor, int | None]:
    """The tensor that a capsule describes, and its flags, which are None before DLPack 1.0.

    Raises:
        TypeError: It is no capsule of DLPack.
        ValueError: Its major version is not 1.
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
    """The pointer in a capsule that has this name; None for any other object."""
    if not _is_valid(capsule, name):
        return None
    at: int = _pointer(capsule, name)
    return at


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
