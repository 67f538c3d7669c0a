"""Turns: each comes up when all earlier ones were given back."""

from __future__ import annotations

import asyncio

from aiordma.loop.turns import Turns

from ..conftest import settle


async def test_they_come_up_in_the_order_in_which_they_were_taken() -> None:
    turns = Turns()
    assert not turns
    first, second, third = (turns.take() for _ in range(3))
    assert [turn.done() for turn in (first, second, third)] == [True, False, False]
    turns.give_back(second)  # before it has come up
    assert not third.done()
    turns.give_back(first)
    assert third.done()
    assert len(turns) == 1
    turns.give_back(third)
    assert not turns
    assert turns.take().done()


async def test_a_canceled_wait_keeps_the_order() -> None:
    turns, order = Turns(), list[int]()

    async def one(number: int) -> None:
        turn = turns.take()
        try:
            await turn
            order.append(number)
        finally:
            turns.give_back(turn)

    first = turns.take()
    tasks = [asyncio.create_task(one(number)) for number in range(4)]
    await settle()
    tasks[1].cancel()
    turns.give_back(first)  # and the canceled one is behind the next
    tasks[0].cancel()  # it has come up, and has not run
    await asyncio.wait(tasks, timeout=10)
    assert order == [2, 3]
    assert not turns
