"""An end of a connection whose adapter is the test: it takes READs and WRITEs, and does nothing."""

from __future__ import annotations

import asyncio
import ctypes
from types import SimpleNamespace
from typing import Any, cast

from aiordma._ffi import ffi, lib
from aiordma._ffi.fast import Mail, Parked
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.one_sided import OneSided
from aiordma.endpoint.operations import Operations
from aiordma.endpoint.outcome import Outcome
from aiordma.loop.job import Job
from aiordma.memory import RemoteRegion
from aiordma.verbs import SGE, Access, MemoryRegion
from aiordma.verbs.enums import AtomicCap

from .conftest import settle
from .fabric import FakeLink, as_link
from .test_memory_region import Domain
from .test_wakeup import called_by_the_loop

__all__ = ["BOTH", "MIB", "REMOTE", "Adapter", "End", "Place"]

_OPERATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_FIELDS = ("opcode", "addr", "length", "lkey", "remote_addr", "rkey", "compare_add", "swap")
_OPERATED = 4
_SUB = 0x5000
MIB = 1 << 20
BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE
REMOTE = RemoteRegion(1 << 40, 4 * MIB, 77, BOTH)


class Adapter:
    """Takes what is posted, or refuses it with `code`."""

    def __init__(self, lane: Any) -> None:
        self.posted: list[tuple[int, ...]] = []
        self.numbers: list[int] = []  # under way
        self.code = 0
        self.lane = lane
        self.call = _OPERATE(self._operate)
        address = ctypes.cast(self.call, ctypes.c_void_p).value
        assert address
        self.address = address

    def _operate(self, lane: int, request: int) -> int:
        if not self.code:
            wanted = ffi.cast("struct aio_operation *", request)
            self.posted.append(tuple(int(getattr(wanted, name)) for name in _FIELDS))
            self.numbers.append(int(wanted.number))
            self.lane.operating += 1
        return self.code


class End:
    """As much of a connection as `Connection.read` and `write` use."""

    def __init__(self, pd: Any, depth: int = 4, read_depth: int = 8) -> None:
        config = ConnectionConfig(one_sided_depth=depth)
        self.link = link = FakeLink(config)
        link.pd = pd
        attributes = SimpleNamespace(atomic_cap=AtomicCap.HCA)
        vars(link)["context"] = SimpleNamespace(is_iwarp=False, name="f0", attributes=attributes)
        self.gone: Job[None] = Job()
        rules = SimpleNamespace(read_depth=read_depth)
        vars(link)["qp"] = SimpleNamespace(_rules=rules, _gone=self.gone)
        self.lane = link.lane.c
        self.adapter = Adapter(self.lane)
        self._mail = self.mail = Mail(
            int(ffi.cast("uintptr_t", self.lane)), 0, 0, 0, self.adapter.address,
            cast("Any", self), Parked(link.loop),
        )  # fmt: skip
        self.mail.sge, self.mail.remote, self.mail.pd = SGE, RemoteRegion, pd
        self.outcome = Outcome()
        self.operations = Operations(as_link(link), config, self.mail, self.outcome)
        self._one_sided = OneSided(as_link(link), config, self.operations, self.outcome)
        self.operations._attend()

    def _check_loop(self) -> None:
        """It is the right one."""

    def on_news(self) -> None:
        raise AssertionError("no message comes")

    async def read(self, into: Any, offset: int = 0, remote: Any = REMOTE) -> int:
        return await Connection.read(cast("Connection", self), remote, into, offset=offset)

    async def write(self, data: Any, offset: int = 0, remote: Any = REMOTE) -> int:
        return await Connection.write(cast("Connection", self), remote, data, offset=offset)

    def complete(self, *numbers: int) -> None:
        """These have succeeded; all that are under way, if none is named."""
        for number in numbers or tuple(self.adapter.numbers):
            self.adapter.numbers.remove(number)
            wc = ffi.new("struct ibv_wc *")
            wc.wr_id = (_SUB + number) << 24
            assert lib.aio_lane_take(ffi.cast("struct aio_sink *", self.lane), wc)
        assert self.lane.sink.news == _OPERATED
        self.lane.sink.news = 0

    def tell(self) -> None:
        self.mail(_OPERATED)

    async def finish(self, task: asyncio.Task[Any]) -> None:
        """Let the adapter do all that it is asked for, until the task is done."""
        while not task.done():
            await settle(2)
            if self.adapter.numbers:
                self.complete()
                await called_by_the_loop(self.tell)

    def state(self) -> tuple[Any, ...]:
        lane = self.lane
        free = list(lane.operations_free[0 : lane.n_operations_free])
        return (free, lane.operating, lane.bytes_read, lane.bytes_written, self.adapter.posted[:])


class Place:
    """A domain, a region and an end."""

    def __init__(self, **settings: Any) -> None:
        self.pd = Domain()
        self.region = MemoryRegion(cast("Any", self.pd), 4096)
        self.end = End(self.pd, **settings)

    async def close(self) -> None:
        self.region.close()
        await self.region.wait_closed()
        self.pd.close()
