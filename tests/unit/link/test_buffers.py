"""The memory of a connection at its end: its bytes count until it is deregistered."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.errors import ResourceClosedError
from aiordma.link.buffers import Buffers
from aiordma.memory import pool
from aiordma.memory.governor import AHEAD, Budget
from aiordma.memory.pool import room_of
from tests.inside.core import let_go, retain

from ..memory.fake_memory import FakeRegion

ROOM = room_of(1)


class QueuePair:
    """A queue pair that is closed; a thread destroys it sooner or later."""

    def __init__(self) -> None:
        self._gone = False
        self._waiting: list[Callable[[], object]] = []

    def _when_gone(self, function: Callable[[], object]) -> None:
        if self._gone:
            function()
        else:
            self._waiting.append(function)

    def destroy(self) -> None:
        self._gone = True
        for function in self._waiting:
            function()


@pytest.fixture(autouse=True)
def fake_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MemoryRegion", FakeRegion)
    FakeRegion.regions.clear()


def buffers_of(budget: Budget) -> Buffers:
    cm_id: Any = SimpleNamespace(destination_address="192.0.2.1", qp=None)
    pd: Any = SimpleNamespace(context=SimpleNamespace(is_iwarp=False))
    return Buffers(cm_id, pd, 1 << 20, 1 << 20, budget)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("use", ["fetched", "kept", "lent"])
async def test_g01_bytes_count_until_their_memory_is_deregistered(use: str, *, quick: bool) -> None:
    """Also where a thread destroys the queue pair before the loop has closed its memory."""
    budget, qp = Budget(16 * ROOM), QueuePair()
    buffers = buffers_of(budget)
    lease = buffers.account.lease(AHEAD, ROOM)
    assert lease is not None
    region: Any = await buffers.pool.take(ROOM, lease)
    if use == "fetched":
        buffers.pin(region)
    else:
        buffers.pool.give(region)
        lease.release()
        assert use == "kept" or buffers.pool.lend(region)
    assert budget.held() == ROOM
    retain(region)  # the thread that deregisters it is late
    if quick:
        qp.destroy()
    buffers.close(qp)  # type: ignore[arg-type]
    if not quick:
        qp.destroy()
    lease.release()
    assert (region.closed, budget.held(), buffers.pinned_bytes) == (True, ROOM, ROOM)
    let_go(region)
    assert (budget.held(), buffers.pinned_bytes, FakeRegion.regions) == (0, 0, {})


async def test_g01_nothing_is_registered_for_a_connection_that_was_closed() -> None:
    budget, qp = Budget(16 * ROOM), QueuePair()
    buffers = buffers_of(budget)
    lease = await buffers.account.wait(ROOM)
    buffers.close(qp)  # type: ignore[arg-type]
    with pytest.raises(ResourceClosedError):
        await buffers.pool.take(ROOM, lease)
    late = await buffers.account.wait(ROOM)
    with pytest.raises(ResourceClosedError):
        await buffers.pool.take(ROOM, late)
    assert (budget.held(), FakeRegion.regions) == (0, {})
