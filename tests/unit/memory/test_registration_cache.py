"""RegistrationCache without an adapter: who registers, who is evicted, and what is held."""

from __future__ import annotations

import array
import asyncio
import errno
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiordma.errors import RdmaOSError, ResourceClosedError
from aiordma.loop import background
from aiordma.memory import RegistrationCache
from aiordma.memory import cache as cache_module
from aiordma.verbs import Access

from ..conftest import LOOPS, settle

LARGE = (1 << 20) + 1
RO = Access.REMOTE_READ


class Region:
    """Stands for a MemoryRegion: holds the export, counts, and registers when it may."""

    made: list[Region]
    gate: asyncio.Event | None
    failure: OSError | None

    def __init__(self, pd: Any, buffer: Any, access: Access) -> None:
        if Region.failure is not None:
            raise Region.failure
        self.view: memoryview | None = memoryview(buffer)
        self.length = self.view.nbytes
        self.access = access
        self.closed = False
        self._outcome: bool | None = None
        Region.made.append(self)

    @classmethod
    async def register(cls, pd: Any, buffer: Any, access: Access) -> Region:
        if cls.gate is not None:
            await cls.gate.wait()
        return cls(pd, buffer, access)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            assert self.view is not None
            self.view.release()
            self._outcome = True

    async def wait_closed(self) -> None:
        assert self.closed


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache_module, "MemoryRegion", Region)
    Region.made, Region.gate, Region.failure = [], None, None
    yield
    assert all(region.closed for region in Region.made), "regions that nobody closed"


def make(**limits: int) -> RegistrationCache:
    pd: Any = None  # that of the fake regions
    return RegistrationCache(pd, **limits)


async def test_the_second_use_is_a_hit() -> None:
    data = bytearray(1000)
    async with make() as cache:
        async with cache.get(data) as first:
            assert cache.stats.in_use == 1
        async with cache.get(data) as second:
            assert second is first
        # The same bytes by another object; other bytes, rights and lengths.
        assert await cache.take(memoryview(data)) is first
        for other, access in (
            (memoryview(data)[:999], Access.LOCAL_WRITE),
            (memoryview(data)[1:], Access.LOCAL_WRITE),
            (data, Access.LOCAL_WRITE | RO),
            (bytearray(1000), Access.LOCAL_WRITE),
        ):
            assert await cache.take(other, access) is not first
        stats = cache.stats
        assert (stats.hits, stats.misses, stats.evictions) == (2, 5, 0)
        assert (stats.entries, stats.in_use, stats.bytes) == (5, 5, 4998)
    assert len(Region.made) == 5
    assert cache.stats.bytes == cache.stats.entries == 0


async def test_a_cached_buffer_is_held_and_can_be_dropped() -> None:
    data, other = array.array("i", range(100)), bytearray(8)
    async with make() as cache:
        async with cache.get(data), cache.get(memoryview(data)[5:10]), cache.get(other):
            with pytest.raises(RdmaOSError, match="in use") as busy:
                await cache.drop(data)
            assert busy.value.errno == errno.EBUSY
        with pytest.raises(BufferError):
            data.append(1)
        assert await cache.drop(memoryview(data)[40:41]) == 1  # a part of the large one
        assert await cache.drop(memoryview(data)[40:41]) == 0
        assert await cache.drop(data) == 1
        data.append(1)
        assert await cache.drop(b"") == 0
        assert cache.stats.entries == 1
        assert cache.stats.evictions == 0


async def test_limits_evict_what_rests_longest() -> None:
    buffers = [bytearray(100) for _ in range(6)]
    async with make(max_bytes=300) as cache:
        held = await cache.take(buffers[0])
        for data in buffers[1:4]:
            async with cache.get(data):
                pass
        # 0 is in use and stays; of 1, 2, 3 the first had to go.
        assert cache.stats.evictions == 1
        async with cache.get(buffers[2]), cache.get(buffers[3]):
            pass
        assert cache.stats.misses == 4
        async with cache.get(buffers[2]):
            pass
        async with cache.get(buffers[4]):  # for which 3 goes, not 2
            pass
        async with cache.get(buffers[2]), cache.get(buffers[4]):
            pass
        assert (cache.stats.misses, cache.stats.evictions) == (5, 2)
        cache.give(held)
    async with make(max_entries=2) as cache:
        regions = [await cache.take(data) for data in buffers]
        assert cache.stats.entries == 6
        for region in regions:
            cache.give(region)
        assert cache.stats.entries == 2
        assert [region.closed for region in regions] == [True] * 4 + [False] * 2


async def test_a_buffer_beyond_the_limit_evicts_nobody_else() -> None:
    small, huge = bytearray(100), bytearray(1000)
    async with make(max_bytes=500) as cache:
        async with cache.get(small), cache.get(huge):
            assert cache.stats.bytes == 1100
        assert (cache.stats.bytes, cache.stats.evictions) == (100, 1)
        huge.append(1)
        async with cache.get(small):
            pass
        assert cache.stats.hits == 1
    async with make(max_bytes=0, max_entries=0) as cache:
        async with cache.get(small) as region:
            assert not region.closed
        assert region.closed
    for limits in ({"max_bytes": -1}, {"max_entries": -1}):
        with pytest.raises(ValueError, match="negative"):
            make(**limits)


async def test_everybody_who_waited_is_canceled() -> None:
    data = bytearray(LARGE)
    Region.gate = asyncio.Event()
    async with make() as cache:
        taking = [asyncio.create_task(cache.take(data)) for _ in range(2)]
        await settle()
        for task in taking:
            task.cancel()
        await asyncio.wait(taking)
        dropping = asyncio.create_task(cache.drop(data))
        await settle()
        assert not dropping.done()  # it waits for what is being registered
        Region.gate.set()
        assert await dropping == 1
        data.append(1)
        # And without a drop it is there for the next one.
        taking = [asyncio.create_task(cache.take(data))]
        Region.gate.clear()
        await settle()
        taking[0].cancel()
        await asyncio.wait(taking)
        Region.gate.set()
        await settle()
        async with cache.get(data):
            assert cache.stats.hits == 2
        assert len(Region.made) == 2


async def test_a_failure_reaches_all_and_leaves_nothing() -> None:
    for size in (100, LARGE):
        data = bytearray(size)
        Region.gate = asyncio.Event()
        Region.failure = OSError(errno.ENOMEM, "no")
        async with make() as cache:
            taking = [asyncio.create_task(cache.take(data)) for _ in range(3)]
            await settle()
            Region.gate.set()
            outcomes = await asyncio.gather(*taking, return_exceptions=True)
            assert outcomes == [Region.failure] * 3
            assert (cache.stats.entries, cache.stats.bytes) == (0, 0)
            Region.failure = None
            async with cache.get(data):
                pass
            assert await cache.drop(data) == 1
        data.append(1)


async def test_closing() -> None:
    data, large = bytearray(100), bytearray(LARGE)
    cache = make()
    Region.gate = asyncio.Event()
    region = await cache.take(data)
    taking = asyncio.create_task(cache.take(large))
    await settle()
    cache.close()
    cache.close()
    assert region.closed
    cache.give(region)
    closing = asyncio.create_task(cache.wait_closed())
    await settle()
    assert not closing.done()
    Region.gate.set()
    with pytest.raises(ResourceClosedError):
        await taking
    await closing
    for buffer in (data, large):
        buffer.append(1)
        with pytest.raises(ResourceClosedError):
            await cache.take(buffer)
    assert "closed" in repr(cache)


async def test_wrong_use() -> None:
    data = bytearray(100)
    async with make() as cache:
        region = await cache.take(data)
        cache.give(region)
        with pytest.raises(ValueError, match="not taken from this cache"):
            cache.give(region)
        other: Any = Region(None, data, RO)
        with pytest.raises(ValueError, match="not taken"):
            cache.give(other)
        Region.made[-1].close()
        for thing in (1000, None, "text"):
            with pytest.raises(TypeError):
                await cache.take(thing)
        # The same memory, through a view that must not be written.
        with pytest.raises(BufferError, match="read-only"):
            await cache.take(memoryview(data).toreadonly())
        with pytest.raises(ValueError, match="contiguous"):
            await cache.take(memoryview(data)[::2])
        with pytest.raises(ValueError, match="at least one byte"):
            await cache.take(b"")
        # Somebody else closed the region.
        region.close()
        async with cache.get(data) as another:
            assert another is not region
            another.close()
        async with cache.get(data):
            assert cache.stats.misses == 3


class Model(RuleBasedStateMachine):
    """Any order of taking, giving and dropping keeps the limits and the counts."""

    MAX_BYTES, MAX_ENTRIES, TOO_LARGE = 1000, 4, 4

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cache_module, "MemoryRegion", Region)
        Region.made, Region.gate, Region.failure = [], None, None
        self.loop = asyncio.new_event_loop()
        self.cache = make(max_bytes=self.MAX_BYTES, max_entries=self.MAX_ENTRIES)
        self.buffers = [bytearray(size) for size in (100, 200, 300, 400, 1100, 500)]
        self.taken: list[tuple[int, Any]] = []

    @rule(n=st.integers(0, 5))
    def take(self, n: int) -> None:
        region = self.loop.run_until_complete(self.cache.take(self.buffers[n]))
        self.taken.append((n, region))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        _, region = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.cache.give(region)

    @rule(n=st.integers(0, 5))
    def drop(self, n: int) -> None:
        dropping = self.cache.drop(self.buffers[n])
        if any(n == held for held, _ in self.taken):
            with pytest.raises(RdmaOSError):
                self.loop.run_until_complete(dropping)
        else:
            self.loop.run_until_complete(dropping)
            self.buffers[n].append(0)
            del self.buffers[n][-1:]

    @invariant()
    def counts(self) -> None:
        stats = self.cache.stats
        alive = [region for region in Region.made if not region.closed]
        assert stats.entries == len(alive)
        assert stats.bytes == sum(region.length for region in alive)
        assert stats.in_use == len({n for n, _ in self.taken})
        assert all(not region.closed for _, region in self.taken)
        # What is in use may exceed a limit; then nothing else is kept.
        assert stats.entries <= max(self.MAX_ENTRIES, stats.in_use)
        fitting = {n: len(buffer) for n, buffer in enumerate(self.buffers) if n != self.TOO_LARGE}
        kept = sum(region.length for region in alive if region.length <= self.MAX_BYTES)
        used = sum(fitting.get(n, 0) for n in {n for n, _ in self.taken})
        assert kept <= max(self.MAX_BYTES, used)
        if not any(n == self.TOO_LARGE for n, _ in self.taken):
            assert stats.bytes == kept

    def teardown(self) -> None:
        self.cache.close()
        self.loop.close()
        assert all(region.closed for region in Region.made)
        self.patch.undo()


TestModel = Model.TestCase


@pytest.mark.parametrize("name", list(LOOPS))
def test_a02_a_loop_that_ends_registers_at_once(name: str) -> None:
    """No task begins any more that would be left pending."""

    class Late:
        """A stream that needs memory while the loop waits for it."""

        async def _deliver(self) -> None:
            await settle(20)  # from now on no task begins
            assert background.start(asyncio.get_running_loop(), self._deliver) is None
            cache = make()
            region = await cache.take(bytearray(LARGE))
            assert region.length == LARGE
            cache.give(region)
            cache.close()
            taken.append(region)

    async def main() -> None:
        background.prepare()
        background.deliver_at_end(asyncio.get_running_loop(), late)

    late = Late()
    taken: list[Any] = []
    with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
        runner.run(main())
        Region.gate = asyncio.Event()  # a registration in a task would wait for it
    assert taken
    assert taken[0].closed


async def test_requests_at_one_time_register_once() -> None:
    data = bytearray(LARGE)
    Region.gate = asyncio.Event()
    async with make() as cache:
        taking = [asyncio.create_task(cache.take(data)) for _ in range(5)]
        await settle()
        with pytest.raises(RdmaOSError):
            await cache.drop(data)
        taking[0].cancel()  # the one that began it
        await settle()
        Region.gate.set()
        regions = await asyncio.gather(*taking[1:])
        assert len(set(map(id, regions))) == len(Region.made) == 1
        assert (cache.stats.hits, cache.stats.misses, cache.stats.in_use) == (4, 1, 1)
        for region in regions:
            cache.give(region)
        assert cache.stats.in_use == 0
