"""Steps: what a loop over it may do, and that one left by `break` leaves nothing behind."""

from __future__ import annotations

import asyncio
import sys

import pytest

from aiordma.errors import ResourceClosedError
from aiordma.loop.steps import Steps

from ..conftest import Run


class Source:
    """Gives numbers up to a limit, and is then closed."""

    def __init__(self, limit: int) -> None:
        self.limit, self.given = limit, 0

    async def next(self) -> int:
        await asyncio.sleep(0)
        if self.given == self.limit:
            raise ResourceClosedError("closed")
        self.given += 1
        return self.given


def test_it_ends_when_its_object_is_closed(run: Run) -> None:
    async def main() -> list[int]:
        return [number async for number in Steps(Source(3).next)]

    assert run(main()) == [1, 2, 3]


async def test_one_that_is_left_goes_on_where_it_was_and_leaves_no_generator() -> None:
    begun: list[object] = []
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=begun.append)
    try:
        steps = Steps(Source(3).next)
        async for number in steps:
            assert number == 1
            break
        assert [number async for number in steps] == [2, 3]
    finally:
        sys.set_asyncgen_hooks(*before)
    assert not begun


async def test_other_errors_pass() -> None:
    async def broken() -> int:
        raise OSError(5, "broken")

    with pytest.raises(OSError, match="broken"):
        await anext(Steps(broken))
