"""An end of a connection whose adapter is the test: it takes READs and WRITEs, and does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from socket import ntohl
from types import SimpleNamespace
from typing import Any

from aiordma._core import EVENT_OPERATED, SUB_OPERATE, SUB_SHIFT
from aiordma._ffi import ffi
from aiordma.endpoint.batch import Batch
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.one_sided import OneSided
from aiordma.endpoint.outcome import Outcome
from aiordma.memory.governor import Account, Budget
from aiordma.memory.large_memory import LargeMemory
from aiordma.memory.pool import BufferPool
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs import SGE, Access, MemoryRegion
from aiordma.verbs.enums import AtomicCap, Opcode, SendFlags
from tests.inside.endpoint import attend

from ..conftest import settle
from ..core.completing import Completing, QueuePair, completion
from ..core.test_wakeup import called_by_the_loop
from ..verbs.test_memory_region import Domain
from .fabric import FakeLink

__all__ = ["BOTH", "MIB", "REMOTE", "Adapter", "End", "Place"]

_ATOMIC = (int(Opcode.ATOMIC_CMP_AND_SWP), int(Opcode.ATOMIC_FETCH_AND_ADD))
MIB = 1 << 20
BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE
REMOTE = RemoteRegion(1 << 40, 4 * MIB, 77, BOTH)


class Adapter:
    """Takes what is posted, or refuses it with `code`.

    Attributes:
        memory: Local memory of what is under way, by its number, if the adapter `touches` it.
        written: What each WRITE had in its memory when it was posted.
        chains: How many requests came with each post.
        quiet: Numbers of requests that complete only if they fail.
        takes: How many requests of the next chain it takes, if it refuses the rest.
    """

    touches = False
    takes = 0

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.written: list[bytes] = []
        self.posted: list[tuple[int, ...]] = []
        self.numbers: list[int] = []  # under way, and going to complete
        self.quiet: list[int] = []
        self.chains: list[int] = []
        self.code = 0
        self.qp = QueuePair(self._operate)

    def _operate(self, wr: Any) -> int:
        taken = 0
        while wr:
            if self.code and taken >= self.takes:
                self.qp.bad[0] = wr
                return self.code
            self._take(wr)
            taken += 1
            wr = wr.next
        self.chains.append(taken)
        return 0

    def _take(self, wr: Any) -> None:
        opcode = int(wr.opcode)
        sge = (0, 0, 0)
        if wr.num_sge:
            sge = (wr.sg_list[0].addr, wr.sg_list[0].length, wr.sg_list[0].lkey)
        compare_add = swap = 0
        if opcode in _ATOMIC:
            to = wr.wr.atomic
            compare_add, swap = to.compare_add, to.swap
        else:
            to = wr.wr.rdma
            if opcode == Opcode.RDMA_WRITE_WITH_IMM:
                compare_add = ntohl(wr.imm_data)
        self.posted.append((opcode, *sge, to.remote_addr, to.rkey, compare_add, swap))
        number = (wr.wr_id >> SUB_SHIFT) - SUB_OPERATE
        (self.numbers if wr.send_flags & SendFlags.SIGNALED else self.quiet).append(number)
        if self.touches:
            self.memory[number] = ffi.buffer(ffi.cast("char *", sge[0]), sge[1])
            if opcode == Opcode.RDMA_WRITE:
                self.written.append(bytes(self.memory[number]))


class End:
    """As much of a connection as `Connection.read` and `write` use."""

    def __init__(
        self, pd: Any, depth: int = 4, read_depth: int = 8, inline: int = 0, *, iwarp: bool = False
    ) -> None:
        self.config = config = ConnectionConfig(one_sided_depth=depth)
        self.link = link = FakeLink(config)
        link.pd = pd
        attributes = SimpleNamespace(atomic_cap=AtomicCap.HCA)
        context = SimpleNamespace(is_iwarp=iwarp, name="f0", attributes=attributes)
        self.gone: list[Callable[[], object]] = []
        link.context = context
        link.qp = SimpleNamespace(
            _read_depth=read_depth, _when_gone=self.gone.append, _expect=lambda more: None
        )
        self.budget = Budget(1 << 30)
        self.account = Account(self.budget, "peer")
        link.pool = BufferPool(pd, MIB, Access.LOCAL_WRITE, self.account, LargeMemory(MIB))
        self._state = self.state = state = link.state
        self.adapter = Adapter()
        nowhere = (0, 0, 0, 0)
        state.bind(self.adapter.qp.address, 0, 0, inline, nowhere, nowhere, (0, 0, 0), 0)
        keeper: Any = self
        state.set_receiver(keeper)
        state.operate_on(SGE, MemoryRegion, RemoteRegion, pd)
        self._completing = Completing(state)
        self.outcome = Outcome()
        self.one_sided = self._one_sided = OneSided(link, config, self.outcome)
        self.operations = self.one_sided.operations
        attend(self.operations)

    def _check_loop(self) -> None:
        """It is the right one."""

    def on_arrival(self, starved: bool) -> None:
        raise AssertionError("no message comes")

    _read: Any = Connection.read
    _write: Any = Connection.write
    fetch_add: Any = Connection.fetch_add
    compare_swap: Any = Connection.compare_swap

    async def read(self, into: Any, offset: int = 0, remote: Any = REMOTE) -> int:
        return int(await self._read(remote, into, offset=offset))

    async def write(self, data: Any, offset: int = 0, remote: Any = REMOTE) -> int:
        return int(await self._write(remote, data, offset=offset))

    def batch(self) -> Batch:
        return Batch(self.link, self.outcome, self.one_sided, self.config, self._check_loop)

    def complete(self, *numbers: int) -> None:
        """These have succeeded; all that are under way, if none is named."""
        for number in numbers or tuple(self.adapter.numbers):
            self.adapter.numbers.remove(number)
            assert self._completing.take(completion(SUB_OPERATE + number))
        assert self._completing.events == EVENT_OPERATED
        self._completing.events = 0

    def tell(self) -> None:
        self.state(EVENT_OPERATED)

    async def finish(self, task: asyncio.Task[Any]) -> None:
        """Let the adapter do all that it is asked for, until the task is done."""
        while not task.done():
            await settle(2)
            if self.adapter.numbers:
                self.complete()
                await called_by_the_loop(self.tell)

    def seen(self) -> tuple[Any, ...]:
        facts = self.state.facts()
        return (
            facts["free_numbers"], facts["operating"], facts["bytes_read"], facts["bytes_written"],
            self.adapter.posted[:],
        )  # fmt: skip


class Place:
    """A domain, a region and an end.

    Args:
        software: Whether the adapter is one whose READs and atomics are looked at.
        settings: Of `End`.
    """

    def __init__(self, *, software: bool = False, **settings: Any) -> None:
        self.pd = Domain(software=software)
        self.region = MemoryRegion(self.pd, 4096)
        self.end = End(self.pd, **settings)

    async def close(self) -> None:
        self.end.link.pool.close()
        self.region.close()
        await self.region.wait_closed()
        self.pd.close()
