"""Happy eyeballs: the first address has a head start, the first connection wins, nobody is left."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.cm.address import Address
from aiordma.errors import (
    ConnectionFailedError,
    ConnectionRejectedError,
    ConnectTimeoutError,
    DeviceNotFoundError,
)
from aiordma.link.eyeballs import AllFailedError, interleave, race
from tests.device.stepping import Steps, run_canceled

from ..conftest import cancel_at_every_turn, settle

V4 = [(f"10.0.0.{i}", 7) for i in range(1, 4)]
V6 = [(f"fd80::{i}", 7) for i in range(1, 4)]


class Net:
    """Hosts that answer when a test says so; counts what is open."""

    def __init__(self) -> None:
        self.answers: dict[Address, asyncio.Future[str]] = {}
        self.began: list[tuple[float, Address]] = []
        self.open: set[str] = set()
        self.start = asyncio.get_running_loop().time()

    async def attempt(self, address: Address) -> str:
        loop = asyncio.get_running_loop()
        self.began.append((loop.time() - self.start, address))
        connection = await self.answers.setdefault(address, loop.create_future())
        self.open.add(connection)
        return connection

    def answer(self, address: Address, error: BaseException | None = None) -> None:
        future = self.answers.setdefault(address, asyncio.get_running_loop().create_future())
        if future.done():  # its attempt was canceled
            return
        if error is None:
            future.set_result(address[0])
        else:
            future.set_exception(error)

    def race(
        self, addresses: list[Address], delay: float | None = 0.02
    ) -> Coroutine[Any, Any, str]:
        return race(addresses, self.attempt, delay, self.open.discard)


def refused(text: str = "refused") -> ConnectionRejectedError:
    return ConnectionRejectedError(errno.ECONNREFUSED, text, status=8, private_data=b"no")


@given(st.lists(st.sampled_from(V4 + V6), max_size=6, unique=True))
def test_families_take_turns(addresses: list[Address]) -> None:
    turns = interleave(addresses)
    assert sorted(turns) == sorted(addresses)
    if turns:
        assert turns[0] == addresses[0]
    for family in (V4, V6):
        assert [a for a in turns if a in family] == [a for a in addresses if a in family]
    shorter = min(len([a for a in turns if a in V4]), len([a for a in turns if a in V6]))
    kinds = [a in V4 for a in turns[: 2 * shorter]]
    assert all(kinds[i] != kinds[i + 1] for i in range(len(kinds) - 1))


async def test_the_first_wins_without_a_second_attempt() -> None:
    net = Net()
    net.answer(V6[0])
    assert await net.race([V6[0], V4[0]]) == "fd80::1"
    assert [address for _, address in net.began] == [V6[0]]


async def test_the_second_begins_after_the_head_start_and_wins() -> None:
    net = Net()
    net.answer(V4[0])
    assert await net.race([V6[0], V4[0], V6[1]]) == "10.0.0.1"
    # The third begins, too, where the loop is late by another head start.
    (first, a), (second, b), *_ = net.began
    assert (a, b) == (V6[0], V4[0])
    assert 0.018 <= second - first < 10  # uvloop counts in milliseconds
    assert net.answers[V6[0]].cancelled()
    assert net.open == {"10.0.0.1"}


async def test_a_failure_ends_the_head_start() -> None:
    net = Net()
    net.answer(V6[0], refused())
    net.answer(V4[0])
    async with asyncio.timeout(5):
        assert await net.race([V6[0], V4[0]], delay=60) == "10.0.0.1"


async def test_without_a_delay_one_at_a_time() -> None:
    net = Net()
    racing = asyncio.create_task(net.race([V6[0], V4[0]], delay=None))
    await asyncio.sleep(0.05)
    assert [address for _, address in net.began] == [V6[0]]
    net.answer(V6[0], refused())
    net.answer(V4[0])
    assert await racing == "10.0.0.1"


async def test_two_winners_in_one_moment() -> None:
    net = Net()
    racing = asyncio.create_task(net.race([V6[0], V4[0]], delay=0))
    await settle()
    net.answer(V4[0])
    net.answer(V6[0])
    assert {await racing} == net.open


async def test_all_failed() -> None:
    net = Net()
    for number, address in enumerate(V4):
        net.answer(address, ConnectionFailedError(errno.ENETUNREACH, f"error {number}"))
    with pytest.raises(AllFailedError) as caught:
        await net.race(V4, delay=60)
    assert [(a, e.strerror) for a, e in caught.value.failures] == [
        (address, f"error {number}") for number, address in enumerate(V4)
    ]


async def test_a_mistake_is_no_answer() -> None:
    net = Net()
    racing = asyncio.create_task(net.race([V6[0], V4[0]], delay=0))
    await settle()
    net.answer(V4[0], ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        await racing
    assert net.answers[V6[0]].cancelled()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [None, 0], [0, None]])
async def test_canceled_at_every_step(late: bool, order: list[int | None]) -> None:
    """Who is canceled has nothing open; who is not, one connection."""

    async def once(at: int) -> bool:
        net = Net()
        steps = Steps(at, late=late)
        addresses = [V6[0], V4[0]]

        async def answer() -> None:
            for which in order:
                await settle(3)
                if which is not None:
                    net.answer(addresses[which])

        answering = asyncio.create_task(answer())
        async with asyncio.timeout(5):
            result = await run_canceled(net.race(addresses, delay=0), steps)
            await answering
        await settle()
        assert net.open == ({result} if result is not None else set())
        assert len(asyncio.all_tasks()) == 1
        return steps.canceled

    at = 1
    while await once(at):
        at += 1
    assert at > 2


# All errors in one


def test_one_error_stays_itself() -> None:
    error = refused()
    assert AllFailedError([(V4[0], error)]).as_one("host", 7) is error


@pytest.mark.parametrize("reverse", [False, True])
def test_all_errors_in_the_kind_of_the_one_that_came_furthest(reverse: bool) -> None:
    errors: list[OSError] = [
        DeviceNotFoundError(errno.ENODEV, "no device"),
        ConnectionFailedError(errno.ENETUNREACH, "no route", event="ADDR_ERROR"),
        ConnectTimeoutError(errno.ETIMEDOUT, "no answer"),
        refused("nobody listens"),
    ]
    for count in range(2, 5):
        some = errors[:count][:: -1 if reverse else 1]
        failures = [((f"10.0.0.{i}", 7), error) for i, error in enumerate(some)]
        one = AllFailedError(failures).as_one("example.org", 7)
        furthest = errors[count - 1]
        assert type(one) is type(furthest)
        assert one is not furthest
        assert one.errno == furthest.errno
        for address, error in failures:
            assert f"{address[0]}: {error.strerror}" in str(one)
        assert "no address of example.org could be connected to on port 7: " in str(one)
        assert isinstance(one.__cause__, ExceptionGroup)
        assert list(one.__cause__.exceptions) == some
        if count == 4:
            assert isinstance(one, ConnectionRejectedError)
            assert one.private_data == b"no"
            assert one.status == 8


@pytest.mark.parametrize("won", [False, True])
async def test_canceled_at_every_turn(won: bool) -> None:
    """All attempts have closed what they had when the race ends, however long that takes."""
    net = Net()
    closing: set[Address] = set()

    async def attempt(address: Address) -> str:
        try:
            return await net.attempt(address)
        except asyncio.CancelledError:
            closing.add(address)
            await settle()
            closing.remove(address)
            raise

    racing = asyncio.create_task(race([V6[0], V4[0], V4[1]], attempt, 0, net.open.discard))
    await settle()
    if won:
        net.answer(V6[0])
        while not closing:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await cancel_at_every_turn(racing)
    assert racing.cancelled()
    assert not closing
    assert not net.open
    assert len(asyncio.all_tasks()) == 1
