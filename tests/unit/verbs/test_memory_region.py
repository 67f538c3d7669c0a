"""MemoryRegion on devices that nobody here has: what C is given, and what its failures leave."""

from __future__ import annotations

import asyncio
import ctypes
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._ffi import ffi, lib
from aiordma.errors import NotSupportedError, ResourceClosedError
from aiordma.loop.workers import reaper
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs import SGE, Access, MemoryRegion, MRAdvice, ODPGeneralCaps, ODPTransportCaps
from aiordma.verbs import mr as mr_module
from aiordma.verbs.context import ODPCaps
from aiordma.verbs.pd import ProtectionDomain
from tests.inside.loop import all_done
from tests.inside.verbs import forget_leaked

from ..conftest import LIMIT_S

EVERYTHING = (1 << 64) - 1
NO_TRANSPORT = ODPTransportCaps(0)
NO_ODP = ODPGeneralCaps(0)


class Lib:
    """libibverbs' calls for memory, answered without a device."""

    IBV_ADVISE_MR_FLAG_FLUSH = lib.IBV_ADVISE_MR_FLAG_FLUSH

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse = 0  # errno of the next call

    def _answer(self, *call: Any) -> Any:
        self.calls.append(call)
        if self.refuse:
            ffi.errno = self.refuse
            return ffi.NULL
        return SimpleNamespace(lkey=0x1234, rkey=0x5678)

    def ibv_reg_mr(self, pd: Any, addr: Any, length: int, access: int) -> Any:
        return self._answer("reg", addr, length, access)

    def ibv_reg_mr_iova(self, pd: Any, addr: Any, length: int, iova: int, access: int) -> Any:
        return self._answer("iova", int(ffi.cast("uintptr_t", addr)), length, iova, access)

    def ibv_reg_dmabuf_mr(self, *args: Any) -> Any:
        return self._answer("dmabuf", *args[1:])

    def ibv_advise_mr(self, pd: Any, advice: int, flags: int, pieces: Any, count: int) -> int:
        ranges = [(pieces[i].addr, pieces[i].length, pieces[i].lkey) for i in range(count)]
        self.calls.append(("advise", advice, flags, ranges))
        return self.refuse

    def ibv_dereg_mr(self, handle: Any) -> int:
        self.calls.append(("dereg",))
        return self.refuse


class Domain(ProtectionDomain):
    """Stands for a protection domain on a device with the given abilities."""

    def __init__(
        self, caps: ODPGeneralCaps = NO_ODP, vendor_id: int = 1, *, software: bool = False
    ) -> None:
        odp = ODPCaps(caps, *[NO_TRANSPORT] * 4)
        attributes = SimpleNamespace(vendor_id=vendor_id)
        self.context: Any = SimpleNamespace(
            name="mlx5_9", query_odp=lambda: odp, attributes=attributes, is_software=software
        )
        super(ProtectionDomain, self).__init__("pd")
        self._identity = 11

    def _destroy(self, handle: Any) -> None:
        pass


def domain(**abilities: Any) -> Any:
    return Domain(**abilities)


@pytest.fixture
def c(monkeypatch: pytest.MonkeyPatch) -> Lib:
    fake = Lib()
    monkeypatch.setattr(mr_module, "lib", fake)
    return fake


def address_of(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_the_buffers_own_address(c: Lib) -> None:
    data = bytearray(100)
    with domain() as pd, MemoryRegion(pd, data, Access.LOCAL_WRITE | Access.MW_BIND) as region:
        where = address_of(data)
        assert c.calls == [("iova", where, 100, where, 0x11)]
        assert (region.addr, region.length, region.lkey, region.rkey) == (
            where, 100, 0x1234, 0x5678,
        )  # fmt: skip
    assert c.calls[1:] == [("dereg",)]


def test_an_iova(c: Lib) -> None:
    data = bytearray(8192)
    iova = (5 << 40) + address_of(data) % 4096
    with domain() as pd, MemoryRegion(pd, data, iova=iova) as region:
        assert c.calls == [("iova", address_of(data), 8192, iova, 1)]
        assert region.addr == iova
    with (
        domain(vendor_id=0x626D74) as siw,
        pytest.raises(NotSupportedError, match="ibv_reg_mr_iova: the device mlx5_9"),
    ):
        MemoryRegion(siw, data, iova=iova)


def test_the_domain_is_closed_during_the_call(c: Lib, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the call, and the region does not come to be."""
    data = bytearray(100)
    pd = domain()
    answer = c.ibv_reg_mr_iova

    def close_and_answer(*args: Any) -> Any:
        pd.close()
        assert pd._handle is not None, "not destroyed yet"
        return answer(*args)

    monkeypatch.setattr(c, "ibv_reg_mr_iova", close_and_answer)
    with pytest.raises(ResourceClosedError, match="the Domain is closed") as refused:
        MemoryRegion(pd, data)
    assert [call[0] for call in c.calls] == ["iova", "dereg"]
    assert pd._handle is None, "destroyed with the region"
    data.append(1)
    del refused


def test_a_refused_call_leaves_nothing_behind(c: Lib) -> None:
    data = bytearray(100)
    c.refuse = errno.ENOMEM
    with domain() as pd:
        with pytest.raises(OSError, match="ibv_reg_mr") as refused:
            MemoryRegion(pd, data)
        assert [call[0] for call in c.calls] == ["iova"]
        data.append(1)
        pd.destroy()
    del refused


def test_on_demand_memory(c: Lib) -> None:
    access = Access.LOCAL_WRITE | Access.ON_DEMAND
    with domain(caps=ODPGeneralCaps.SUPPORT) as pd:
        with MemoryRegion(pd, 4096, access):
            assert c.calls[0][-1] == 0x41
        with pytest.raises(NotSupportedError, match="mlx5_9 does not support implicit"):
            MemoryRegion.implicit(pd)
    with domain() as pd:
        c.calls.clear()
        with pytest.raises(NotSupportedError, match=r"on-demand paging \(ODP\)"):
            MemoryRegion(pd, 4096, access)
        with pytest.raises(NotSupportedError, match=r"on-demand paging \(ODP\)"):
            MemoryRegion.implicit(pd)
        assert not c.calls, "asked before it is tried"


def test_all_memory_of_the_process(c: Lib) -> None:
    both = ODPGeneralCaps.SUPPORT | ODPGeneralCaps.SUPPORT_IMPLICIT
    with domain(caps=both) as pd, MemoryRegion.implicit(pd) as region:
        assert c.calls == [("reg", ffi.NULL, EVERYTHING, 0x41)]
        assert region.length == EVERYTHING
        assert region
        piece = SGE(region, 0x7F00_0000_1000, 4096)  # by its address
        assert piece.mr.addr + piece.offset == 0x7F00_0000_1000
        with pytest.raises(OverflowError):
            len(region)
        with pytest.raises(BufferError, match="not made from a buffer"):
            _ = region.view


def test_dmabuf(c: Lib) -> None:
    with domain() as pd:
        with MemoryRegion.from_dmabuf(pd, 7, 4096, offset=8192) as region:
            assert c.calls == [("dmabuf", 8192, 4096, 8192, 7, 1)]
            assert region.addr == 8192
            with pytest.raises(BufferError, match="not made from a buffer"):
                _ = region.view
        remote = Access.LOCAL_WRITE | Access.REMOTE_WRITE
        with MemoryRegion.from_dmabuf(pd, 7, 10, remote, offset=5, iova=4101) as region:
            assert c.calls[-1] == ("dmabuf", 5, 10, 4101, 7, 3)
            assert region.addr == 4101
        with pytest.raises(ValueError, match="another offset within its page"):
            MemoryRegion.from_dmabuf(pd, 7, 10, offset=5, iova=4096)
        c.refuse = errno.EBADF
        with pytest.raises(OSError, match=r"ibv_reg_dmabuf_mr: EBADF.*\(10 bytes\)"):
            MemoryRegion.from_dmabuf(pd, 7, 10)
        c.refuse = errno.EOPNOTSUPP
        with pytest.raises(NotSupportedError, match="mlx5_9 does not support dmabuf memory"):
            MemoryRegion.from_dmabuf(pd, 7, 10)


def test_what_the_device_refuses_is_named(c: Lib) -> None:
    data = bytearray(100)
    with domain() as pd:
        for code in (errno.EOPNOTSUPP, errno.ENOSYS):
            c.refuse = code
            with pytest.raises(NotSupportedError, match=r"the access flags <Access\.HUGETLB: 128>"):
                MemoryRegion(pd, data, Access.LOCAL_WRITE | Access.HUGETLB)
            with pytest.raises(NotSupportedError, match="this kind of memory"):
                MemoryRegion(pd, data)
        c.refuse = errno.ENOMEM
        with pytest.raises(OSError, match=r"ENOMEM.*\(100 bytes\).*RLIMIT_MEMLOCK") as kept:
            MemoryRegion(pd, data)
        data.append(1)  # although the exception lives
        assert kept.value.errno == errno.ENOMEM


def test_a_region_by_name(c: Lib) -> None:
    with domain() as pd:
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.MW_BIND
        with MemoryRegion(pd, 4096, access) as region:
            name = RemoteRegion.of(region)
            assert name == RemoteRegion(region.addr, 4096, 0x5678, Access.REMOTE_WRITE, 11)
        with pytest.raises(ResourceClosedError):
            RemoteRegion.of(region)


async def test_advice(c: Lib) -> None:
    both = ODPGeneralCaps.SUPPORT | ODPGeneralCaps.SUPPORT_IMPLICIT
    flush = lib.IBV_ADVISE_MR_FLAG_FLUSH
    most = (1 << 32) - 1
    with domain(caps=both) as pd, MemoryRegion.implicit(pd) as region:
        c.calls.clear()
        await region.advise(MRAdvice.PREFETCH_WRITE, 4096, 5 << 30)
        pieces = [
            (4096, most, 0x1234), (4096 + most, (5 << 30) - most, 0x1234)
        ]  # fmt: skip
        assert c.calls == [("advise", 1, flush, pieces)]
        c.refuse = errno.EFAULT
        with pytest.raises(OSError, match="ibv_advise_mr: EFAULT"):
            await region.advise(MRAdvice.PREFETCH, 0, 100)
        c.refuse = 0
        # Closed while a thread is busy with it: it goes when the thread is through.
        advising = asyncio.create_task(region.advise(MRAdvice.PREFETCH, 0, 100))
        await asyncio.sleep(0)
        region.close()
        await advising
        await region.wait_closed(LIMIT_S)
        assert [call[0] for call in c.calls[-2:]] == ["advise", "dereg"]
    assert all_done(reaper, LIMIT_S)


def test_memory_that_cannot_be_deregistered_is_kept(
    c: Lib, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray(100)
    with domain() as pd:
        region = MemoryRegion(pd, data)
        c.refuse = errno.EBUSY
        region.close()
    assert "ibv_dereg_mr: EBUSY" in caplog.text
    with pytest.raises(BufferError):
        data.append(1)
    forget_leaked(1)
    data.append(1)


def test_kept_memory_has_its_view_when_it_is_asked_for(c: Lib) -> None:
    with domain() as pd, MemoryRegion.slab(pd, 8192, clear=True) as region:
        front = region._front(4096)
        assert len(front) == 4096
        view = region.view
        assert region.view is view
        assert (view.nbytes, view.readonly) == (8192, False)
        view[7] = 3
        assert bytes(front[:9]) == bytes(7) + b"\x03\x00", "both are the same memory"
        del view
    with pytest.raises(ResourceClosedError):
        region.view  # noqa: B018
    assert bytes(front[:9]) == bytes(7) + b"\x03\x00", "it outlives the region"
