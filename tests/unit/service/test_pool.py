"""Pool: sizes, line, replacement, retries and ends, with connections that are not real."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import warnings
from typing import Any

import pytest

from aiordma import (
    ConnectionLostError,
    ConnectionRejectedError,
    Pool,
    RequestDeadlineError,
    RequestError,
    RequestRefusedError,
    ResourceClosedError,
)
from tests.device.stepping import Steps, every_step, run_canceled
from tests.inside.service import prove_after, users_of

from ..conftest import LIMIT_S, settle
from .pooled import Serve, Server, new_pool, nothing_left, until


async def test_it_opens_the_smallest_size_and_grows_to_the_largest(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(min_size=2, max_size=3) as pool:
        assert repr(pool) == "<Pool open to server port 7, 0 connections>"
        await pool.wait()
        assert (pool.stats.size, pool.stats.available) == (2, 2)
        async with pool.connection() as a, pool.connection() as b, pool.connection() as c:
            assert len({a, b, c}) == 3
            assert (pool.stats.size, pool.stats.available) == (3, 0)
            waiting = asyncio.create_task(pool.connection().__aenter__())
            await settle()
            assert pool.stats.waiting == 1
            assert len(server.made) == 3
            waiting.cancel()
            await asyncio.wait([waiting])
        assert pool.stats.available == 3
        assert pool.stats.leases == 3
    assert repr(pool) == "<Pool closed to server port 7, 0 connections>"
    await nothing_left(server)


async def test_tasks_in_line_are_served_in_turn(new_server: Serve) -> None:
    server = new_server()
    order: list[int] = []
    async with new_pool(max_size=1) as pool:

        async def use(number: int) -> None:
            async with pool.connection():
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(use(number) for number in range(10)))
    assert order == list(range(10))
    assert len(server.made) == 1
    await nothing_left(server)


async def test_requests_share_and_lent_connections_are_alone(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(max_size=1) as pool:
        server.answering.clear()
        asking = [asyncio.create_task(pool.request(b"%d" % n)) for n in range(5)]
        await until(lambda: server.made and len(server.made[0].requests) == 5)
        lent = pool.connection()
        lending = asyncio.create_task(lent.__aenter__())
        await settle()
        # A task waits for a connection of its own: new requests stand behind it.
        later = asyncio.create_task(pool.request(b"later"))
        await settle()
        assert (pool.stats.waiting, len(server.made[0].requests)) == (2, 5)
        server.answering.set()
        assert await asyncio.gather(*asking) == [b"%d" % n for n in range(5)]
        connection = await lending
        await settle()
        assert not later.done()
        assert connection is server.made[0]
        await lent.__aexit__(None, None, None)
        assert await later == b"later"
    await nothing_left(server)


async def test_what_is_kept_for_those_behind_is_not_kept_from_the_first(
    new_server: Serve,
) -> None:
    server = new_server()
    async with new_pool(min_size=2, max_size=2) as pool:
        await pool.wait()
        server.answering.clear()
        asking = asyncio.create_task(pool.request(b"long"))
        await settle()
        lent = pool.connection()
        await lent.__aenter__()

        async def lend() -> None:
            async with pool.connection():
                await server.answering.wait()

        # The one with the request is kept for the first of these.
        line = [asyncio.create_task(work) for work in (lend(), pool.request(b"short"), lend())]
        await settle()
        assert pool.stats.waiting == 3
        await lent.__aexit__(None, None, None)
        await settle()
        assert pool.stats.waiting == 1
        assert sorted(len(each.requests) for each in server.made) == [0, 2]
        server.answering.set()
        await asyncio.gather(asking, *line)
    await nothing_left(server)


async def test_many_requests_open_further_connections(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(max_size=3) as pool:
        server.answering.clear()
        asking = []
        for _ in range(150):
            asking.append(asyncio.create_task(pool.request(b"?")))
            await settle(2)
        counts = sorted(len(each.requests) for each in server.made)
        assert len(counts) == 3
        assert counts[0] >= 30
        server.answering.set()
        await asyncio.gather(*asking)
        assert pool.stats.requests == 150
    await nothing_left(server)


async def test_the_wait_has_a_bound_and_names_the_cause(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(max_size=1, timeout=0.5) as pool:
        async with pool.connection():
            with pytest.raises(TimeoutError, match="no connection of the pool was free"):
                async with pool.connection():
                    pass
            with pytest.raises(TimeoutError):
                await pool.request(b"?", timeout=0.01)
        assert pool.stats.timeouts == 2
    server.up = False
    async with new_pool(timeout=0.5) as pool:
        with pytest.raises(TimeoutError, match="no program listens") as caught:
            await pool.request(b"?")
        assert isinstance(caught.value.__cause__, ConnectionRejectedError)
        with pytest.raises(TypeError, match="a request"):  # for which no connection is needed
            await pool.request("text")
        with pytest.raises(TimeoutError, match=r"opened 0 of 1.*no program listens"):
            await pool.wait()
        assert pool.stats.errors
    await nothing_left(server)


@pytest.mark.parametrize("left", [0, -0.5])
async def test_a_deadline_that_has_passed(new_server: Serve, left: float) -> None:
    server = new_server()
    async with new_pool(min_size=0, max_size=1) as pool:
        await pool.wait(left)  # for no connection
        with pytest.raises(TimeoutError, match="within 0 s"):
            async with pool.connection(left):
                pass
        assert await pool.request(b"?") == b"?"
        async with pool.connection(left):  # is free, and lent at once
            pass
        await pool.close(left)
    await nothing_left(server)


async def test_pauses_between_attempts_grow_to_a_bound(new_server: Serve) -> None:
    server = new_server()
    server.up = False
    async with new_pool(max_pause=0.25) as pool:
        await until(lambda: len(server.attempts) == 5)
        server.up = True
        await pool.wait()
    pauses = [b - a for a, b in itertools.pairwise(server.attempts)]
    # A timer may be early by its resolution; a busy machine is late.
    assert len(pauses) >= 4
    bounds = [0.05, 0.1, 0.125, 0.125, 0.125][: len(pauses)]
    assert [low for pause, low in zip(pauses, bounds, strict=True) if pause < low - 0.002] == []
    assert pauses[0] < 1
    await nothing_left(server)


@pytest.mark.parametrize("how", ["unused", "requests", "check"])
async def test_a_server_that_accepts_and_fails_is_not_connected_to_without_a_pause(
    new_server: Serve, how: str
) -> None:
    async def fails(_: Any) -> None:
        raise ZeroDivisionError

    server = new_server()
    server.breaks = [True] * 10_000
    pool = new_pool(max_pause=0.4, timeout=0.5, check=fails if how == "check" else None)
    async with pool:
        end = asyncio.get_running_loop().time() + 0.5
        # The second attempt is late where this process stands still.
        while asyncio.get_running_loop().time() < end or len(server.attempts) < 2:
            if how == "requests":
                with contextlib.suppress(ConnectionLostError, TimeoutError):
                    await pool.request(b"?", timeout=0.5, idempotent=True)
            elif how == "check":
                # It may also have no connection to check.
                with pytest.raises(
                    TimeoutError, match=r"passed its check within 0\.5 s|had no connection within"
                ):
                    async with pool.connection():
                        pass
            else:
                for each in server.live:
                    each.abort()
                await asyncio.sleep(0.001)
        # The pauses are 0.05, 0.1, 0.2, 0.2 s at least.
        assert len(server.attempts) <= 6
    await nothing_left(server)


async def test_the_error_where_no_connection_passes_the_check(new_server: Serve) -> None:
    """It has the whole time of the call, whatever its last wait found."""
    server = new_server()

    async def fails(_: Any) -> None:
        raise ZeroDivisionError

    async with new_pool(check=fails) as pool:
        await pool.wait()
        with pytest.raises(TimeoutError, match=r"passed its check within 0\.2 s"):
            async with pool.connection(timeout=0.2):
                pass
    await nothing_left(server)


async def test_exceptions_of_the_program_cause_no_pause(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(max_pause=100.0) as pool:
        for _ in range(20):  # the pauses would have come to 100 s
            with pytest.raises(ZeroDivisionError):
                async with pool.connection():
                    raise ZeroDivisionError
        assert len(server.made) >= 20
    await nothing_left(server)


async def test_a_connection_that_has_worked_is_replaced_at_once(
    new_server: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server()
    prove_after(monkeypatch, 0.01)
    async with new_pool(max_pause=100.0) as pool:
        for _ in range(20):  # the pauses would have come to 100 s
            await pool.wait()
            await asyncio.sleep(0.02)
            server.made[-1].abort()
    await nothing_left(server)


@pytest.mark.parametrize(
    ("sent", "idempotent", "again"),
    [(False, False, True), (True, False, False), (True, True, True), (False, True, True)],
)
async def test_a_request_is_sent_again_only_if_it_may_be(
    new_server: Serve, *, sent: bool, idempotent: bool, again: bool
) -> None:
    server = new_server()
    server.breaks = [sent]
    async with new_pool() as pool:
        if again:
            assert await pool.request(b"?", idempotent=idempotent) == b"?"
        else:
            with pytest.raises(ConnectionLostError):
                await pool.request(b"?", idempotent=idempotent)
        assert pool.stats.retries == again
        assert sum(len(each.requests) for each in server.made) == 1 + again
    await nothing_left(server)


@pytest.mark.parametrize(
    ("sent", "idempotent", "again"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
async def test_a_request_beside_another_is_sent_again_only_if_it_may_be(
    new_server: Serve, *, sent: bool, idempotent: bool, again: bool
) -> None:
    """It has its connection without a call."""
    server = new_server()
    async with new_pool() as pool:
        await pool.wait()
        server.answering.clear()
        other = asyncio.create_task(pool.request(b"other"))
        await settle()
        server.breaks = [sent]
        asking = asyncio.create_task(pool.request(b"?", idempotent=idempotent, timeout=LIMIT_S))
        await settle()
        server.answering.set()
        if again:
            assert await asking == b"?"
        else:
            with pytest.raises(ConnectionLostError):
                await asking
        assert await other == b"other"
        stats = pool.stats
        assert (stats.requests, stats.retries, stats.lost) == (2, again, 1)
        assert sum(each.requests.count(b"?") for each in server.made) == 1 + again
    await nothing_left(server)


async def test_a_broken_connection_is_left_by_its_users_before_it_is_aborted(
    new_server: Serve,
) -> None:
    server = new_server()
    server.ends_late = True
    async with new_pool(max_size=2) as pool:
        await pool.wait()
        server.answering.clear()
        first = asyncio.create_task(pool.request(b"1"))
        await settle()
        server.breaks = [False]
        second = asyncio.create_task(pool.request(b"2"))
        await until(lambda: len(server.made) == 2)
        await settle()
        assert [each.requests for each in server.made] == [[b"1", b"2"], [b"2"]]
        assert not server.made[0].is_closing()
        server.answering.set()
        assert await first == b"1"
        assert await second == b"2"
        assert server.made[0].is_closing()
        await settle()
        assert pool.stats.lost == 1
    await nothing_left(server)


async def test_a_request_that_always_breaks_its_connection_is_given_up(new_server: Serve) -> None:
    server = new_server()
    server.breaks = [True] * 10
    async with new_pool() as pool:
        with pytest.raises(ConnectionLostError):
            await pool.request(b"?", idempotent=True)
        assert len(server.breaks) == 7
    await nothing_left(server)


async def ask_and_raise(pool: Pool) -> None:
    async with pool.connection() as connection:
        await connection.request(b"?")
        raise ZeroDivisionError


async def test_a_server_that_is_stopping_is_left_in_good_order(new_server: Serve) -> None:
    """What it refuses is sent again, and what it has begun with is answered."""
    server = new_server()
    async with new_pool(max_size=1) as pool:
        server.answering.clear()
        asking = [asyncio.create_task(pool.request(b"early")) for _ in range(3)]
        await until(lambda: server.made and len(server.made[0].requests) == 3)
        server.stopping.add(("server", 7))
        asking.append(asyncio.create_task(pool.request(b"late")))
        await settle()
        old = server.made[0]
        assert old.requests[3:] == [b"late"]
        asking.append(asyncio.create_task(pool.request(b"later")))
        await settle()
        assert old.requests[3:] == [b"late"]
        server.stopping.clear()
        await until(lambda: len(server.made) == 2 and len(server.made[1].requests) == 2)
        assert not old.is_closing()
        server.answering.set()
        assert await asyncio.gather(*asking) == [b"early"] * 3 + [b"late", b"later"]
        await until(old.is_closing)
        assert old.closed
        stats = pool.stats
        assert (stats.size, stats.retries, stats.lost, stats.reconnects) == (1, 1, 1, 1)
    await nothing_left(server)


async def test_close_waits_for_answers_of_a_server_that_is_stopping(new_server: Serve) -> None:
    server = new_server()
    pool = new_pool(max_size=1)
    await pool.open()
    server.answering.clear()
    early = asyncio.create_task(pool.request(b"early"))
    await until(lambda: server.made and server.made[0].requests)
    server.stopping.add(("server", 7))
    late = asyncio.create_task(pool.request(b"late"))
    await settle()
    closing = asyncio.create_task(pool.close())
    with pytest.raises(ResourceClosedError, match="the pool is closed"):
        await late
    await settle()
    assert not server.made[0].is_closing()
    server.answering.set()
    assert await early == b"early"
    await closing
    await nothing_left(server)


@pytest.mark.parametrize("how", ["request", "beside another", "lent"])
async def test_a_connection_of_a_server_that_is_stopping_gets_no_user(
    new_server: Serve, how: str
) -> None:
    server = new_server()
    async with new_pool() as pool:
        await pool.wait()
        old = server.made[0]
        others = []
        if how == "beside another":
            server.answering.clear()
            others = [asyncio.create_task(pool.request(b"other"))]
            await settle()
        old.outcome.stopping = True
        server.answering.set()
        if how == "lent":
            async with pool.connection() as lent:
                assert lent is server.made[1]
        else:
            assert await pool.request(b"?") == b"?"
            assert server.made[1].requests == [b"?"]
        assert await asyncio.gather(*others) == [b"other"] * len(others)
        assert b"?" not in old.requests
    await nothing_left(server)


@pytest.mark.parametrize("down", [False, True])
async def test_a_request_may_outlast_the_time_out_of_its_pool(
    new_server: Serve, down: bool
) -> None:
    """While no server is there, and while the one that is there refuses."""
    server = new_server()
    server.up = not down
    server.stopping = set() if down else {("server", 7)}
    async with new_pool(timeout=0.02, max_pause=0.02) as pool:
        asking = asyncio.create_task(pool.request(b"?", timeout=LIMIT_S))
        begun = asyncio.get_running_loop().time()
        await until(lambda: asking.done() or server.attempts[-1:] > [begun + 0.1])
        server.up = True
        server.stopping.clear()
        assert await asking == b"?"
    await nothing_left(server)


async def test_refusals_of_servers_that_are_stopping_have_an_end(new_server: Serve) -> None:
    server = new_server()
    server.stopping.add(("server", 7))
    async with new_pool(timeout=0.5, max_pause=0.1) as pool:
        begun = asyncio.get_running_loop().time()
        with pytest.raises((RequestRefusedError, TimeoutError), match=r"stopping"):
            await pool.request(b"?")
        assert asyncio.get_running_loop().time() - begun < LIMIT_S
        with pytest.raises((RequestRefusedError, TimeoutError)):
            await pool.request(b"?", timeout=0.2)
        assert len(server.made) < 30
    await nothing_left(server)


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_handler_that_a_stopping_server_has_canceled(
    new_server: Serve, *, idempotent: bool
) -> None:
    """It may have done its work."""
    server = new_server()
    text = "the server stopped while it served the request"
    server.raises = [RequestError(text, remote_type="CancelledError", remote_text=text)]
    async with new_pool() as pool:
        if idempotent:
            assert await pool.request(b"?", idempotent=True) == b"?"
        else:
            with pytest.raises(RequestError, match=text):
                await pool.request(b"?")
        assert pool.stats.retries == idempotent
    await nothing_left(server)


@pytest.mark.parametrize(
    "error",
    [
        RequestRefusedError("no room", try_again=True),
        RequestError("by 0", remote_type="ZeroDivisionError"),
        RequestError("", remote_type="CancelledError"),  # of a task that the handler has awaited
        RequestDeadlineError("late"),
    ],
)
async def test_other_errors_are_the_callers(new_server: Serve, error: RequestError) -> None:
    server = new_server()
    server.raises = [error]
    async with new_pool() as pool:
        with pytest.raises(type(error)) as caught:
            await pool.request(b"?", idempotent=True)
        assert caught.value is error
        assert pool.stats.retries == 0
    server.raises.clear()
    await nothing_left(server)


async def test_after_an_exception_a_lent_connection_is_dropped(new_server: Serve) -> None:
    server = new_server()
    async with new_pool() as pool:
        with pytest.raises(ZeroDivisionError):
            async with pool.connection():
                raise ZeroDivisionError
        assert server.made[0].is_closing()
        async with pool.connection() as connection:
            assert connection is not server.made[0]
        # Requests do not depend on one another.
        with pytest.raises(ZeroDivisionError):
            await ask_and_raise(pool)
        assert not server.made[1].is_closing()
    await nothing_left(server)


async def test_a_connection_that_takes_long_to_end_is_counted_once(new_server: Serve) -> None:
    """Another is there in its place before its end is complete."""
    server = new_server()
    async with new_pool(max_size=1) as pool:
        await pool.wait()
        for number in range(1, 4):
            server.ended.clear()
            server.made[-1].abort()
            assert await pool.request(b"?", timeout=LIMIT_S) == b"?"
            server.ended.set()
            await settle()
            stats = pool.stats
            assert (stats.lost, stats.reconnects) == (number, number)
    await nothing_left(server)


async def test_a_check_drops_connections_before_they_are_lent(new_server: Serve) -> None:
    server = new_server()

    async def check(connection: Any) -> None:
        if connection in server.made[:2]:
            raise TimeoutError

    async with new_pool(check=check) as pool:
        async with pool.connection() as connection:
            assert connection is server.made[2]
        await settle()
        assert (pool.stats.lost, pool.stats.size, pool.stats.reconnects) == (2, 1, 2)

    async def never(connection: Any) -> None:
        await asyncio.Event().wait()

    async with new_pool(check=never, timeout=0.02) as pool:
        await pool.wait(5)
        with pytest.raises(TimeoutError):
            async with pool.connection():
                pass
    await nothing_left(server)


async def test_idle_and_old_connections_are_closed(new_server: Serve) -> None:
    server = new_server()
    async with new_pool(max_size=3, max_idle=0.02) as pool:
        async with pool.connection(), pool.connection(), pool.connection():
            pass
        await until(lambda: pool.stats.size == 1)
        await settle()
        assert (len(server.live), pool.stats.lost) == (1, 0)
    async with new_pool(max_lifetime=0.02) as pool:
        async with pool.connection() as old:
            await asyncio.sleep(0.03)
            assert not old.is_closing()
        await until(lambda: old.is_closing())
        async with pool.connection() as young:
            assert young is not old
        await until(lambda: young.is_closing())
        assert pool.stats.lost == 0
        await pool.wait()
    await nothing_left(server)


async def test_close_waits_for_users_and_then_does_not(new_server: Serve) -> None:
    server = new_server()
    pool = new_pool(max_size=1)
    await pool.open()
    async with pool.connection() as connection:
        in_line = asyncio.create_task(pool.request(b"?"))
        closing = asyncio.create_task(pool.close())
        await settle()
        assert not closing.done()
        with pytest.raises(ResourceClosedError, match="the pool is closed"):
            await in_line
        with pytest.raises(ResourceClosedError):
            pool.connection()
        assert not connection.is_closing()
    await closing
    await pool.close()
    pool = new_pool()
    await pool.open()
    async with pool.connection() as connection:
        await pool.close(timeout=0.01)
        assert connection.is_closing()
    await nothing_left(server)


async def hang_and_raise(server: Server) -> None:
    async with new_pool() as pool:
        await pool.wait()
        server.answering.clear()
        asking = asyncio.create_task(pool.request(b"?"))
        await settle()
        assert users_of(pool) == 1
        asking.add_done_callback(asyncio.Future.exception)
        raise ZeroDivisionError


async def test_an_exception_in_the_block_waits_for_no_user(new_server: Serve) -> None:
    server = new_server()
    begun = asyncio.get_running_loop().time()
    with pytest.raises(ZeroDivisionError):
        await hang_and_raise(server)
    assert asyncio.get_running_loop().time() - begun < 5
    assert not server.live
    server.answering.set()
    await settle()
    await nothing_left(server)


async def test_a_close_that_is_canceled_aborts(new_server: Serve) -> None:
    server = new_server()
    pool = new_pool()
    await pool.open()
    async with pool.connection() as connection:
        closing = asyncio.create_task(pool.close())
        await settle()
        closing.cancel()
        await asyncio.wait([closing])
        assert connection.is_closing()
    await nothing_left(server)


async def test_a_close_while_it_connects_in_vain(new_server: Serve) -> None:
    server = new_server()
    server.up = False
    async with new_pool(min_size=3, max_pause=60):
        await until(lambda: len(server.attempts) >= 3)
    await nothing_left(server)


async def test_a_forgotten_pool_warns_and_ends(new_server: Serve) -> None:
    server = new_server()
    pool = new_pool()
    await pool.open()
    await pool.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del pool
        gc.collect()
    text = "unclosed <Pool open to server port 7, 1 connections>"
    assert [(each.category, str(each.message)) for each in caught] == [(ResourceWarning, text)]
    await nothing_left(server)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new_pool()  # not opened: there is nothing to close
        gc.collect()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("busy", [False, True])
async def test_canceled_at_every_await(
    new_server: Serve, *, late: bool, lends: bool, busy: bool
) -> None:
    async def scenario(steps: Steps) -> None:
        server = new_server()
        async with new_pool(max_size=1) as pool:
            held = pool.connection()
            if busy:
                await held.__aenter__()
                asyncio.get_running_loop().call_later(
                    0.002, lambda: asyncio.create_task(held.__aexit__(None, None, None))
                )

            async def use() -> bool:
                if lends:
                    async with pool.connection():
                        await asyncio.sleep(0)
                else:
                    await pool.request(b"?")
                return True

            server.answering.clear()
            asyncio.get_running_loop().call_later(0.003, server.answering.set)
            await run_canceled(use(), steps)
            server.answering.set()
            await until(lambda: users_of(pool) == 0)
            assert await pool.request(b"next") == b"next"
            assert pool.stats.size == 1
        await nothing_left(server)

    for steps in every_step(late=late):
        await scenario(steps)
    assert steps.at > 1


async def test_not_open_or_elsewhere(new_server: Serve) -> None:
    server = new_server()
    pool = new_pool()
    assert pool.stats.size == 0
    assert repr(pool) == "<Pool not open to server port 7, 0 connections>"
    for call in (pool.wait, lambda: pool.request(b"")):
        with pytest.raises(RuntimeError, match="not open"):
            await call()
    with pytest.raises(RuntimeError, match="not open"):
        pool.connection()
    await pool.close()
    await pool.open()

    def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(pool.wait())

    await asyncio.to_thread(elsewhere)
    await pool.close()
    with pytest.raises(ResourceClosedError):
        await pool.open()
    await nothing_left(server)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"host": ""}, ValueError), ({"host": 1}, TypeError), ({"port": 0}, ValueError),
        ({"port": "1"}, TypeError), ({"min_size": -1}, ValueError), ({"max_size": 0}, ValueError),
        ({"min_size": 9}, ValueError), ({"max_size": True}, TypeError),
        ({"timeout": None}, TypeError), ({"timeout": 0}, ValueError), ({"check": 1}, TypeError),
        ({"max_idle": 0}, ValueError), ({"max_lifetime": "1"}, TypeError),
        ({"max_pause": -1}, ValueError), ({"config": 1}, TypeError),
    ],
)  # fmt: skip
def test_bad_arguments(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        new_pool(**options)


async def test_bad_arguments_of_calls(new_server: Serve) -> None:
    server = new_server()
    async with new_pool() as pool:
        for call in (pool.wait, pool.close, lambda seconds: pool.request(b"", timeout=seconds)):
            with pytest.raises(ValueError, match="timeout"):
                await call(math.nan)
        with pytest.raises(ValueError, match="timeout"):
            pool.connection(math.nan)
        assert pool.stats.requests == 0
    await nothing_left(server)
