"""Memory of a fake adapter: slots, regions, a pool; see fabric."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from aiordma._ffi import ffi
from aiordma.memory.arena import Arena
from aiordma.memory.governor import Lease, Member


def _address(view: memoryview) -> int:
    # The arena keeps the bytes, and the view of cffi's ends here: no object keeps one.
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view)))


class FakeArena:
    """Slots of memory."""

    more = memoryview(b"")
    steps: ClassVar[list[Any]] = []
    _keys = itertools.count(7)

    def __init__(self, count: int, slot_size: int) -> None:
        self.count = count
        self.slot_size = slot_size
        self.view = memoryview(bytearray(count * slot_size))
        self.addr = _address(self.view)
        self.lkey = next(self._keys)
        self.mr = SimpleNamespace(lkey=self.lkey)

    def addr_of(self, slot: int) -> int:
        return self.addr + slot * self.slot_size

    def key(self, slot: int) -> int:
        return self.lkey

    def slot(self, number: int, length: int) -> memoryview:
        start = number * self.slot_size
        return self.view[start : start + length]

    def in_service(self, number: int) -> bool:
        return 0 <= number < self.count

    @property
    def present(self) -> int:
        """Slots that are registered."""
        return self.count

    # What memory.arena does.

    def grow(self, again: Callable[[], None]) -> Iterable[int]:
        return ()

    @property
    def spare(self) -> int:
        return 0

    def shrink(self) -> Iterable[int]:
        return ()

    def leaving(self, slot: int) -> bool:
        return False

    def hand_in(self, slot: int) -> None:
        raise AssertionError("no slot leaves")


class FakeRegion:
    """A registered buffer; `regions` finds it by its address."""

    regions: ClassVar[dict[int, FakeRegion]] = {}
    _addresses = itertools.count(1 << 32, 1 << 32)

    def __init__(self, pd: object, buffer: Any, access: object = None) -> None:
        self._buffer: Any = bytearray(buffer) if isinstance(buffer, int) else buffer
        self.view = memoryview(self._buffer).cast("B")
        self.length = self.view.nbytes
        self.addr = next(self._addresses)
        self.lkey = self.rkey = self.addr >> 32
        self.closed = False
        self.users = 0
        self._waiting: list[Callable[[], object]] = []
        self._gone = False
        self._pinned_in: Any = None
        self.regions[self.addr] = self

    def _front(self, size: int) -> memoryview:
        return self.view[:size]

    def _retain(self) -> None:
        assert not self.closed
        self.users += 1

    def _let_go(self) -> None:
        self.users -= 1
        assert self.users >= 0
        self._end()

    def close(self) -> None:
        self.closed = True
        self._end()

    def _end(self) -> None:
        if self.closed and not self.users:
            self.regions.pop(self.addr, None)
            self._buffer, self.view = b"", memoryview(b"")  # looked at by views only, from now on
            self._gone = True
            count, self._pinned_in = self._pinned_in, None
            if count is not None:
                count.deregistered(self.length)
            waiting, self._waiting = self._waiting, []
            for function in waiting:
                function()

    def when_gone(self, function: Callable[[], object]) -> None:
        if self._gone:
            function()
        else:
            self._waiting.append(function)

    _when_gone = when_gone

    def _until_gone(self) -> asyncio.Future[None]:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.when_gone(lambda: None if gone.done() else gone.set_result(None))
        return gone

    async def wait_closed(self, timeout: float = 60.0) -> None:
        async with asyncio.timeout(timeout):
            await self._until_gone()


def registered_with(lease: Lease) -> FakeRegion:
    """A region that counts for a lease."""
    return cast("FakeRegion", lease.register(lambda: cast("Any", FakeRegion(None, 1))))


class FakeElastic(Arena):
    """The real one, over fake regions (`use_fake_regions`), whose addresses are not the bytes'."""

    __slots__ = ("_view",)

    _view: memoryview

    def __init__(
        self, most: int, base: int, chunk: int, slot_size: int, member: Member, unit: int = 1
    ) -> None:
        first = FakeArena(base, slot_size)
        region: Any = SimpleNamespace(addr=first.addr, lkey=first.lkey, pd=None)
        super().__init__(region, (0, base, slot_size), most, chunk, member, unit)
        self._view = first.view

    @property
    def view(self) -> memoryview:
        """Bytes of the base."""
        return self._view

    @property
    def crowded(self) -> int:
        """Address of the byte of the pool."""
        return 0 if self._member is None else self._member.growth.crowded

    def _enter(self, number: int, lease: Lease) -> Any:
        chunk = super()._enter(number, lease)
        self.more_addr = _address(self.more)
        return chunk

    def key(self, slot: int) -> int:
        return self.lkey if slot < self._base else self._chunks[self._number(slot)].mr.lkey

    @property
    def first(self) -> int:
        """Slots that are always there."""
        return self._base

    def addr_of(self, slot: int) -> int:
        if slot < self._base:
            return self.addr + slot * self.slot_size
        return self.more_addr + (slot - self._base) * self.slot_size

    def slot(self, number: int, length: int) -> memoryview:
        assert self.in_service(number)
        if number < self._base:
            return self.view[number * self.slot_size :][:length]
        return self.more[(number - self._base) * self.slot_size :][:length]

    def in_service(self, number: int) -> bool:
        if number < self._base:
            return number >= 0
        chunk = self._chunks.get(self._number(number))
        return chunk is not None and number in chunk.inside

    @property
    def present(self) -> int:
        return self._base + sum(len(chunk.inside) for chunk in self._chunks.values())


AnyFakeArena = FakeArena | FakeElastic


class FakeSlots:
    """The slots of a connection; those to receive, to send, and to send without data."""

    def __init__(
        self, recv: AnyFakeArena, send: AnyFakeArena, control: FakeArena | None = None
    ) -> None:
        self.recv, self.send, self.control = recv, send, control

    @property
    def crowded(self) -> int:
        """Address of the byte of the pool."""
        return self.recv.crowded if isinstance(self.recv, FakeElastic) else 0

    @property
    def counts(self) -> tuple[int, int]:
        """Slots to receive and to send."""
        return self.recv.count, self.send.count

    @property
    def places(self) -> list[tuple[int, int, int, int]]:
        """Where they are, for C."""
        arenas = (self.recv, self.send, self.control)
        return [(a.addr, a.slot_size, a.lkey, a.count) for a in arenas if a is not None]

    @property
    def received(self) -> memoryview:
        """Bytes of the first slots to receive."""
        return self.recv.view

    @property
    def more_received(self) -> memoryview:
        """Bytes of the others."""
        return self.recv.more


class FakePool:
    """Buffers for large messages."""

    def __init__(self) -> None:
        self._out: set[FakeRegion] = set()

    @property
    def out(self) -> int:
        """Buffers that were not given back."""
        return len(self._out)

    def take_kept(self, size: int) -> FakeRegion | None:
        return None

    async def take(self, size: int, lease: Lease | None = None) -> FakeRegion:
        def make() -> Any:
            return FakeRegion(None, size)

        region: FakeRegion = make() if lease is None else cast("Any", lease.register(make))
        self._out.add(region)
        return region

    def give(self, region: FakeRegion) -> None:
        self._out.discard(region)
        region.close()

    drop = give

    def close(self) -> None:
        """Deregister what is out."""
        for region in self._out:
            region.close()
