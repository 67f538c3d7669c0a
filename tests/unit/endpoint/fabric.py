"""Two connections joined in memory: the real message layer over a fake adapter.

A `Wire` carries frames between two `FakeLink`s.  Nothing moves by itself: a test chooses which of
the adapters' events happens next, so that every order of arrival, acknowledgement and processing
can be had.  Frames of one direction stay in order, as on a reliable connection; everything else is
free.

What the model checks by itself, at every step: a frame that is sent finds a posted receive
(otherwise a real adapter would answer "receiver not ready"); no slot is posted twice or sent while
it is under way; an RDMA read finds its region registered and reads allowed.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from aiordma._core import MessageState
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.endpoint import rendezvous
from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.link import Link
from aiordma.endpoint.plan import hello_of, plan_of
from aiordma.memory import elastic
from aiordma.memory.byte_budget import Account, ByteBudget
from aiordma.verbs.enums import Access

from ..memory.fake_memory import AnyFakeArena, FakeArena, FakeElastic, FakePool, FakeRegion

Step = tuple[str, int]


def record(length: int, imm: int | None = None) -> Any:
    """A successful receive completion, as Link hands it on."""
    swapped = 0 if imm is None else int.from_bytes(imm.to_bytes(4, "big"), "little")
    return (0, 0, 128, 0, length, swapped, 1, 2, 0 if imm is None else 2, 0, 0, 0, 0)


def new_state(config: ConnectionConfig, loop: Any, receives: int, sends: int) -> MessageState:
    """A connection's, as `Link` makes it."""
    plan = plan_of(config)
    return MessageState(
        loop, sends=sends, receives=receives, send_depth=config.send_depth,
        arrivals=plan.arrivals, control=plan.control, raw=config.raw,
    )  # fmt: skip


class FakeId:
    """As much of a connection id as a connection uses."""

    def __init__(self) -> None:
        self._sink: Callable[[ConnectionEvent], bool] | None = None
        self.source = self.destination = ("10.80.0.1", 1)
        self.notified = 0
        self.peer: FakeId | None = None

    def _ends(self) -> tuple[Any, Any]:
        return self.destination, self.source

    def notify_established(self) -> None:
        self.notified += 1

    def event(self, kind: EventType, status: int = 0) -> None:
        """An event of this id arrives."""
        if self._sink is not None:
            self._sink(ConnectionEvent(cast("Any", None), kind, status, None))

    def start_disconnect(self) -> None:
        loop = asyncio.get_running_loop()
        for side in (self, self.peer):
            if side is not None:
                loop.call_soon(side.event, EventType.DISCONNECTED)


class FakeLink:
    """The adapter's side of a connection; what is sent waits in the peer's `inbound`."""

    def __init__(
        self, config: ConnectionConfig, arenas: tuple[AnyFakeArena, AnyFakeArena] | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.send, self.recv = arenas or (
            FakeArena(config.send_depth, config.slot_size),
            FakeArena(config.receives, config.slot_size),
        )
        for arena in (self.send, self.recv):
            if isinstance(arena, FakeElastic):
                arena.pin, arena.unpin = self.pin, self.unpin  # type: ignore[assignment]
        self.state = new_state(config, self.loop, self.recv.count, self.send.count)
        self.control = None if config.raw else FakeArena(CONTROL_SLOTS, 64)
        self.data_slots = config.send_depth
        self.cm_id = FakeId()
        self.pd = None
        self.pool, self.outgoing = FakePool(), FakePool()
        self.check_large = bool(config.check_large)  # as an adapter of hardware by default
        self.lands_in_the_open = False
        self.account = Account(ByteBudget(1 << 30), "peer")
        self.damage: Callable[[memoryview], object] = lambda view: None
        self.closed = self.forked = False
        self.failure: BaseException | None = None
        self.peer: FakeLink | None = None
        self.reads_allowed = 0
        self.max_unposted = 0
        self.processing = 0  # receive slots between the queue and the message layer
        self.promised: Callable[[], int] = lambda: 0
        self.sent: list[bytes] = []  # every frame, in order
        self.posted: deque[int] = deque()  # receive slots that the adapter has
        self.inbound: deque[tuple[int, bytes, int | None]] = deque()  # on their way to this side
        self.landed: deque[tuple[int, int, int | None]] = deque()  # arrived, not processed
        self.unacked: deque[int] = deque()  # own send slots that have landed at the peer
        self.reads: deque[tuple[int, FakeRegion, int, int, tuple[int, int]]] = deque()
        self.busy: set[int] = set()  # own send slots under way
        self.pinned: set[FakeRegion] = set()
        self._at_close: list[Callable[[], None]] = []
        self._on_frame: Callable[[int, Any], None] = lambda slot, record: None
        self._on_sent: Callable[[int], None] = lambda slot: None
        self._on_read: Callable[[int], None] = lambda number: None
        self._on_failed: Callable[[], None] = lambda: None

    def start(
        self,
        on_frame: Callable[[int, Any], None],
        on_sent: Callable[[int], None],
        on_read: Callable[[int], None],
        on_failed: Callable[[], None],
        on_ended: Callable[[int, Any], None],
        on_news: Callable[[int], None],
    ) -> None:
        self._on_frame, self._on_sent = on_frame, on_sent
        self._on_read, self._on_failed = on_read, on_failed
        self.post_recv(range(self.recv.count))

    # What the message layer calls

    def peer_name(self) -> str:
        return "the peer"

    def expect(self, *, answers: bool) -> None:
        """Nothing is armed here."""

    def listen(self) -> None:
        """This adapter tells of every completion."""

    def unlisten(self) -> None:
        """As `listen`."""

    def post_send(self, slot: int, length: int, imm: int | None = None) -> None:
        assert slot not in self.busy, "the slot is under way"
        arena, place = self.send, slot
        if slot >= self.data_slots and self.control is not None:
            arena, place = self.control, slot - self.data_slots
        assert length <= arena.slot_size
        assert arena.in_service(place), "the slot's memory is not registered"
        self.busy.add(slot)
        frame = bytes(arena.slot(place, length))
        self.sent.append(frame)
        # Every credit that the peer now has, and every control message, has its receive.
        assert len(self.posted) + len(self.landed) + self.processing >= self.promised()
        if self.failure is not None or self.closed or self.peer is None:
            return
        self.peer.inbound.append((slot, frame, imm))
        room = len(self.peer.posted)
        assert len(self.peer.inbound) <= room, (
            f"{len(self.peer.inbound)} frames on their way, {room} receives posted"
        )

    def post_recv(self, slots: Iterable[int]) -> None:
        if self.closed or self.failure is not None:
            return
        for slot in slots:
            assert slot not in self.posted, "posted twice"
            assert self.recv.in_service(slot), "the slot's memory is not registered"
            self.posted.append(slot)

    def post_read(
        self, number: int, region: FakeRegion, offset: int, length: int, remote: tuple[int, int]
    ) -> None:
        assert offset + length <= region.length
        self.reads.append((number, region, offset, length, remote))

    def fit(self) -> None:
        """There is no C that would have to know of slots that come and go."""

    def in_loop(self, function: Callable[[], None]) -> None:
        function()

    def pin(self, region: FakeRegion) -> None:
        region._retain()
        self.pinned.add(region)

    def unpin(self, region: FakeRegion) -> None:
        if region in self.pinned:
            self.pinned.discard(region)
            region._let_go()

    def open_access(self, rights: Access) -> None:
        assert rights == Access.REMOTE_READ
        self.reads_allowed += 1

    def close_access(self, rights: Access) -> None:
        assert rights == Access.REMOTE_READ
        self.reads_allowed -= 1
        assert self.reads_allowed >= 0

    def fail(self, cause: BaseException) -> None:
        if self.failure is None:
            self.failure = cause
            self._on_failed()

    @property
    def can_send(self) -> bool:
        return not self.closed and self.failure is None

    def to_error(self) -> None:
        """What is posted is flushed; no test looks at flushes."""

    def sweep(self) -> None:
        while self.landed:
            self.process()

    def end(self) -> None:
        """No test looks at flushes anyway."""

    async def quiesce(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for region in list(self.pinned):
            self.unpin(region)
        self.pool.close()
        self.outgoing.close()
        for function in self._at_close:
            function()

    def at_close(self, function: Callable[[], None]) -> None:
        self._at_close.append(function)

    async def wait_closed(self) -> None:
        """Gone at once."""

    def describe(self) -> dict[str, Any]:
        return {"device": "fake0"}

    # What the adapter does

    def land(self) -> None:
        """The next frame arrives: it takes a posted receive, and the sender's slot is done."""
        sender_slot, frame, imm = self.inbound.popleft()
        slot = self.posted.popleft()
        self.recv.slot(slot, len(frame))[:] = frame
        self.landed.append((slot, len(frame), imm))
        assert self.peer is not None
        self.peer.unacked.append(sender_slot)
        self.max_unposted = max(self.max_unposted, self.recv.count - len(self.posted))

    def process(self) -> None:
        """The loop takes the oldest receive completion."""
        slot, length, imm = self.landed.popleft()
        self.processing += 1
        self._on_frame(slot, record(length, imm))
        self.processing -= 1

    def inject(self, frame: bytes) -> None:
        """A frame of a hostile peer arrives and is processed."""
        slot = self.posted.popleft()
        self.recv.slot(slot, len(frame))[:] = frame
        self.landed.append((slot, len(frame), None))
        self.process()

    def acknowledge(self) -> None:
        """The loop takes the oldest send completion."""
        slot = self.unacked.popleft()
        self.busy.discard(slot)
        self._on_sent(slot)

    def read(self) -> None:
        """The oldest RDMA read is served by the peer's adapter."""
        number, region, offset, length, (address, key) = self.reads.popleft()
        assert self.peer is not None
        source = FakeRegion.regions.get(address >> 32 << 32)
        assert source is not None, "read of memory that is not registered"
        assert source.rkey == key
        assert self.peer.reads_allowed > 0, "reads are off"
        start = address - source.addr
        region.view[offset : offset + length] = source.view[start : start + length]
        self.damage(region.view[offset : offset + length])
        self._on_read(number)

    def steps(self) -> list[str]:
        """Names of the events that can happen now."""
        possible = (
            ("land", self.inbound), ("process", self.landed), ("acknowledge", self.unacked),
            ("read", self.reads),
        )  # fmt: skip
        return [] if self.closed else [name for name, queue in possible if queue]


def as_link(link: FakeLink) -> Link:
    return cast("Link", link)


class Wire:
    """Two connected `Connection`s, [0] the connecting side."""

    def __init__(
        self,
        first: ConnectionConfig,
        second: ConnectionConfig,
        arenas: Callable[[ConnectionConfig], tuple[AnyFakeArena, AnyFakeArena] | None] = (
            lambda config: None
        ),
        kind: type[FakeLink] = FakeLink,
    ) -> None:
        FakeRegion.regions.clear()
        self.configs = (first, second)
        self.links = (kind(first, arenas(first)), kind(second, arenas(second)))
        self.links[0].peer, self.links[1].peer = self.links[1], self.links[0]
        self.links[0].cm_id.peer, self.links[1].cm_id.peer = (
            self.links[1].cm_id,
            self.links[0].cm_id,
        )
        self.ends = tuple(
            Connection(as_link(link), config)
            for link, config in zip(self.links, self.configs, strict=True)
        )

        for link, end, config in zip(self.links, self.ends, self.configs, strict=True):
            link.promised = _promises(end, config)

    def meet(self, side: int) -> None:
        """The peer's half of the handshake is known on `side`."""
        peer = self.configs[1 - side]
        window = self.ends[1 - side]._receiver.window.size
        check = self.links[1 - side].check_large
        self.ends[side]._meet(hello_of(peer, b"", window, check=check), peer.responder_resources)

    async def open(self) -> None:
        """The whole handshake."""
        self.meet(1)
        greeting = self.ends[1]._await_greeting()
        self.meet(0)
        self.ends[0]._greet()
        self.settle()
        await greeting

    def steps(self) -> list[Step]:
        """The adapters' events that can happen now."""
        return [(name, side) for side in (0, 1) for name in self.links[side].steps()]

    def step(self, step: Step) -> None:
        getattr(self.links[step[1]], step[0])()

    def settle(self) -> None:
        """Let the adapters do all that they can."""
        for _ in range(100_000):
            steps = self.steps()
            if not steps:
                return
            self.step(steps[0])
        raise AssertionError("the adapters never come to rest")

    async def run(self, rounds: int = 20) -> None:
        """Adapters and tasks in turn, until neither has anything to do."""
        idle = 0
        for _ in range(10_000):
            if self.steps():
                self.settle()
                idle = 0
            else:
                idle += 1
                if idle > rounds:
                    return
            await asyncio.sleep(0)
        raise AssertionError("no end")

    async def close(self) -> None:
        """Close both sides while the adapters work."""

        async def work() -> None:
            while True:
                self.settle()
                await asyncio.sleep(0)

        worker = asyncio.create_task(work())
        try:
            await asyncio.gather(*(end.close() for end in self.ends))
        finally:
            worker.cancel()

    async def lose(self) -> None:
        """After the connection broke: wait until both sides are gone."""
        for link, end in zip(self.links, self.ends, strict=True):
            link.fail(ConnectionResetError(errno.ECONNRESET, "end of the test"))
            await end.wait_closed()


def _promises(end: Connection, config: ConnectionConfig) -> Callable[[], int]:
    if config.raw:
        return lambda: 0
    return lambda: end._receiver.window.unused + config.control_depth


def use_fake_regions(monkeypatch: Any) -> None:
    """Have the rendezvous, and arenas that grow, register with the fake adapter."""
    monkeypatch.setattr(rendezvous, "MemoryRegion", FakeRegion)
    monkeypatch.setattr(elastic, "MemoryRegion", FakeRegion)
