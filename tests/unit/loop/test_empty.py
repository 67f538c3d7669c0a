"""EMPTY stands in for lines in which nobody waits, and is never one of them."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.loop.credits import Credits
from aiordma.loop.empty import EMPTY, NOTHING
from aiordma.loop.wait_line import WaitLine

from ..conftest import Run, settle


@pytest.fixture(autouse=True)
def _stays_empty() -> object:
    yield
    assert not EMPTY
    assert not NOTHING


def test_it_has_room_for_nothing() -> None:
    EMPTY.append(1)
    EMPTY.extend([1, 2])
    assert len(EMPTY) == 0


def test_two_lines_are_not_one(run: Run) -> None:
    async def main() -> None:
        here, there = WaitLine[None](), WaitLine[None]()
        first, second = (asyncio.create_task(line.wait()) for line in (here, there))
        await settle()
        assert (len(here), len(there)) == (1, 1)
        here.grant(None)
        await settle()
        assert first.done()
        assert not second.done()
        there.grant_all(None)
        await second

    run(main())


def test_two_counters_are_not_one(run: Run) -> None:
    async def main() -> None:
        here, there = Credits(0), Credits(0)
        first, second = (asyncio.create_task(one.acquire()) for one in (here, there))
        await settle()
        assert (here.waiting, there.waiting) == (1, 1)
        there.release()
        await second
        assert not first.done()
        here.release()
        await first

    run(main())


def test_a_line_can_be_used_again(run: Run) -> None:
    async def main() -> None:
        line = WaitLine[None]()
        for _ in range(3):
            waiting = [asyncio.create_task(line.wait()) for _ in range(2)]
            await settle()
            line.grant_all(None)
            await asyncio.gather(*waiting)
            assert len(line) == 0

    run(main())
