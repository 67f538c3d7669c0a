"""A datagram endpoint whose queue pair begins anew: what it had under way is its own again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._core import SUB_RECV, SUB_SHIFT
from aiordma._ffi import ffi, lib, load_error
from aiordma.datagram.port import DatagramPort
from aiordma.datagram.slots import RecvSlots, SendSlots
from aiordma.link.completions import Completions
from aiordma.loop.slots import SlotTable
from aiordma.verbs.enums import QPState, WCStatus
from aiordma.verbs.wc import WCRecord

from ..conftest import settle

pytestmark = pytest.mark.skipif(load_error() is not None, reason="rdma-core is not installed")

COUNT, SIZE = 4, 100


class FakeRegion:
    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))
        self.addr = 0x10000
        self.lkey = 7


class FakeHandle:
    users = 0

    def _require(self) -> Any:
        return ffi.NULL

    def _retain(self) -> None:
        self.users += 1

    def _let_go(self) -> None:
        self.users -= 1
        assert self.users >= 0


@pytest.fixture(autouse=True)
def no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is posted stays with the test."""
    for call in ("ibv_post_send", "aio_post_recv_slots"):
        monkeypatch.setitem(lib.__dict__, call, lambda *_: 0)


class Table(SlotTable[Any]):
    """Tells where an entry was added last."""

    base = 0

    def add(self, waiter: Any) -> int:
        self.base = super().add(waiter)
        return self.base


class Timed:
    """A loop whose time passes when the test says so."""

    def __init__(self) -> None:
        self.call_soon = asyncio.get_running_loop().call_soon
        self.timers: list[Callable[[], None]] = []

    def call_later(self, delay: float, function: Callable[[], None]) -> Any:
        self.timers.append(function)
        return SimpleNamespace(cancel=lambda: None)


class Place:
    """A port whose adapter is the test."""

    def __init__(self) -> None:
        self.states: list[QPState] = []
        self.restarted: list[OSError] = []
        self.lost = 0
        self.received: list[int] = []
        self.table = Table()
        to_send: Any = FakeRegion(COUNT * SIZE)
        to_receive: Any = FakeRegion(COUNT * SIZE)
        self.recv = RecvSlots(to_receive, COUNT, SIZE)
        channel: Any = SimpleNamespace(table=self.table)
        cq: Any = SimpleNamespace(manage=lambda **_: None)
        parts: list[Any] = [
            SimpleNamespace(_sink=None, _start_qp=lambda qp: None),  # the connection id
            None,
            Completions(channel, cq),
            None,
            SimpleNamespace(modify=self._modify, _require=lambda: ffi.NULL),
            self.recv,
            SendSlots(to_send, COUNT, SIZE),
        ]
        port: Any = DatagramPort(*parts)
        self.port: DatagramPort = port
        self.loop = port.loop = Timed()
        port.start(self)
        port.post_recv(range(COUNT))

    def _on_received(self, slot: int, record: WCRecord) -> None:
        self.received.append(slot)

    def _on_sent(self) -> None:
        """Its slot is free."""

    def _on_restarted(self, cause: OSError, lost: int) -> None:
        self.restarted.append(cause)
        self.lost += lost

    def _on_failed(self) -> None:
        pytest.fail("it has ended")

    def _modify(self, mask: Any, *, qp_state: QPState) -> None:
        self.states.append(qp_state)

    def send(self, data: bytes, handle: Any) -> bool:
        return self.port.post_send(data, handle, 5, 6)

    def completes(self, sub: int, status: WCStatus) -> None:
        wr_id = self.table.base + (sub << SUB_SHIFT)
        if (sink := self.table.get(wr_id)) is not None:
            sink((wr_id, int(status), 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0))


async def test_i05_what_does_not_come_back_is_free_after_the_new_beginning() -> None:
    """Soft-RoCE forgets some sends in a reset; their slots and handles are not lost with them."""
    place, handle = Place(), FakeHandle()
    for _ in range(COUNT):
        assert place.send(b"x", handle)
    assert not place.send(b"x", handle), "all slots are taken"
    place.completes(0, WCStatus.WR_FLUSH_ERR)
    (restart,) = place.loop.timers
    stale = place.table.base
    restart()  # the time for the others is over
    await settle()
    assert place.states == [QPState.RESET]
    assert len(place.restarted) == 1
    assert place.lost == COUNT, "one that came back, and those that the adapter forgot"
    assert place.port.sending == 0, "the slots of what the adapter forgot are lost"
    assert handle.users == 0, "and their handles pinned for ever"
    assert len(place.recv) == COUNT
    for _ in range(COUNT):
        assert place.send(b"y", handle)
    # What completes late is of before, and nobody's.
    assert place.table.get(stale) is None
    place.completes(SUB_RECV, WCStatus.SUCCESS)
    assert place.received == [0]


async def test_i05_all_that_came_back_begins_anew_without_waiting() -> None:
    place, handle = Place(), FakeHandle()
    place.send(b"x", handle)
    place.completes(COUNT - 1, WCStatus.WR_FLUSH_ERR)
    for slot in range(COUNT):
        assert place.states == []
        place.completes(SUB_RECV | slot, WCStatus.WR_FLUSH_ERR)
    await settle()
    assert place.states == [QPState.RESET]
    assert (place.port.sending, handle.users, len(place.recv)) == (0, 0, COUNT)
