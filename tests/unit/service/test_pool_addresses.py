"""Pool with several addresses, functions that name them, and rails; see pooled.py."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from aiordma import Pool, ResourceClosedError
from tests.device.stepping import Steps, every_step, run_canceled
from tests.inside.service import name_within, prove_after, users_of

from ..conftest import LIMIT_S, settle
from .pooled import Serve, Server, new_pool, nothing_left, until

A, B, C = ("a", 1), ("b", 2), ("c", 3)
RAIL, OTHER = "10.0.0.1", "10.0.0.2"


def at(server: Server) -> collections.Counter[tuple[str, int]]:
    """How many connections are open to each address."""
    return collections.Counter(each.address for each in server.live)


def die(server: Server, address: tuple[str, int]) -> None:
    """The server at an address is killed."""
    server.down.add(address)
    for each in server.live:
        if each.address == address:
            each.abort()


async def test_failover_takes_the_first_address_that_works(new_server: Serve) -> None:
    server = new_server()
    server.down = {A}
    async with new_pool(host=[A, B, C], min_size=3, max_pause=0.1) as pool:
        assert repr(pool) == "<Pool open to 3 addresses, 0 connections>"
        await pool.wait()
        assert at(server) == {B: 3}
        dead, alive, unused = pool.stats.addresses
        assert (dead.host, dead.port, dead.works, dead.size) == ("a", 1, False, 0)
        assert "no program listens" in str(dead.last_error)
        assert (alive.works, alive.size, alive.last_error) == (True, 3, None)
        assert (unused.size, unused.errors, unused.works) == (0, 0, None), "it was never tried"
        server.down = set()
        await until(lambda: at(server) == {A: 3})
        assert pool.stats.addresses[0].works
        assert pool.stats.moves == 3
        assert pool.stats.lost == 0
        await settle()
        dialed = len(server.dialed)
        await asyncio.sleep(0.2)
        assert len(server.dialed) == dialed  # all is well, and nothing is tried
    await nothing_left(server)


async def ask_all_alike(server: Server, pool: Pool) -> None:
    """Twelve requests at once: each of three addresses gets as many."""
    server.answering.clear()
    asking = [asyncio.create_task(pool.request(b"?")) for _ in range(12)]
    await settle()
    assert [each.requests for each in pool.stats.addresses] == [4, 4, 4]
    server.answering.set()
    await asyncio.gather(*asking)


async def test_spread_keeps_as_many_to_each(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(
        host=[A, B, C], policy="spread", min_size=6, max_size=6, max_pause=0.1
    ) as pool:
        await pool.wait()
        assert at(server) == {A: 2, B: 2, C: 2}
        die(server, B)
        await until(lambda: at(server) == {A: 3, C: 3})
        server.down = set()
        await until(lambda: at(server) == {A: 2, B: 2, C: 2})
        assert pool.stats.moves == 2
        # Requests go where the fewest are under way.
        await ask_all_alike(server, pool)
    await nothing_left(server)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"policy": "spread"}, {A: 1, B: 1, C: 1}),
        ({"policy": "spread", "max_size": 2}, {A: 1, B: 1}),
        ({"policy": "spread", "min_size": 1}, {A: 1}),
        ({"policy": "spread", "local_addrs": [RAIL, OTHER]}, {A: 2, B: 2, C: 2}),
        ({"local_addrs": [RAIL, OTHER]}, {A: 2}),
        ({"policy": "spread", "host": lambda: A}, {A: 1}),
        ({}, {A: 1}),
    ],
)
async def test_each_way_has_a_connection_by_default(
    new_server: Serve, options: dict[str, Any], expected: dict[tuple[str, int], int]
) -> None:
    server = new_server()
    async with new_pool(**{"host": [A, B, C]} | options) as pool:
        await pool.wait()
        await settle()
        assert at(server) == expected
        rails = {each.local for each in server.live}
        assert rails == set(options.get("local_addrs", [None]))
    await nothing_left(server)


async def test_a_burst_is_spread_once_the_pool_is_filled(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(host=[A, B, C], policy="spread") as pool:
        await pool.wait()
        await ask_all_alike(server, pool)
    await nothing_left(server)


@pytest.mark.parametrize("policy", ["failover", "spread"])
async def test_requests_survive_the_death_of_an_address(new_server: Serve, policy: str) -> None:
    server = new_server()
    async with new_pool(host=[A, B], policy=policy, min_size=4, max_pause=0.1) as pool:
        await pool.wait()
        answers = []

        async def ask(number: int) -> None:
            body = b"%d" % number
            answers.append(await pool.request(body, timeout=LIMIT_S, idempotent=True) == body)

        for number in range(50):
            if number == 25:
                die(server, A)
            await ask(number)
        assert answers == [True] * 50
        assert at(server)[B] >= 2
    await nothing_left(server)


async def test_a_request_is_sent_again_to_another_address_first(new_server: Serve) -> None:
    server = new_server()
    server.breaks = [True]
    server.ends_late = True
    async with new_pool(host=[A, B], policy="spread", min_size=4, max_size=4) as pool:
        await pool.wait()
        assert await pool.request(b"?", idempotent=True) == b"?"
        asked = [each.address for each in server.made if each.requests]
        assert sorted(asked) == [A, B]
        assert [each.requests for each in pool.stats.addresses] == [1, 1]
    await nothing_left(server)


@pytest.mark.parametrize("policy", ["failover", "spread"])
async def test_an_address_that_is_stopping_is_left_for_another(
    new_server: Serve, policy: str
) -> None:
    server = new_server()
    async with new_pool(host=[A, B], policy=policy, min_size=4, max_size=4) as pool:
        await pool.wait()
        server.stopping.add(A)
        server.down.add(A)
        for _ in range(10):
            assert await pool.request(b"?", timeout=LIMIT_S) == b"?"
        refused = [each for each in server.made if each.address == A and each.requests]
        assert all(len(each.requests) == 1 for each in refused)
        assert pool.stats.retries == len(refused)
    await nothing_left(server)


@pytest.mark.parametrize("policy", ["failover", "spread"])
async def test_an_address_that_does_not_answer_holds_nobody_up(
    new_server: Serve, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose last connection has broken is tried aside, at once."""
    server = new_server()
    prove_after(monkeypatch, 0.0)
    async with new_pool(host=[A, B], policy=policy, min_size=1, max_size=2) as pool:
        await pool.wait()
        assert at(server) == {A: 1}
        server.silent = {A}
        server.live[0].abort()
        assert await pool.request(b"?", timeout=LIMIT_S / 2) == b"?"
        assert at(server) == {B: 1}
    await nothing_left(server)


@pytest.mark.parametrize(
    ("options", "limit_s"),
    [({}, 10), ({"host": [A]}, 10), ({"host": [A, B]}, 3), ({"connect_timeout": 0.5}, 0.5)],
)
async def test_an_attempt_has_a_limit(
    new_server: Serve, options: dict[str, Any], limit_s: float
) -> None:
    server = new_server()
    async with new_pool(**options) as pool:
        await pool.wait()
    assert server.limits == [limit_s]
    await nothing_left(server)


async def test_a_pool_that_is_still_connecting_says_so(new_server: Serve) -> None:
    server = new_server()
    server.silent = {A}
    async with new_pool(host=[A, B], timeout=0.05) as pool:
        with pytest.raises(
            TimeoutError, match=r"had no connection within 0\.05 s, and is connecting"
        ):
            await pool.request(b"x")
    await nothing_left(server)


async def test_failures_that_cause_each_other_end(new_server: Serve) -> None:
    server, one, other = new_server(), ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one

    def name() -> tuple[str, int]:
        raise one

    async with new_pool(host=name, timeout=0.05) as pool:
        with pytest.raises(TimeoutError, match="one"):
            await pool.request(b"x")
    await nothing_left(server)


async def test_a_move_never_has_more_connections_than_the_pool_may(new_server: Serve) -> None:
    server = new_server()
    server.down = {A}
    async with new_pool(host=[A, B], max_size=1, max_pause=0.05) as pool:
        async with pool.connection() as lent:
            server.down = set()
            await until(lambda: at(server) == {A: 1, B: 1})
            # The one to A waits for its place.
            assert pool.stats.size == 1
            assert not lent.is_closing()
        await until(lambda: at(server) == {A: 1})
        assert await pool.request(b"?") == b"?"
        assert (pool.stats.size, pool.stats.moves) == (1, 1)
    await nothing_left(server)


async def test_a_place_that_a_move_has_taken_is_taken_once(
    new_server: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection breaks while the one that is to be moved is opened, and tasks wait."""
    prove_after(monkeypatch, 0.0)
    server = new_server()
    server.down = {A}
    async with new_pool(host=[A, B], min_size=2, max_size=2, max_pause=0.001) as pool:
        await pool.wait()
        server.slow = {A: asyncio.Event(), B: asyncio.Event()}
        server.down = set()
        await until(lambda: pool.stats.addresses[0].connecting)  # the move

        async def use() -> None:
            async with pool.connection():
                assert pool.stats.size <= 2
                await using.wait()

        using = asyncio.Event()
        users = [asyncio.create_task(use()) for _ in range(2)]
        await until(lambda: pool.stats.available == 0)
        users += [asyncio.create_task(use()) for _ in range(2)]
        server.live[0].abort()
        await until(lambda: pool.stats.addresses[1].connecting)
        server.slow[A].set()
        await until(lambda: A in at(server))
        assert pool.stats.size == 2
        server.slow[B].set()
        await settle()
        assert pool.stats.size == 2
        using.set()
        await asyncio.gather(*users)
    await nothing_left(server)


async def test_a_connection_that_waits_for_its_place_is_there_for_a_task(
    new_server: Serve,
) -> None:
    server = new_server()
    server.down = {A}
    async with new_pool(host=[A, B], max_size=2, max_pause=0.05, timeout=LIMIT_S) as pool:
        async with pool.connection():
            server.down = set()
            await until(lambda: at(server) == {A: 1, B: 1})
            async with pool.connection(LIMIT_S / 4) as other:
                assert other.address == A  # type: ignore[attr-defined]
                assert pool.stats.size == 2
        await until(lambda: at(server)[B] == 0)
    await nothing_left(server)


async def test_a_move_gives_up_after_the_time_of_the_pool(new_server: Serve) -> None:
    server = new_server()
    server.down = {A}
    async with new_pool(host=[A, B], max_size=1, max_pause=0.05, timeout=0.1) as pool:
        async with pool.connection(LIMIT_S) as lent:
            server.down = set()
            await until(lambda: at(server)[A] == 1)
            await until(lambda: at(server)[A] == 0)
            assert not lent.is_closing()
        await until(lambda: at(server) == {A: 1})
    await nothing_left(server)


async def test_all_addresses_are_dead(new_server: Serve) -> None:
    server = new_server()
    server.up = False
    async with new_pool(host=[A, B], timeout=0.3, max_pause=0.1) as pool:
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError, match=r"a port 1: .*listens.*b port 2: .*listens") as told:
            await pool.request(b"?", idempotent=True)
        assert asyncio.get_running_loop().time() - begun < LIMIT_S / 4
        assert isinstance(told.value.__cause__, ExceptionGroup)
        assert len(told.value.__cause__.exceptions) == 2
        with pytest.raises(TimeoutError, match=r"opened 0 of 1.*a port 1.*b port 2"):
            await pool.wait()
        with pytest.raises(TimeoutError, match="a port 1"):
            async with pool.connection():
                pass
        server.up = True
        assert await pool.request(b"?", timeout=LIMIT_S) == b"?"
    await nothing_left(server)


async def test_an_address_that_accepts_and_fails_is_left_alone(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(host=[A, B], max_pause=0.4):
        end = asyncio.get_running_loop().time() + 0.6
        # The second attempt is late where this process stands still.
        while asyncio.get_running_loop().time() < end or server.dialed.count(A) < 2:
            for each in server.live:
                if each.address == A:
                    each.abort()
            await asyncio.sleep(0.001)
        assert at(server)[B] <= 1
        assert server.dialed.count(A) <= 7
    await nothing_left(server)


@pytest.mark.parametrize("coroutine", [False, True])
async def test_a_function_names_the_next_address(new_server: Serve, coroutine: bool) -> None:
    server = new_server()
    primary = [A]

    def name() -> tuple[str, int]:
        return primary[0]

    async def find() -> tuple[str, int]:
        await asyncio.sleep(0)
        return primary[0]

    async with new_pool(host=find if coroutine else name, min_size=2, max_pause=0.1) as pool:
        assert f"{'find' if coroutine else 'name'} names" in repr(pool)
        await pool.wait()
        assert at(server) == {A: 2}
        primary[0] = B
        die(server, A)
        assert await pool.request(b"?", timeout=LIMIT_S, idempotent=True) == b"?"
        await pool.wait()
        assert at(server) == {B: 2}
        assert {(each.host, each.size) for each in pool.stats.addresses} == {("a", 0), ("b", 2)}
    await nothing_left(server)


def raises() -> Any:
    raise ZeroDivisionError


def is_canceled() -> Any:
    """As a function does that awaits a task which was canceled."""
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (raises, "the function of addresses"), (lambda: None, "pair of str and int"),
        (lambda: ("a", 0), "port"), (lambda: ("", 1), "host is empty"), (lambda: "a:1", "pair"),
        (lambda: ("a", "1"), "pair"), (lambda: (b"a", 1), "pair"), (is_canceled, "was canceled"),
    ],
)  # fmt: skip
async def test_a_function_that_fails_is_asked_again_with_pauses(
    new_server: Serve, named: Callable[[], Any], text: str
) -> None:
    server = new_server()
    asked = 0

    def name() -> Any:
        nonlocal asked
        asked += 1
        return named()

    async with new_pool(host=name, timeout=0.5, max_pause=0.2) as pool:
        with pytest.raises(TimeoutError, match=text):
            await pool.request(b"?")
        assert asked <= 7
        await until(lambda: asked >= 2)  # at once, unless this process stood still
        await until(lambda: pool.stats.errors >= 2)
        named = lambda: A  # noqa: E731
        assert await pool.request(b"?", timeout=LIMIT_S) == b"?"
    await nothing_left(server)


async def test_a_function_that_hangs_has_a_limit(
    new_server: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server()
    name_within(monkeypatch, 0.01)

    async def hang() -> Any:
        await asyncio.Event().wait()

    async with new_pool(host=hang, timeout=0.2) as pool:
        with pytest.raises(TimeoutError, match="the function that names the address"):
            await pool.request(b"?")
    async with new_pool(host=hang):
        await settle()  # and it is closed while the function runs
    await nothing_left(server)


async def test_a_function_may_name_endless_addresses(
    new_server: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server()
    prove_after(monkeypatch, 0.0)
    numbers = itertools.count(1)
    async with new_pool(host=lambda: ("a", next(numbers)), min_size=0) as pool:
        for _ in range(200):
            async with pool.connection():
                pass
            server.made[-1].abort()
        assert len(server.made) == 200
        assert len(pool.stats.addresses) <= 66
    await nothing_left(server)


async def test_rails_are_used_in_turn_and_fail_alone(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(local_addrs=[RAIL, OTHER], min_size=4, max_size=4, max_pause=0.1) as pool:
        await pool.wait()
        assert sorted(str(each.local) for each in server.live) == [RAIL, RAIL, OTHER, OTHER]
        server.down = {(RAIL, 0)}
        for each in server.live:
            if each.local == RAIL:
                each.abort()
        await until(lambda: sorted(str(e.local) for e in server.live) == [OTHER] * 4)
        one, other = pool.stats.addresses
        assert (one.local, one.works, other.local, other.works) == (RAIL, False, OTHER, True)
        server.down = set()
        await until(lambda: sorted(str(e.local) for e in server.live) == [RAIL, RAIL, OTHER, OTHER])
    await nothing_left(server)


@pytest.mark.parametrize("policy", ["failover", "spread"])
async def test_close_while_connections_are_moved(new_server: Serve, policy: str) -> None:
    server = new_server()
    for turns in range(30):
        server.down = {A}
        async with new_pool(host=[A, B], policy=policy, min_size=3, max_pause=0.001) as pool:
            await pool.wait()
            server.down = set()
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            asking = asyncio.create_task(pool.request(b"?"))
            await asyncio.sleep(0)
        await asyncio.wait([asking])
        if asking.exception() is not None:
            assert isinstance(asking.exception(), ResourceClosedError)
        await nothing_left(server)


@pytest.mark.parametrize("late", [False, True])
async def test_canceled_at_every_await_of_a_failover(new_server: Serve, *, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        server = new_server()
        async with new_pool(host=[A, B], max_size=1, max_pause=0.002) as pool:
            await pool.wait()
            server.breaks = [True]
            server.down = {A}

            async def use() -> bool:
                return await pool.request(b"?", idempotent=True) == b"?"

            await run_canceled(use(), steps)
            await until(lambda: users_of(pool) == 0)
            server.breaks = []
            assert await pool.request(b"next", timeout=LIMIT_S) == b"next"
            assert pool.stats.size == 1
        await nothing_left(server)

    for steps in every_step(late=late):
        await scenario(steps)
    assert steps.at > 1


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"host": []}, ValueError), ({"host": [A, A]}, ValueError), ({"host": ["a"]}, TypeError),
        ({"host": ("a", 1)}, TypeError), ({"host": [A], "port": 7}, TypeError),
        ({"host": raises, "port": 7}, TypeError), ({"host": [("a", 0)]}, ValueError),
        ({"host": [("", 1)]}, ValueError), ({"host": [("a", 1)] * 65}, ValueError),
        ({"host": {"a": 1}}, TypeError), ({"host": None}, TypeError),
        ({"host": "a"}, TypeError), ({"host": [A], "policy": "random"}, ValueError),
        ({"host": [A], "policy": None}, ValueError), ({"local_addrs": "10.0.0.1"}, TypeError),
        ({"local_addrs": []}, ValueError), ({"local_addrs": [RAIL, RAIL]}, ValueError),
        ({"local_addrs": [1]}, TypeError), ({"local_addrs": [""]}, ValueError),
    ],
)  # fmt: skip
def test_bad_addresses(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        new_pool(**options)


async def test_many_connections_are_found_without_a_search(new_server: Serve) -> None:
    """Crowded ones, too: the one with the fewest users gets the next request."""
    server = new_server()
    async with new_pool(min_size=4, max_size=4) as pool:
        await pool.wait()
        server.answering.clear()
        asking = [asyncio.create_task(pool.request(b"%d" % n)) for n in range(200)]
        await settle()
        assert [len(each.requests) for each in server.made] == [50] * 4
        # Of one all are canceled: it is the next.
        first = set(server.made[0].requests)
        for task, body in zip(asking, range(200), strict=True):
            if b"%d" % body in first:
                task.cancel()
        await settle()
        assert pool.stats.available == 1
        more = [asyncio.create_task(pool.request(b"more")) for _ in range(50)]
        await settle()
        assert server.made[0].requests.count(b"more") == 50
        server.answering.set()
        await asyncio.wait([*asking, *more])
    await nothing_left(server)
