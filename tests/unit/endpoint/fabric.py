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
import threading
import weakref
from collections import deque
from collections.abc import Callable
from socket import ntohl
from types import SimpleNamespace
from typing import Any

from aiordma._core import SUB_READ, SUB_RECV, SUB_SHIFT, Drain, MessageState
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.cm.step import Stage
from aiordma.endpoint.config import (
    CONTROL_SIZE,
    CONTROL_SLOTS,
    MIN_ANSWERS,
    ConnectionConfig,
    hello_of,
    plan_of,
)
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.link import Link
from aiordma.endpoint.slots import Common
from aiordma.link.completions import Completions
from aiordma.memory import arena as arenas
from aiordma.memory.governor import Account, Budget, Lease
from aiordma.memory.large_memory import LargeMemory
from aiordma.verbs.enums import Access, Opcode, SendFlags, WCOpcode, WCStatus
from tests.inside.core import let_go, retain
from tests.inside.endpoint import (
    greet,
    greeting_of,
    meet,
    receiver_of,
    tell_failed,
)

from ..core.completing import Queue, QueuePair, completion
from ..memory.fake_memory import (
    AnyFakeArena,
    FakeArena,
    FakeElastic,
    FakePool,
    FakeRegion,
    FakeSlots,
)

Step = tuple[str, int]


def new_state(
    config: ConnectionConfig,
    loop: Any,
    receives: int,
    sends: int,
    answers: int | None = None,
    *,
    grows: bool = False,
) -> MessageState:
    """A connection's, as `Link` makes it; by default of one that has all slots from the start."""
    sizes = plan_of(config).state(grows=grows) | {"sends": sends, "receives": receives}
    sizes["answers"] = sizes["exchanges"] if answers is None else answers
    return MessageState(loop, **sizes)


class FakeId:
    """As much of a connection id as a connection uses."""

    number = 0
    stage = Stage.CONNECTED

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
            channel: Any = None
            self._sink(ConnectionEvent(channel, kind, status, None))

    def start_disconnect(self) -> None:
        loop = asyncio.get_running_loop()
        for side in (self, self.peer):
            if side is not None:
                loop.call_soon(side.event, EventType.DISCONNECTED)


class _FakeCompletions(Completions):
    """Takes all that has completed when it is asked to."""

    def __init__(self, link: FakeLink, queue: Queue) -> None:
        channel: Any = SimpleNamespace(drain=queue.drain)
        cq: Any = None  # the link is swept in its place
        super().__init__(channel, cq)
        self._link = weakref.ref(link)

    def sweep(self) -> None:
        if (link := self._link()) is not None:
            link.sweep()


class FakeCommon(Common):
    """What follows from the configuration, of connections whose adapter is fake."""

    def __init__(self, config: ConnectionConfig) -> None:
        self.plan = plan_of(config)
        self.bare = True
        self.checks = bool(config.check_large)
        self.wheel = None
        self._greeting = None


class FakeLink(Link):
    """The adapter's side of a connection, whose adapter is fake.

    C posts to a queue pair below, and takes completions out of a queue by a real drain.  What is
    sent waits in the peer's `inbound`.  The owner of the state is told of events in the next turn
    of the loop, as after a sweep.

    Attributes:
        refused: Completions that were left to Python.
        refusals: What posts of sends are refused with.
        telling: Whether events are told without the test's doing.
    """

    # In place of what needs an adapter.
    slots: Any
    cm_id: Any
    context: Any
    pd: Any = None
    identity = 0  # as that of an older library
    qp: Any
    pool: Any = None
    outgoing: Any = None
    account: Any = None
    memory: Any = None

    def __init__(
        self, config: ConnectionConfig, arenas: tuple[AnyFakeArena, AnyFakeArena] | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        send, recv = arenas or (
            FakeArena(config.send_depth, config.slot_size),
            FakeArena(config.receives, config.slot_size),
        )
        control = None if config.raw else FakeArena(CONTROL_SLOTS, CONTROL_SIZE)
        self.slots = FakeSlots(recv, send, control)
        for arena in (send, recv):
            if isinstance(arena, FakeElastic):
                arena.keeper = self
        first = None if isinstance(recv, FakeArena) else MIN_ANSWERS
        grows = first is not None and config.shared_slots is None
        self.state = new_state(config, self.loop, recv.count, send.count, first, grows=grows)
        self.cm_id = FakeId()
        self.pool, self.outgoing = FakePool(), FakePool()
        self.context = SimpleNamespace(name="fake0", is_software=False, is_iwarp=False)
        self.reads_expose = False
        self.common: Any = FakeCommon(config)
        self.account = Account(Budget(1 << 30), "peer")
        self.memory = LargeMemory(1 << 30)
        self._owner = None
        self.shared = None
        self.closed = False
        self.failure = None
        self.posted = 0
        self._adapter = QueuePair(self._send, self._receive)
        self._queue = Queue()
        self._qp_handle = self._adapter.handle
        self.completions = _FakeCompletions(self, self._queue)
        self._unexplained = self._idle = None
        self._thread = threading.get_ident()
        self._at_close = []
        limits = SimpleNamespace(max_inline_data=0)
        self.qp = SimpleNamespace(num=0, limits=limits, _expect=lambda more: None)
        self._data_slots = config.send_depth
        self.refused = 0
        self.delivering = True
        self.refusals: list[int] = []
        self.wrong: BaseException | None = None  # raised where nobody looked
        self.damage: Callable[[memoryview], object] = lambda view: None
        self.peer: FakeLink | None = None
        self.reads_allowed = 0
        self.max_unposted = 0
        self.promised: Callable[[], int] = lambda: 0
        self.sent: list[bytes] = []  # every frame, in order, without its number
        self.received = 0  # frames
        self.doorbells: list[int] = []  # how many of them each post has brought
        self.ready: deque[int] = deque()  # receive slots that the adapter has
        self.inbound: deque[tuple[int, bytes, int | None]] = deque()  # on their way to this side
        self.landed: deque[tuple[int, int, int | None]] = deque()  # arrived, not processed
        self.behind = 0  # frames of a sweep behind the first: C may send before it sees them
        self.unacked: deque[int] = deque()  # own send slots that have landed at the peer
        self.reads: deque[tuple[int, FakeRegion, int, int, tuple[int, int]]] = deque()
        self.busy: dict[int, None] = {}  # own send slots under way, the oldest first
        self.pinned: set[Any] = set()

    @property
    def own_pd(self) -> bool:
        """Likewise."""
        return True

    def _begin(self) -> None:
        """There is no table of slots."""

    @property
    def buffers(self) -> Any:
        """The pools and the account are the link's own."""
        return self

    # What C posts

    def _send(self, wr: Any) -> int:
        if self.refusals:
            return self.refusals.pop()
        before = len(self.sent)
        while wr:
            self._take(wr)
            wr = wr.next
        self.doorbells.append(len(self.sent) - before)
        return 0

    def _take(self, wr: Any) -> None:
        number, piece = wr.wr_id >> SUB_SHIFT, wr.sg_list[0]
        if wr.opcode == Opcode.RDMA_READ:
            assert wr.send_flags & SendFlags.SIGNALED
            self._read(number - SUB_READ, piece, (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey))
            return
        arena, place = self.slots.send, number
        if number >= self._data_slots and self.slots.control is not None:
            arena, place = self.slots.control, number - self._data_slots
        assert number not in self.busy, "the slot is under way"
        _check_piece(arena, place, piece)
        assert piece.length <= arena.slot_size
        assert wr.send_flags == SendFlags.SIGNALED | (
            0 if self.slots.control is None else SendFlags.SOLICITED
        )
        imm = ntohl(wr.imm_data) if wr.opcode == Opcode.SEND_WITH_IMM else None
        self.busy[number] = None
        frame = bytes(arena.slot(place, piece.length))
        plain = self.state.facts()["numbered"] and imm is None
        self.sent.append(bytes([frame[0] & 0xF]) + frame[1:] if plain else frame)
        # Every credit that the peer now has, and every control message, has its receive.
        assert len(self.ready) + len(self.landed) + self.behind >= self.promised()
        if self.failure is not None or self.closed or self.peer is None:
            return
        self.peer.inbound.append((number, frame, imm))
        room = len(self.peer.ready)
        assert len(self.peer.inbound) <= room, (
            f"{len(self.peer.inbound)} frames on their way, {room} receives posted"
        )

    def _receive(self, wr: Any) -> None:
        while wr:
            slot = wr.wr_id >> SUB_SHIFT & ~SUB_RECV
            _check_piece(self.slots.recv, slot, wr.sg_list[0])
            assert wr.sg_list[0].length == self.slots.recv.slot_size
            assert slot not in self.ready, "posted twice"
            if not self.closed and self.failure is None:
                self.ready.append(slot)
            wr = wr.next

    def _read(self, number: int, piece: Any, remote: tuple[int, int]) -> None:
        region = FakeRegion.regions[piece.addr >> 32 << 32]
        offset = piece.addr - region.addr
        assert piece.lkey == region.lkey
        assert offset + piece.length <= region.length
        self.reads.append((number, region, offset, piece.length, remote))

    def raise_wrong(self) -> None:
        """Raise what was raised below C, or told to nobody."""
        if (wrong := self._adapter.wrong or self.wrong) is not None:
            raise wrong

    # What needs an adapter

    def peer_name(self) -> str:
        return "the peer"

    def expect(self, more: int) -> None:
        """The completion queue has room for all."""

    def pin(self, region: Any) -> None:
        retain(region)
        self.pinned.add(region)

    def unpin(self, region: Any) -> None:
        if region in self.pinned:
            self.pinned.discard(region)
            let_go(region)

    async def register(self, buffer: Any, access: Access, lease: Lease | None = None) -> Any:
        if self.pd is not None:
            return await super().register(buffer, access, lease)

        def make() -> Any:
            return FakeRegion(None, buffer, access)

        return make() if lease is None else lease.register(make)

    def open_access(self, rights: Access) -> None:
        assert rights == Access.REMOTE_READ
        self.reads_allowed += 1

    def close_access(self, rights: Access) -> None:
        assert rights == Access.REMOTE_READ
        self.reads_allowed -= 1
        assert self.reads_allowed >= 0

    def fail(self, cause: BaseException) -> None:
        if self.failure is None:
            self.failure = self._adapter.wrong or cause
            if self._owner is not None:
                tell_failed(self._owner)

    @property
    def can_send(self) -> bool:
        return not self.closed and self.failure is None

    def to_error(self) -> None:
        """What is posted is flushed; no test looks at flushes."""

    def sweep(self) -> None:
        """All that has completed is taken at once."""
        self.behind = max(0, len(self.landed) - 1)
        self._complete(
            *[self._received() for _ in range(len(self.landed))],
            *[self._acknowledged() for _ in range(len(self.unacked))],
        )
        self.behind = 0

    async def quiesce(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        if self.closed:
            return
        self.state.close()
        self.closed = True
        self.completions.end()
        for region in list(self.pinned):
            self.unpin(region)
        self.pool.close()
        self.outgoing.close()
        for function in self._at_close:
            function()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner._drop_references()

    async def wait_closed(self) -> None:
        """Gone at once."""

    def describe(self) -> dict[str, Any]:
        return {"device": "fake0"}

    # What the adapter does

    def _complete(self, *wcs: Any) -> None:
        """The loop takes completions, and tells of them a little later."""
        for record in self._queue.sweep(*wcs):
            self.refused += 1
            self(record)
        if self._queue.drain.undelivered and self.delivering:
            self.loop.call_soon(self.tell)

    @property
    def drain(self) -> Drain:
        """That of its completions."""
        return self._queue.drain

    def tell(self) -> None:
        """Tell the owner of the state of its events; no task is running."""
        try:
            self._queue.drain.deliver()
        except Exception as exc:
            self.wrong = exc
        finally:
            if self._queue.drain.undelivered:
                self.loop.call_soon(self.tell)

    def land(self) -> None:
        """The next frame arrives: it takes a posted receive, and the sender's slot is done."""
        sender_slot, frame, imm = self.inbound.popleft()
        self._lay(frame, imm)
        assert self.peer is not None
        self.peer.unacked.append(sender_slot)
        self.max_unposted = max(self.max_unposted, self.slots.recv.count - len(self.ready))

    def _lay(self, frame: bytes, imm: int | None = None) -> int:
        slot = self.ready.popleft()
        self.received += 1
        self.slots.recv.slot(slot, len(frame))[:] = frame
        self.landed.append((slot, len(frame), imm))
        return slot

    def process(self) -> None:
        """The loop takes the oldest receive completion."""
        self._complete(self._received())

    def _received(self) -> Any:
        slot, length, imm = self.landed.popleft()
        return completion(SUB_RECV | slot, WCOpcode.RECV, length, imm)

    def inject(self, frame: bytes, imm: int | None = None) -> int:
        """A frame of a hostile peer arrives, in the slot that is returned, and is processed.

        It has the next number.
        """
        number = self.received % 16 << 4 if self.state.facts()["numbered"] else 0
        if imm is not None:
            imm |= number << 24
        elif frame:
            frame = bytes([frame[0] | number]) + frame[1:]
        slot = self._lay(frame, imm)
        self.process()
        return slot

    def acknowledge(self) -> None:
        """The loop takes the oldest send completion."""
        self._complete(self._acknowledged())

    def send_back(self, status: WCStatus) -> None:
        """The adapter gives the oldest of its sends back, without success."""
        slot = next(iter(self.busy))
        del self.busy[slot]
        self._complete(completion(slot, status=status))

    def acknowledge_and_fail(self, *, process: bool = False) -> None:
        """One drain brings all that has completed, and behind it a failure of the queue pair.

        Args:
            process: Whether it also brings the frames that have landed.
        """
        received = [self._received() for _ in range(len(self.landed) * process)]
        acknowledged = [self._acknowledged() for _ in range(len(self.unacked))]
        failure = completion(SUB_RECV, WCOpcode.RECV, status=WCStatus.LOC_PROT_ERR)
        self._complete(*received, *acknowledged, failure)

    def _acknowledged(self) -> Any:
        slot = self.unacked.popleft()
        self.busy.pop(slot, None)
        return completion(slot)

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
        self._complete(completion(SUB_READ | number, WCOpcode.RDMA_READ, length))

    def steps(self) -> list[str]:
        """Names of the events that can happen now."""
        self.raise_wrong()
        possible = (
            ("land", self.inbound), ("process", self.landed), ("acknowledge", self.unacked),
            ("read", self.reads), ("sweep", self.landed and self.unacked),
        )  # fmt: skip
        return [] if self.closed else [name for name, queue in possible if queue]


class LeftConnection(Connection):
    """A connection that a test leaves open: its adapter holds nothing that has to be closed."""

    def __del__(self, *_: object) -> None:
        """Without a warning."""


class LeftToPython:
    """Instead of a connection: what C leaves to Python ends at once, without a message."""

    async def _recv_in_python(self, _waited: bool) -> None:
        """End at once."""

    async def _recv_into_in_python(self, _buffer: object, _waited: bool) -> None:
        """End at once."""

    def _receive_abandoned(self) -> None:
        """No task is behind it."""


def _check_piece(arena: AnyFakeArena, place: int, piece: Any) -> None:
    assert arena.in_service(place), "the slot's memory is not registered"
    assert piece.addr == arena.addr_of(place)
    assert piece.lkey == arena.key(place), "the key of other memory"


class Wire:
    """Two connected `Connection`s, [0] the connecting side.

    Nothing moves by itself: `run` has the adapters work until nothing is under way, for instance
    after each `recv`, which may owe credits.  `close` and `lose` end both sides; the `close` of one
    side alone waits for the other.
    """

    def __init__(
        self,
        first: ConnectionConfig,
        second: ConnectionConfig,
        arenas: Callable[[ConnectionConfig], tuple[AnyFakeArena, AnyFakeArena] | None] = (
            lambda config: None
        ),
    ) -> None:
        FakeRegion.regions.clear()
        self.configs = (first, second)
        self.links = (FakeLink(first, arenas(first)), FakeLink(second, arenas(second)))
        self.links[0].peer, self.links[1].peer = self.links[1], self.links[0]
        self.links[0].cm_id.peer, self.links[1].cm_id.peer = (
            self.links[1].cm_id,
            self.links[0].cm_id,
        )
        self.ends = tuple(
            Connection(link, config) for link, config in zip(self.links, self.configs, strict=True)
        )

        for link, config in zip(self.links, self.configs, strict=True):
            link.promised = _promises(link, config)

    def meet(self, side: int) -> None:
        """The peer's half of the handshake is known on `side`."""
        peer = self.configs[1 - side]
        window = receiver_of(self.ends[1 - side]).window.size
        check = self.links[1 - side].common.checks
        meet(self.ends[side], hello_of(peer, b"", window, check=check), peer.read_depth)

    async def open(self) -> None:
        """The whole handshake."""
        self.meet(1)
        greeting = greeting_of(self.ends[1])
        self.meet(0)
        greet(self.ends[0])
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

    async def run(self, rounds: int = 8) -> None:
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
        for link in self.links:
            link.raise_wrong()
        for link, end in zip(self.links, self.ends, strict=True):
            link.fail(ConnectionResetError(errno.ECONNRESET, "end of the test"))
            await end.wait_closed()


def _promises(link: FakeLink, config: ConnectionConfig) -> Callable[[], int]:
    if config.raw:
        return lambda: 0
    # To a peer that has broken the protocol nothing is promised.
    state = link.state
    return lambda: 0 if state.facts()["wrong"] else state.unused + state.control


def use_fake_regions(monkeypatch: Any) -> None:
    """Have arenas that grow register with the fake adapter."""
    monkeypatch.setattr(arenas, "MemoryRegion", FakeRegion)
    # Forgotten with the test: each refers to its lease, and so to the connections of a pool.
    monkeypatch.setattr(FakeRegion, "regions", {})
