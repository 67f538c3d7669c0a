"""Memory regions: what a device may have or not, and what happens without it."""

from __future__ import annotations

import errno
import os
import random

import pytest

import aiordma
from aiordma.verbs import (
    Access,
    MemoryRegion,
    MRAdvice,
    ODPGeneralCaps,
    ProtectionDomain,
)
from tests.device.ends import ALL, Ends

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

RO = Access.REMOTE_READ
GIB = 1 << 30


async def test_relaxed_ordering_is_a_wish(ends: Ends) -> None:
    region = ends.server.region(bytearray(5000), ALL | Access.RELAXED_ORDERING)
    data = random.Random(1).randbytes(5000)
    await ends.write(region.addr, region.rkey, data)
    assert bytes(region.view) == data


async def test_the_huge_page_flag(pd: ProtectionDomain, is_siw: bool) -> None:
    buffer = bytearray(5000)
    if is_siw:
        MemoryRegion(pd, buffer, Access.LOCAL_WRITE | Access.HUGETLB).close()
    else:
        with pytest.raises(aiordma.NotSupportedError, match=r"rxe\d+ does not support .*HUGETLB"):
            MemoryRegion(pd, buffer, Access.LOCAL_WRITE | Access.HUGETLB)
        buffer.append(1)


async def test_on_demand_paging(ends: Ends) -> None:
    pd = ends.server.pd
    caps = pd.context.query_odp()
    pinned = ends.server.region(5000)
    if caps.general_caps & ODPGeneralCaps.SUPPORT:
        region = ends.server.region(bytearray(5000), ALL | Access.ON_DEMAND)
        await region.advise(MRAdvice.PREFETCH_WRITE)
        await ends.write(region.addr, region.rkey, b"x" * 5000)
        assert bytes(region.view) == b"x" * 5000
    else:
        assert not caps.rc_odp_caps
        missing = r"(rxe|siw)\d+ does not support on-demand paging"
        with pytest.raises(aiordma.NotSupportedError, match=missing) as refused:
            MemoryRegion(pd, 5000, ALL | Access.ON_DEMAND)
        assert refused.value.errno == errno.EOPNOTSUPP
        with pytest.raises(aiordma.NotSupportedError, match=f"ibv_advise_mr.*{missing}"):
            await pinned.advise(MRAdvice.PREFETCH)
    if caps.general_caps & ODPGeneralCaps.SUPPORT_IMPLICIT:
        with MemoryRegion.implicit(pd) as region:
            assert region.length == (1 << 64) - 1
    else:
        with pytest.raises(aiordma.NotSupportedError, match="on-demand paging"):
            MemoryRegion.implicit(pd)
    for offset, length in ((-1, 1), (0, 5001), (5001, None), (5000, 1), (10, -1)):
        with pytest.raises(ValueError, match="not inside"):
            await pinned.advise(MRAdvice.PREFETCH, offset, length)


async def test_dmabuf(pd: ProtectionDomain) -> None:
    """Neither software device takes one; what a device with it gets is a unit test."""
    fd = os.memfd_create("no dmabuf")
    try:
        with pytest.raises(
            aiordma.NotSupportedError,
            match=r"ibv_reg_dmabuf_mr: the device (rxe|siw)\d+ does not support dmabuf memory",
        ):
            MemoryRegion.from_dmabuf(pd, fd, 4096)
    finally:
        os.close(fd)
    for length, offset in ((0, 0), (-1, 0), (10, -1), (1 << 64, 1)):
        with pytest.raises(ValueError, match="cannot be part of a dmabuf"):
            MemoryRegion.from_dmabuf(pd, 0, length, offset=offset)
