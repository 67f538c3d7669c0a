"""Memory of a GPU by dmabuf, with a fake driver and a fake adapter: no such hardware is here."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

import pytest

from aiordma._ffi import ffi
from aiordma.errors import NotSupportedError
from aiordma.tensors import DeviceMemory, device_memory_of
from aiordma.verbs import Access, MemoryRegion, device_memory
from aiordma.verbs.device_memory import register_device_memory
from tests.inside.verbs import export_by, export_by_cuda, kept_by
from tests.unit.tensors import CudaArray

ADDRESS, SIZE = 0x7F0000001080, 24_000


class Context:
    """The parts of a device that a registration asks."""

    name = "fake_0"
    attributes = type("Attributes", (), {"vendor_id": 1})


class Pd:
    """The parts of a protection domain that a probe asks."""

    _handle = ffi.NULL
    context = Context()


class Verbs:
    """The calls of libibverbs: what was asked, and what the kernel says."""

    def __init__(self) -> None:
        self.probe = errno.EBADF
        self.asked: list[tuple[int, ...]] = []

    def ibv_reg_dmabuf_mr(self, pd: Any, *numbers: int) -> Any:
        self.asked.append(numbers)
        ffi.errno = self.probe
        return ffi.NULL


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Verbs:
    fake = Verbs()
    monkeypatch.setattr(device_memory, "lib", fake)
    return fake


def gpu(**changes: Any) -> DeviceMemory:
    found = device_memory_of("it", CudaArray(ADDRESS, (SIZE // 4,)))
    assert found is not None
    return found._replace(**changes)


def register(memory: DeviceMemory, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
    pd: Any = Pd()
    return register_device_memory(pd, memory, access)


def test_the_whole_way(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's addresses are the GPU's, the descriptor is closed, the tensor is kept."""
    made: list[Any] = []
    exported, other = os.pipe()
    os.close(other)

    class Region:
        _keep: Any = None

    def from_dmabuf(pd: Any, fd: int, length: int, access: Access, **words: int) -> Region:
        os.fstat(fd)
        made.append((fd, length, access, words))
        return Region()

    export_by(monkeypatch, lambda address, size: (exported, address % 4096))
    monkeypatch.setattr(MemoryRegion, "from_dmabuf", from_dmabuf)
    memory = gpu()
    region: Any = register(memory)
    assert made == [(exported, SIZE, Access.LOCAL_WRITE, {"offset": 0x80, "iova": ADDRESS})]
    assert kept_by(region) is memory.owner
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(exported)
    assert verbs.asked == [(0, 4096, 0, -1, 0)]


@pytest.mark.parametrize(
    "code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPROTONOSUPPORT, errno.EINVAL]
)
def test_a_kernel_without_dmabufs(verbs: Verbs, code: int) -> None:
    verbs.probe = code
    with pytest.raises(NotSupportedError, match="driver of fake_0 registers no dmabufs"):
        register(gpu())


def test_no_driver_of_cuda(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        msg = f"{name}: cannot open shared object file"
        raise OSError(msg)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(NotSupportedError, match="the driver of CUDA cannot be loaded: libcuda"):
        register(gpu())


def test_an_old_driver_of_cuda(verbs: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with pytest.raises(NotSupportedError, match=r"older than 11\.7"):
        register(gpu())


@pytest.mark.parametrize("code", [0, 1, 801])
def test_the_driver_of_cuda(verbs: Verbs, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """It is asked for whole pages around the memory."""
    asked: list[tuple[int, int, int, int]] = []

    class Driver:
        @staticmethod
        def cuMemGetHandleForAddressRange(
            fd: Any, address: Any, size: Any, kind: Any, flags: Any
        ) -> int:
            asked.append((address.value, size.value, kind.value, flags.value))
            if not code:
                ctypes.cast(fd, ctypes.POINTER(ctypes.c_int))[0] = 1234
            return code

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver)
    if code:
        with pytest.raises(NotSupportedError, match=f"CUresult {code}"):
            register(gpu())
    else:
        assert export_by_cuda(ADDRESS, SIZE) == (1234, 0x80)
    assert asked == [(ADDRESS - 0x80, 24_576, 1, 0)]


def test_other_devices_empty_and_read_only_memory(verbs: Verbs) -> None:
    with pytest.raises(NotSupportedError, match="memory of ROCm device 0: only CUDA's"):
        register(gpu(name="ROCm device 0", is_cuda=False))
    with pytest.raises(ValueError, match="at least one byte"):
        register(gpu(nbytes=0))
    with pytest.raises(BufferError, match="read-only"):
        register(gpu(readonly=True))


def test_a_descriptor_that_the_adapter_refuses(
    verbs: Verbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, other = os.pipe()
    os.close(other)
    export_by(monkeypatch, lambda *_: (exported, 0))

    def from_dmabuf(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EINVAL, "ibv_reg_dmabuf_mr")

    monkeypatch.setattr(MemoryRegion, "from_dmabuf", from_dmabuf)
    with pytest.raises(OSError, match="ibv_reg_dmabuf_mr"):
        register(gpu())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(exported)
