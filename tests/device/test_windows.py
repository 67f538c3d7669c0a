"""Memory windows: opening a part of a region to the peer, and closing it again."""

from __future__ import annotations

import asyncio

import pytest

import aiordma
from aiordma import RemoteRegion
from aiordma.verbs import (
    SGE,
    Access,
    MemoryWindow,
    MWType,
    Opcode,
    SendWR,
    WCOpcode,
)
from tests.device.ends import Ends, connected
from tests.device.oracle import until
from tests.device.windows import DATA, OPENABLE, READ, TYPES, WRITE, make, refused

pytestmark = [pytest.mark.device, pytest.mark.one_loop]


@pytest.fixture(params=TYPES, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> MWType:
    kind: MWType = request.param
    return kind


async def test_the_part_and_the_rights(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    assert not window.bound
    await window.bind(server.qp, mr, 1000, 5000, READ | WRITE)
    assert (window.bound, window.addr, window.length) == (True, mr.addr + 1000, 5000)
    assert window.rkey != mr.rkey
    assert await ends.read(window.addr, window.rkey, 5000) == DATA[1000:6000]
    await ends.write(window.addr + 100, window.rkey, b"new")
    assert bytes(mr.view) == DATA[:1100] + b"new" + DATA[1103:]
    region = RemoteRegion.of(window)
    assert (region.addr, region.length, region.rkey) == (window.addr, 5000, window.rkey)
    assert region.rights == READ | WRITE


@pytest.mark.parametrize("right", [READ, WRITE])
async def test_a_right_that_was_not_given(ends: Ends, kind: MWType, right: Access) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)  # has both
    await window.bind(server.qp, mr, access=right)
    if right == READ:
        assert await ends.read(window.addr, window.rkey, 100) == DATA[:100]
        await refused(ends.write(window.addr, window.rkey, b"never"))
    else:
        source = ends.client.region(b"first", Access(0))
        await ends.client.qp.write(source, window.addr, window.rkey)
        await refused(ends.read(window.addr, window.rkey, 1))
        assert bytes(mr.view[:5]) == b"first"
    assert bytes(mr.view[5:]) == DATA[5:]


async def test_bounds(ends: Ends, kind: MWType) -> None:
    """Beyond the region nothing is read; Soft-RoCE of Linux 6.12 does not promise more."""
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    await window.bind(server.qp, mr, 1000, 100, READ)
    assert await ends.read(window.addr, window.rkey, 100) == DATA[1000:1100]
    await refused(ends.read(window.addr, window.rkey, 8192 - 1000 + 1))


async def test_before_the_region(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    await window.bind(server.qp, mr, 1000, 100, READ)
    await refused(ends.read(mr.addr - 1, window.rkey, 10))


async def test_atomics(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(64, OPENABLE | Access.REMOTE_ATOMIC)
    await window.bind(server.qp, mr, 8, 8, Access.REMOTE_ATOMIC)
    old = ends.client.region(8)
    await ends.client.qp.fetch_add(old, window.addr, window.rkey, 41)
    await ends.client.qp.compare_swap(old, window.addr, window.rkey, 41, 42)
    assert int.from_bytes(old.view, "little") == 41
    assert int.from_bytes(mr.view[8:16], "little") == 42


async def test_invalidation_ends_the_access(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    await window.bind(server.qp, mr, access=READ | WRITE)
    addr, rkey = window.addr, window.rkey
    assert await ends.read(addr, rkey, 10) == DATA[:10]
    await window.invalidate()
    assert (window.bound, window.length, window.access) == (False, 0, Access(0))
    with pytest.raises(ValueError, match="not bound"):
        await window.invalidate()
    await refused(ends.write(addr, rkey, b"never"))
    assert bytes(mr.view) == DATA
    mr.close()
    await mr.wait_closed(5)  # the window does not hold it any more


async def test_binding_again(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window = make(server, kind)
    first = server.region(bytearray(DATA), OPENABLE)
    second = server.region(bytearray(DATA[::-1]), OPENABLE)
    await window.bind(server.qp, first, access=READ)
    addr, rkey = window.addr, window.rkey
    if kind == MWType.TYPE_2:
        with pytest.raises(aiordma.RdmaOSError, match="invalidate it first"):
            await window.bind(server.qp, second)
        await window.invalidate(server.qp)
    await window.bind(server.qp, second, 10, 20, READ)
    assert window.rkey != rkey
    assert window.rkey & ~0xFF == rkey & ~0xFF
    assert await ends.read(window.addr, window.rkey, 20) == DATA[::-1][10:30]
    first.close()
    await first.wait_closed(5)
    # The same region once more.
    if kind == MWType.TYPE_2:
        await window.invalidate()
    await window.bind(server.qp, second, 0, 5, READ)
    assert await ends.read(window.addr, window.rkey, 5) == DATA[::-1][:5]
    await refused(ends.read(addr, rkey, 1))


async def test_the_last_byte_of_the_key(ends: Ends) -> None:
    server = ends.server
    window = make(server, MWType.TYPE_2)
    mr = server.region(bytearray(DATA), OPENABLE)
    for key in (0, 255, 7):
        await window.bind(server.qp, mr, key=key)
        assert window.rkey & 0xFF == key
        assert await ends.read(window.addr, window.rkey, 3) == DATA[:3]
        await window.invalidate()
    await window.bind(server.qp, mr)
    assert window.rkey & 0xFF == 8


async def test_addresses_from_zero(ends: Ends) -> None:
    server = ends.server
    window = make(server, MWType.TYPE_2)
    mr = server.region(bytearray(DATA), OPENABLE)
    await window.bind(server.qp, mr, 500, 1000, READ | Access.ZERO_BASED)
    assert window.addr == 0
    assert window.access == READ
    assert await ends.read(0, window.rkey, 1000) == DATA[500:1500]
    assert await ends.read(100, window.rkey, 5) == DATA[600:605]


async def test_the_peer_invalidates(ends: Ends) -> None:
    server, client = ends.server, ends.client
    window = make(server, MWType.TYPE_2)
    mr = server.region(bytearray(DATA), OPENABLE)
    inbox = server.region(64)
    await window.bind(server.qp, mr)
    rkey = window.rkey
    receiving = asyncio.create_task(server.qp.recv(SGE(inbox, 0, 32)))
    plain = asyncio.create_task(server.qp.recv(SGE(inbox, 32, 32)))
    await asyncio.sleep(0)
    await client.qp.send(client.region(b"done", Access(0)), invalidate=rkey)
    completion = await receiving
    assert completion.invalidated_rkey == rkey
    assert completion.imm_data is None
    assert bytes(inbox.view[:4]) == b"done"
    window.remotely_invalidated(completion)
    assert not window.bound
    # One that says nothing of the kind.
    await client.qp.send(client.region(b"more", Access(0)))
    other = await plain
    assert other.invalidated_rkey is None
    for claim in (other, completion):
        with pytest.raises(ValueError, match="did not invalidate this window"):
            window.remotely_invalidated(claim)
    await refused(ends.read(mr.addr, rkey, 1))


async def test_who_serves_the_peer(address: str, kind: MWType) -> None:
    """Type 1: every queue pair of the domain.  Type 2: the one on which it was bound."""
    async with connected(address) as ends, connected(address, server_pd=ends.server.pd) as others:
        window = make(ends.server, kind)
        mr = ends.server.region(bytearray(DATA), OPENABLE)
        await window.bind(ends.server.qp, mr)
        assert await ends.read(window.addr, window.rkey, 9) == DATA[:9]
        if kind == MWType.TYPE_1:
            assert await others.read(window.addr, window.rkey, 9) == DATA[:9]
        else:
            with pytest.raises(ValueError, match="on which it was bound"):
                await window.invalidate(others.server.qp)
            await refused(others.read(window.addr, window.rkey, 9))
        # Another domain's never does.
        async with connected(address) as strangers:
            await refused(strangers.read(window.addr, window.rkey, 9))
        assert await ends.read(window.addr, window.rkey, 9) == DATA[:9]


async def test_what_is_refused_before_it_is_posted(ends: Ends, kind: MWType) -> None:
    server, client = ends.server, ends.client
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    fixed = server.region(bytearray(100))  # without MW_BIND
    read_only = server.region(bytes(100), READ | Access.MW_BIND)
    strange = client.region(bytearray(100), OPENABLE)
    for offset, length in ((0, 8193), (8192, None), (-1, 5), (5, 0), (5, -1), (0, 1 << 64)):
        with pytest.raises(ValueError, match="not inside a region"):
            await window.bind(server.qp, mr, offset, length)
    with pytest.raises(ValueError, match="without MW_BIND"):
        await window.bind(server.qp, fixed)
    with pytest.raises(ValueError, match="without LOCAL_WRITE"):
        await window.bind(server.qp, read_only, access=WRITE)
    for region, qp in ((strange, server.qp), (mr, client.qp)):
        with pytest.raises(ValueError, match="same protection domain"):
            await window.bind(qp, region)
    for access in (Access(0), Access.LOCAL_WRITE, READ | Access.MW_BIND):
        with pytest.raises(ValueError, match="not the rights"):
            await window.bind(server.qp, mr, access=access)
    for key in (0, 5) if kind == MWType.TYPE_1 else (-1, 256):
        with pytest.raises(ValueError, match="last byte of the key"):
            await window.bind(server.qp, mr, key=key)
    if kind == MWType.TYPE_1:
        with pytest.raises(ValueError, match="not the rights"):
            await window.bind(server.qp, mr, access=READ | Access.ZERO_BASED)
    for bad in (SendWR(opcode=Opcode.BIND_MW, mw=window), SendWR(opcode=Opcode.BIND_MW)):
        with pytest.raises(ValueError, match="needs a memory window and a piece"):
            server.qp.post_send(bad)
    assert not window.bound
    # Nothing was lost by all that.
    await window.bind(server.qp, read_only)
    assert await ends.read(window.addr, window.rkey, 100) == bytes(100)
    with pytest.raises(aiordma.NotSupportedError, match=r"no memory windows of <MWType\.UNKNOWN_9"):
        MemoryWindow(server.pd, MWType(9))


async def test_raw_requests(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    rkey = (window.rkey & ~0xFF) | (window.rkey + 1 & 0xFF)
    bind = SendWR(
        wr_id=77, opcode=Opcode.BIND_MW, mw=window, bind=SGE(mr, 8, 16), bind_access=READ, rkey=rkey
    )
    with pytest.raises(ValueError, match="cannot be prepared"):
        server.qp.prepare_send(bind)
    if kind == MWType.TYPE_1:
        with pytest.raises(ValueError, match="not in a list"):
            server.qp.post_send([bind, bind])
    server.qp.post_send(bind)
    async with asyncio.timeout(10):
        completion = await anext(server.cq)
    assert (completion.wr_id, completion.ok) == (77, True)
    assert completion.opcode == WCOpcode.BIND_MW
    if kind == MWType.TYPE_2:
        window.rkey = rkey
    assert window.rkey == rkey
    assert await ends.read(mr.addr + 8, rkey, 16) == DATA[8:24]
    mr.close()  # takes the window with it
    assert window.closed
    await mr.wait_closed(10)


async def test_canceling_a_bind_does_not_stop_it(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    binding = asyncio.create_task(window.bind(server.qp, mr))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(aiordma.RdmaOSError, match="under way"):
        await window.bind(server.qp, mr)
    binding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await binding
    await until(lambda: window.bound)
    assert await ends.read(window.addr, window.rkey, 10) == DATA[:10]


async def test_a_failed_queue_pair(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window, second = make(server, kind), make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    await window.bind(server.qp, mr)
    server.qp.to_error()
    with pytest.raises(aiordma.FlushedError):
        await second.bind(server.qp, mr)
    with pytest.raises(aiordma.FlushedError):
        await window.invalidate()
    for opened in (window, second):
        opened.close()
        await opened.wait_closed(10)
        with pytest.raises(aiordma.ResourceClosedError):
            await opened.bind(server.qp, mr)
        with pytest.raises(aiordma.ResourceClosedError):
            _ = opened.rkey
