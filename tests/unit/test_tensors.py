"""The memory of tensors: by DLPack, of the processor and of other devices."""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from aiordma.arguments import bytes_of
from aiordma.errors import NotSupportedError
from aiordma.tensors import buffer_of, device_memory_of
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import check_memory
from tests.unit.tensors import CudaArray, Refusing, Tensor, made_capsule


class Capsuled:
    """An object with a capsule of its own."""

    def __init__(self, device: tuple[int, int], capsule: Any) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.capsule


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", ["f8", "f4", "c16", "i1", "u8", "?"])
def test_the_memory_of_the_processor_is_not_copied(dtype: str, old: bool) -> None:
    array = np.zeros((3, 4), dtype)
    view = bytes_of("it", Tensor(array, old=old), writable=True)
    assert (view.nbytes, view.format, view.ndim) == (array.nbytes, "B", 1)
    view[:] = bytes([1]) * array.nbytes
    assert array.tobytes() == bytes([1]) * array.nbytes
    part = bytes_of("it", Tensor(array[1:], old=old))
    assert np.frombuffer(part, "u1").ctypes.data == array[1:].ctypes.data


def test_the_view_keeps_the_memory_and_lets_it_go() -> None:
    told: list[str] = []
    array = np.arange(6.0)
    view = bytes_of("it", Capsuled((1, 0), made_capsule((1, 0), array, lambda: told.append("end"))))
    gc.collect()
    assert told == []
    assert view == array.tobytes()
    view.release()
    del view
    gc.collect()
    assert told == ["end"]


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_shapes_without_a_dimension_or_an_element(shape: tuple[int, ...]) -> None:
    array = np.ones(shape)
    assert bytes_of("it", Tensor(array)) == array.tobytes()


def test_read_only() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        bytes_of("it", Tensor(array), writable=True)
    assert bytes_of("it", Tensor(array)) == array.tobytes()


def test_a_tensor_that_gives_a_copy_is_for_reading_alone() -> None:
    """Bytes that are received into a copy would be lost."""

    class Copied(Tensor):
        def __dlpack__(self, **words: Any) -> Any:
            return self.array.__dlpack__(copy=True, **words)

    tensor = Copied(np.arange(3))
    with pytest.raises(BufferError, match="read-only"):
        bytes_of("it", tensor, writable=True)
    assert bytes_of("it", tensor) == tensor.array.tobytes()


def test_gaps() -> None:
    for array in (np.zeros((4, 4))[:, ::2], np.zeros((2, 3)).T, np.zeros(4)[::-1]):
        with pytest.raises(ValueError, match="it has to be contiguous"):
            bytes_of("it", Tensor(array))


@pytest.mark.parametrize("capsule", [None, 5, b"dltensor", object()])
def test_no_capsule(capsule: Any) -> None:
    with pytest.raises(TypeError, match="no capsule of a tensor"):
        bytes_of("it", Capsuled((1, 0), capsule))


def test_what_a_tensor_raises_is_raised() -> None:
    class Gradient(Tensor):
        def __dlpack__(self, **_: Any) -> Any:
            msg = "requires a gradient"
            raise BufferError(msg)

    with pytest.raises(BufferError, match="gradient"):
        bytes_of("it", Gradient(np.zeros(3)))


def test_an_object_that_refuses_a_buffer_is_asked_for_dlpack() -> None:
    """As arrays of JAX, of types for which the buffer protocol has no name."""
    array = np.arange(12, dtype="u2")
    for old in (False, True):
        for view in (bytes_of("it", Refusing(array, old=old)), buffer_of("it", Refusing(array))):
            assert bytes(view) == array.tobytes()
            assert np.frombuffer(view, "u1").ctypes.data == array.ctypes.data


def test_it_is_written_to_only_if_it_says_that_it_may_be() -> None:
    """JAX's arrays are immutable, and DLPack of before version 1 has no word for that."""
    array = np.zeros(3, "u2")
    bytes_of("it", Refusing(array, old=False), writable=True)[:] = b"abcdef"
    assert array.tobytes() == b"abcdef"
    with pytest.raises(BufferError, match="read-only"):
        bytes_of("it", Refusing(array, old=True), writable=True)
    with pytest.raises(BufferError, match="read-only"):
        check_memory(buffer_of("it", Refusing(array, old=True)), Access.LOCAL_WRITE)


def test_an_object_that_refuses_both() -> None:
    """As JAX's arrays of four bits."""
    nothing = Refusing(None, error=RuntimeError("no equivalent"))
    for refuses in (bytes_of, buffer_of):
        with pytest.raises(BufferError, match=r"it gives .* \(no equivalent\): copy it.*asarray"):
            refuses("it", nothing)


@pytest.mark.parametrize("dtype", ["M8[us]", "m8[s]", [("at", "M8[us]"), ("price", "f8")]])
def test_arrays_of_times_are_their_bytes(dtype: Any) -> None:
    array = np.zeros((3, 4), dtype)
    data = bytes(range(1, 13)) * (array.nbytes // 12)
    bytes_of("it", array, writable=True)[:] = data
    assert array.tobytes() == data == bytes(buffer_of("it", array))
    assert bytes_of("it", array[2]) == array[2].tobytes()
    assert bytes_of("it", array[:0]).nbytes == 0
    assert bytes_of("it", np.zeros((), dtype)).nbytes == array.itemsize
    with pytest.raises(ValueError, match=r"it has to be contiguous.*ascontiguousarray"):
        bytes_of("it", array[:, ::2])
    array.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        bytes_of("it", array, writable=True)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"], dtype=np.dtypes.StringDType()),
        np.zeros(3, [("at", "M8[us]"), ("what", "O")]),
    ],
)
def test_references_in_an_array_are_no_bytes(array: Any) -> None:
    for refuses in (bytes_of, buffer_of):
        with pytest.raises(TypeError, match="it has references in it"):
            refuses("it", array)


def test_a_masked_array_is_refused_with_the_remedy() -> None:
    masked: Any = np.ma.masked_array([1, 2, 3], [False, True, False])
    for refuses in (bytes_of, buffer_of):
        with pytest.raises(TypeError, match=r"it is a masked array.*`filled\(\)`.*`mask`"):
            refuses("it", masked)
    assert bytes_of("it", masked.data) == masked.filled(2).tobytes()


@pytest.mark.parametrize("name", ["numpy", "numpy.ma"])
def test_numpy_while_another_thread_imports_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The module is there by then, without its names."""
    tensors = Tensor(np.arange(3)), Refusing(np.arange(3))
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert bytes(bytes_of("it", bytearray(b"abc"))) == b"abc"
    assert [bytes_of("it", tensor).nbytes for tensor in tensors] == [24, 24]


def test_an_empty_tensor_can_be_written_to() -> None:
    for empty in (Tensor(np.zeros((3, 0))), np.zeros(0, "M8[s]"), np.zeros(0)):
        assert bytes_of("it", empty, writable=True).nbytes == 0
    array = np.zeros(0)
    array.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        bytes_of("it", Tensor(array), writable=True)


def test_what_has_no_memory_raises_as_before() -> None:
    released = memoryview(b"x")
    released.release()
    with pytest.raises(ValueError, match="released"):
        bytes_of("it", released)
    assert buffer_of("it", released) is released


def test_buffers_are_as_they_were() -> None:
    array = np.zeros(3, "M8[us]").view("V8")
    assert buffer_of("it", array) is array
    assert buffer_of("it", b"x") == b"x"
    assert buffer_of("it", 5) == 5
    assert device_memory_of("it", array) is None
    assert device_memory_of("it", b"x") is None
    assert device_memory_of("it", Tensor(array)) is None


def test_memory_of_a_gpu_is_refused_where_bytes_are_needed() -> None:
    capsule = made_capsule((2, 3), np.zeros(4), lambda: None)
    for gpu, name in (
        (CudaArray(4096, (2, 3)), "CUDA device"),
        (Capsuled((2, 3), capsule), "CUDA device 3"),
    ):
        with pytest.raises(NotSupportedError, match=f"it is memory of {name}.*register"):
            bytes_of("it", gpu)


def test_memory_of_a_gpu() -> None:
    found = device_memory_of("it", CudaArray(1 << 40, (2, 3), (12, 4)))
    assert found is not None
    assert found[:5] == ("CUDA device", True, 1 << 40, 24, False)
    array = np.zeros(4)
    found = device_memory_of("it", Capsuled((10, 1), made_capsule((10, 1), array, lambda: None)))
    assert found is not None
    assert found[:5] == ("ROCm device 1", False, array.ctypes.data, 32, False)
    for strides in ((24, 4), (16, 8), (4, 8), (12, 2)):
        with pytest.raises(ValueError, match="contiguous"):
            device_memory_of("it", CudaArray(1 << 40, (2, 3), strides))
