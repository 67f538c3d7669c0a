"""Requests over a pipe in memory: answers, errors, limits, cancellation, and rude peers."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiordma import (
    ConnectionLostError,
    MessageTooLargeError,
    ProtocolError,
    Request,
    RequestDeadlineError,
    RequestError,
    RequestUnknownError,
    ResourceClosedError,
)
from aiordma.requests import calls
from aiordma.requests.served import Requests
from aiordma.requests.wire import (
    ANSWER_BODY,
    BODY_FOLLOWS,
    GIVEN_UP,
    HEADER_SIZE,
    INITIAL_BYTES,
    INITIAL_REQUESTS,
    ErrorCode,
    Kind,
    error_frame,
    frame,
)
from tests.device.stepping import Steps, every_step, run_canceled
from tests.inside.requests import held_by, held_of, number_of, set_number

from ..conftest import Run, settle
from .pipe import LARGEST, ROOM, End, joined, lone, part

NOTHING = (0, 0, 0)
LARGE = bytes(range(256)) * 8
SIZES = [0, 1, ROOM - HEADER_SIZE, ROOM - HEADER_SIZE + 1, ROOM, len(LARGE)]


def hold_up(seconds: float) -> None:
    """As a program that computes in its loop."""
    time.sleep(seconds)


async def echo(requests: Requests) -> None:
    async for request in requests:
        await request.reply(request.body)


async def serve(end: End, handler: Callable[[Request], Awaitable[object]]) -> None:
    async for request in end.requests():
        await handler(request)


@pytest.mark.parametrize("size", SIZES)
def test_a_request_and_its_answer(run: Run, size: int) -> None:
    async def main() -> None:
        client, server = await joined()
        server_task = asyncio.create_task(echo(server.requests()))
        data = LARGE[:size]
        assert await client.request(data) == data
        assert await client.request(bytearray(data)) == data
        assert await client.request(memoryview(data)) == data
        assert held_by(client.exchange.calls) == NOTHING
        assert held_of(server.exchange.served) == (0, *NOTHING)
        server.end(ResourceClosedError("closed"))
        await server_task
        await part(client, server)

    run(main())


def test_answers_in_any_order_in_both_directions(run: Run) -> None:
    async def main() -> None:
        ends = await joined()
        rng = random.Random(5)

        async def answer_in_groups(end: End) -> None:
            waiting: list[Request] = []
            async for request in end.requests():
                waiting.append(request)
                if len(waiting) == 8:
                    rng.shuffle(waiting)
                    for each in waiting:
                        await each.reply(bytes(each.body)[::-1])
                    waiting.clear()

        servers = [asyncio.create_task(answer_in_groups(end)) for end in ends]
        questions = [rng.randbytes(rng.choice(SIZES)) for _ in range(64)]
        for end in ends:
            end.give(None)
        answers = await asyncio.gather(*(end.request(q) for q in questions for end in ends))
        assert answers == [q[::-1] for q in questions for _ in ends]
        await part(*ends)
        await asyncio.gather(*servers)

    run(main())


def test_errors_of_the_handler(run: Run) -> None:
    async def main() -> None:
        client, server = await joined()

        async def handler(request: Request) -> None:
            if request.body == b"forget":
                return
            if request.body == b"unknown":
                request.fail(RequestUnknownError("no such thing"))
            else:
                request.fail(ZeroDivisionError("by 0"))

        task = asyncio.create_task(serve(server, handler))
        with pytest.raises(RequestError, match="ZeroDivisionError: by 0") as caught:
            await client.request(b"")
        assert caught.value.remote_type == "ZeroDivisionError"
        with pytest.raises(RequestUnknownError, match="no such thing"):
            await client.request(b"unknown")
        forgotten = asyncio.create_task(client.request(b"forget"))
        await settle()
        # The loop of `serve` has the last request until the next one comes.
        with pytest.raises(RequestError, match="by 0"):
            await client.request(b"")
        gc.collect()
        with pytest.raises(RequestError, match="did not answer"):
            await forgotten
        await part(client, server)
        await task

    run(main())


def test_a_request_is_answered_once(run: Run) -> None:
    async def main() -> None:
        client, server = await joined()
        asking = asyncio.create_task(client.request(b"?"))
        request = await anext(server.requests())
        with pytest.raises(TypeError):
            await request.reply("text")
        with pytest.raises(MessageTooLargeError):
            await request.reply(bytes(LARGEST + 1))
        with pytest.raises(TypeError, match="exc has to be"):
            request.fail("text")  # type: ignore[arg-type]
        assert not request.answered
        await request.reply(b"!")
        with pytest.raises(RuntimeError, match="answered before"):
            await request.reply(b"!")
        with pytest.raises(RuntimeError, match="answered before"):
            request.fail(ValueError())
        assert await asking == b"!"
        assert request.answered
        assert not request.canceled
        await part(client, server)

    run(main())


def test_bad_arguments_take_nothing(run: Run) -> None:
    async def main() -> None:
        client = await lone()
        for data, timeout, kind in (
            ("text", None, TypeError), (b"", math.nan, ValueError),
            (b"", "1", TypeError), (bytes(LARGEST + 1), None, MessageTooLargeError),
        ):  # fmt: skip
            with pytest.raises(kind):
                await client.request(data, timeout)  # type: ignore[arg-type]
        assert held_by(client.exchange.calls) == NOTHING
        assert not client.sent
        await part(client)

    run(main())


# Deadlines and cancellation


def test_the_deadline_travels(run: Run) -> None:
    async def main() -> None:
        client, server = await joined()
        asking = asyncio.create_task(client.request(b"?", 60))
        endless = asyncio.create_task(client.request(b"?"))
        requests = server.requests()
        request = await anext(requests)
        assert request.deadline is not None
        assert request.remaining is not None
        assert 50 < request.remaining <= 60
        other = await anext(requests)
        assert (other.deadline, other.remaining) == (None, None)
        for each in (request, other):
            await each.reply()
        await asyncio.gather(asking, endless)
        await part(client, server)

    run(main())


def test_an_expired_request_is_not_served(run: Run) -> None:
    async def main() -> None:
        server = await lone()
        server.arrive(frame(Kind.REQUEST, 1, 1) + b"late")
        server.arrive(frame(Kind.REQUEST, 2) + b"good")
        await settle()
        await asyncio.sleep(0.001)  # more than a microsecond has to pass
        request = await anext(server.requests())
        assert request.body == b"good"
        sent = [data for data, _ in server.sent]
        errors = [data for data in sent if data[2] == Kind.ERROR]
        assert [(data[7], data[15]) for data in errors] == [(1, ErrorCode.DEADLINE)]
        await request.reply()
        assert held_of(server.exchange.served) == (0, *NOTHING)
        await part(server)

    run(main())


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("size", [1, len(LARGE)])
def test_an_answer_that_is_here_is_returned(run: Run, size: int, *, into: bool) -> None:
    """The loop was busy past the deadline: the answer and the timer come in the same turn."""

    async def main() -> None:
        client = await lone()
        memory = bytearray(4) if into else None
        asking = asyncio.ensure_future(client.exchange.calls.request(LARGE[:size], 0.05, memory))
        await settle()
        number = client.sent[0][0][7]
        hold_up(0.06)
        client.arrive(frame(Kind.ANSWER, number) + b"late")
        answer = await asking
        assert answer == (4 if into else b"late")
        assert memory is None or memory == b"late"
        assert held_by(client.exchange.calls) == NOTHING
        assert len(client.sent) == 1 + (size > ROOM), "a CANCEL"
        await part(client)

    run(main())


def test_many_deadlines_share_a_timer(run: Run) -> None:
    """Each call ends at its own, in whatever order they were made."""

    async def main() -> None:
        client = await lone()
        client.exchange.calls.on_grant(100, 1000)
        ended: list[float] = []

        async def ask(timeout: float | None) -> None:
            with pytest.raises(RequestDeadlineError, match=f"within {timeout} s"):
                await client.request(b"?", timeout)
            assert timeout is not None
            ended.append(timeout)

        limits = [0.3, 0.1, 60.0, 0.2, 0.1, 0.4, None]
        tasks = [asyncio.create_task(ask(limit)) for limit in limits]
        began = client.loop.time()
        await asyncio.wait(tasks[:2] + tasks[3:6])
        assert ended == [0.1, 0.1, 0.2, 0.3, 0.4]
        assert 0.4 <= client.loop.time() - began < 10
        for task in (tasks[2], tasks[6]):
            assert not task.done()
            task.cancel()
        await asyncio.wait(tasks)
        await part(client)

    run(main())


def test_a_deadline_in_the_line_of_the_grant(run: Run) -> None:
    async def main() -> None:
        client, server = await joined()
        requests = server.requests(limit=1)
        await settle()
        first = asyncio.create_task(client.request(b"1"))
        request = await anext(requests)
        with pytest.raises(RequestDeadlineError, match="within"):
            await client.request(b"2", 0.05)
        await request.reply()
        assert await first == b""
        assert held_by(client.exchange.calls) == NOTHING
        await part(client, server)

    run(main())


@pytest.mark.parametrize("size", [1, len(LARGE)])
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_cancellation_is_told(run: Run, how: str, size: int) -> None:
    async def main() -> None:
        client, server = await joined()
        timeout = 0.5 if how == "timeout" else None
        asking = asyncio.create_task(client.request(LARGE[:size], timeout))
        request = await anext(server.requests())
        waiting = asyncio.create_task(request.wait_canceled())
        await settle()
        assert not request.canceled
        if how == "cancel":
            asking.cancel()
        with pytest.raises((asyncio.CancelledError, RequestDeadlineError)) as caught:
            await asking
        assert isinstance(caught.value, TimeoutError) == (how == "timeout")
        await waiting
        assert request.canceled
        await settle()
        # The number is free, and the request counts until the program is done with it.
        assert held_by(client.exchange.calls) == NOTHING
        assert held_of(server.exchange.served) == (0, 0, 1, size)
        before = len(server.sent)
        await request.reply(b"too late")
        assert len(server.sent) == before
        assert held_of(server.exchange.served) == (0, *NOTHING)
        await part(client, server)

    run(main())


def test_a_canceled_request_leaves_the_line_of_the_server(run: Run) -> None:
    async def main() -> None:
        client, server = await joined()
        asking = [asyncio.create_task(client.request(b"?")) for _ in range(5)]
        await settle()
        assert held_of(server.exchange.served) == (5, 5, 5, 5)
        for task in asking:
            task.cancel()
        await settle()
        assert held_of(server.exchange.served) == (0, *NOTHING)
        assert held_by(client.exchange.calls) == NOTHING
        await part(client, server)

    run(main())


async def drip(end: End) -> None:
    """Room for three messages, later, a message at a time."""
    for _ in range(3):
        await settle()
        end.give(1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, len(LARGE)])
@pytest.mark.parametrize("credits", [0, None])
def test_a_request_canceled_at_every_await(
    run: Run, *, late: bool, size: int, credits: int | None
) -> None:
    """Without credits it waits for room, too; afterwards numbers and limits are as before."""

    async def scenario(steps: Steps) -> None:
        client, server = await joined()
        task = asyncio.create_task(echo(server.requests()))
        await settle()
        client.credits = credits
        dripping = asyncio.create_task(drip(client))
        answer = await run_canceled(client.request(LARGE[:size]), steps)
        await dripping
        assert answer in (None, LARGE[:size])
        client.give(None)
        await settle(20)
        assert held_by(client.exchange.calls) == NOTHING
        assert held_of(server.exchange.served) == (0, *NOTHING)
        assert await client.request(b"next") == b"next"
        client.end(ResourceClosedError("closed"))
        server.end(ResourceClosedError("closed"))
        await task
        await part(client, server)

    async def main() -> None:
        for steps in every_step(late=late):
            await scenario(steps)
            assert steps.at < 20
        assert steps.at > 1

    run(main())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, len(LARGE)])
def test_a_reply_canceled_at_every_await(run: Run, *, late: bool, size: int) -> None:
    """The caller gets the whole answer or an error, and the limits are as before."""

    async def scenario(steps: Steps) -> None:
        client, server = await joined()
        asking = asyncio.create_task(client.request(b"?"))
        request = await anext(server.requests())
        server.credits = 0
        dripping = asyncio.create_task(drip(server))
        await run_canceled(request.reply(LARGE[:size]), steps)
        await dripping
        server.give(None)
        await settle(20)
        assert asking.done(), "the caller waits for ever"
        (result,) = await asyncio.gather(asking, return_exceptions=True)
        if isinstance(result, RequestError):
            assert "gave up its answer" in str(result)
            assert steps.canceled
        else:
            assert result == LARGE[:size]
        await settle()
        assert client.cause is None
        assert held_by(client.exchange.calls) == NOTHING
        assert held_of(server.exchange.served) == (0, *NOTHING)
        await part(client, server)

    async def main() -> None:
        for steps in every_step(late=late):
            await scenario(steps)
        assert steps.at > 1

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_wait_for_requests_canceled_at_every_await(run: Run, *, late: bool) -> None:
    """No request is lost: another task gets it."""

    async def scenario(steps: Steps) -> None:
        client, server = await joined()
        requests = server.requests()
        client.credits = 0
        dripping = asyncio.create_task(drip(client))
        asking = asyncio.create_task(client.request(b"?"))
        request = await run_canceled(anext(requests), steps)
        await dripping
        if request is None:
            request = await anext(requests)
        await request.reply(b"!")
        assert await asking == b"!"
        await part(client, server)

    async def main() -> None:
        for steps in every_step(late=late):
            await scenario(steps)
        assert steps.at > 1

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_the_line_for_the_grant_canceled_at_every_await(run: Run, *, late: bool) -> None:
    async def scenario(steps: Steps) -> None:
        client, server = await joined()
        requests = server.requests(limit=1)
        await settle()
        first = asyncio.create_task(client.request(b"1"))
        request = await anext(requests)

        async def answer() -> None:
            await settle()
            await request.reply()
            async for other in requests:
                await other.reply(other.body)

        answering = asyncio.create_task(answer())
        third = asyncio.create_task(client.request(b"3"))
        second = await run_canceled(client.request(b"2"), steps)
        assert second in (None, b"2")
        assert await first == b""
        assert await third == b"3"
        await settle()
        assert held_by(client.exchange.calls) == NOTHING
        await part(client, server)
        await answering

    async def main() -> None:
        for steps in every_step(late=late):
            await scenario(steps)
        assert steps.at > 1

    run(main())


# Limits


def test_no_more_than_the_grant_are_under_way(run: Run) -> None:
    async def main() -> None:
        client, server = await joined()
        asking = [asyncio.create_task(client.request(b"x" * 10)) for _ in range(40)]
        await settle()
        assert held_of(server.exchange.served)[0] == INITIAL_REQUESTS
        requests = server.requests(limit=30)
        await settle()
        assert held_of(server.exchange.served)[0] == 30
        server.requests(limit=30, limit_bytes=310)
        most = 0
        for _ in asking:
            request = await anext(requests)
            most = max(most, held_of(server.exchange.served)[0])
            await request.reply()
            await settle()
        assert most == 30
        await asyncio.gather(*asking)
        # By bytes; a single request may have more.
        requests = server.requests(limit=30, limit_bytes=25)
        await settle()
        asking = [asyncio.create_task(client.request(bytes(size))) for size in (100, 10, 10, 10)]
        for numbers in (1, 2, 2, 1):
            await settle()
            assert held_of(server.exchange.served)[0] == numbers
            await (await anext(requests)).reply()
        await asyncio.gather(*asking)
        await part(client, server)

    run(main())


def test_requests_beyond_a_lowered_grant_wait(run: Run) -> None:
    """They were sent before the smaller grant was there."""

    async def main() -> None:
        client, server = await joined()
        client.peer = None  # its requests are on their way
        asking = [asyncio.create_task(client.request(b"x" * 10)) for _ in range(8)]
        await settle()
        requests = server.requests(limit=2)
        for data, imm in client.sent:
            server.arrive(data, imm)
        client.peer = server
        await settle()
        taken = [await anext(requests) for _ in range(2)]
        third = asyncio.create_task(anext(requests))
        for _ in range(6):
            await settle()
            assert not third.done(), "the program has more than the limit"
            await taken.pop(0).reply()
            taken.append(await third)
            third = asyncio.create_task(anext(requests))
        for request in taken:
            await request.reply()
        assert await asyncio.gather(*asking) == [b""] * 8
        await settle()
        assert held_of(server.exchange.served) == (0, *NOTHING)
        await part(client, server)
        with pytest.raises(StopAsyncIteration):
            await third

    run(main())


@pytest.mark.parametrize("limit", [{"limit": 1}, {"limit_bytes": 1}])
def test_a_client_that_has_its_answer_may_ask_anew(run: Run, limit: dict[str, int]) -> None:
    """A large answer is there before the server's own send has returned."""

    async def main() -> None:
        client, server = await joined()

        async def answer(request: Request) -> None:
            await request.reply(LARGE)

        requests = server.requests(**limit)
        tasks: set[asyncio.Task[None]] = set()

        async def serve_all() -> None:
            async for request in requests:
                tasks.add(asyncio.create_task(answer(request)))

        serving = asyncio.create_task(serve_all())
        await settle()
        for _ in range(20):
            assert await client.request(b"??") == LARGE
        await asyncio.gather(*(client.request(b"??") for _ in range(20)))
        await asyncio.wait(tasks)
        assert held_of(server.exchange.served) == (0, *NOTHING)
        await part(client, server)
        await serving

    run(main())


def test_a_canceled_request_that_the_program_keeps_counts(run: Run) -> None:
    """Else a peer that sends and cancels would have the program hold any number."""

    async def main() -> None:
        client, server = await joined()
        requests = server.requests(limit=3)
        await settle()
        kept = []
        for _ in range(3):
            asking = asyncio.create_task(client.request(b"?"))
            kept.append(await anext(requests))
            asking.cancel()
            await settle()
        asking = asyncio.create_task(client.request(b"?"))
        taking = asyncio.create_task(anext(requests))
        await settle()
        assert not taking.done()
        assert held_of(server.exchange.served) == (1, 1, 4, 4)
        kept.clear()
        gc.collect()
        await (await taking).reply(b"!")
        assert await asking == b"!"
        await part(client, server)

    run(main())


def test_several_tasks_take_what_there_is_room_for(run: Run) -> None:
    """One request of many bytes is done: there is room for several small ones."""

    async def main() -> None:
        client, server = await joined()
        requests = server.requests(limit_bytes=100)
        await settle()
        large = asyncio.create_task(client.request(bytes(100)))
        first = await anext(requests)
        client.exchange.calls.on_grant(16, 1000)  # a client that does not keep to it
        small = [asyncio.create_task(client.request(bytes(10))) for _ in range(4)]
        takers = [asyncio.create_task(anext(requests)) for _ in range(4)]
        await settle()
        assert not any(taker.done() for taker in takers)
        await first.reply()
        async with asyncio.timeout(10):
            for taker in takers:
                await (await taker).reply()
        await asyncio.gather(large, *small)
        await part(client, server)

    run(main())


def test_bytes_beyond_all_grants_are_refused(run: Run) -> None:
    async def main() -> None:
        end = await lone()
        requests = end.requests(limit_bytes=INITIAL_BYTES)
        half = bytes(INITIAL_BYTES // 2)
        for number in range(6):
            end.arrive(frame(Kind.REQUEST, number) + half)
        await settle()
        # Two wait; the program has none of them yet.
        assert held_of(end.exchange.served) == (2, 2, 2, INITIAL_BYTES)
        refusals = [data for data, _ in end.sent if data[2] == Kind.ERROR]
        assert [(data[7], data[15]) for data in refusals] == [
            (number, ErrorCode.OVERLOADED) for number in range(2, 6)
        ]
        taken = [await anext(requests) for _ in range(2)]
        for number in range(6, 12):  # and two more, while the program has as many
            end.arrive(frame(Kind.REQUEST, number) + half)
        await settle()
        assert held_of(end.exchange.served) == (4, 2, 4, 2 * INITIAL_BYTES)
        for request in taken:
            await request.reply()
        await part(end)

    run(main())


# Rude peers


HEADER = frame(Kind.REQUEST, 5)
#: The messages, with their immediates, and words of the error.
RUDE: dict[str, tuple[list[tuple[bytes, int | None]], str]] = {
    "garbage": ([(b"garbage garbage garbage", None)], "no request"),
    "short": ([(b"", None)], "that is no request"),
    "no body asked": ([(b"x", 5)], "body of request 5"),
    "no answer asked": ([(frame(Kind.ANSWER, 5), None)], "answer to request 5"),
    "no error asked": ([(error_frame(5, 1, "", ""), None)], "error for request 5"),
    "no answer's body": ([(b"x", ANSWER_BODY | 5)], "answer to request 5"),
    "twice": ([(HEADER, None)] * 2, "request 5 twice"),
    "body twice": (
        [(frame(Kind.REQUEST, 5, flags=BODY_FOLLOWS), None), (b"1", 5), (b"2", 5)],
        "body of request 5",
    ),
    "flood": (
        [(frame(Kind.REQUEST, n), None) for n in range(INITIAL_REQUESTS + 1)],
        "more than 16 requests",
    ),
    "flood of headers": (
        [(frame(Kind.REQUEST, n, flags=BODY_FOLLOWS), None) for n in range(INITIAL_REQUESTS + 1)],
        "more than 16 requests",
    ),
    "grants nothing": ([(frame(Kind.GRANT, 0), None)], "grant of no request"),
}


@pytest.mark.parametrize("rude", RUDE)
def test_a_rude_peer_ends_its_connection(run: Run, rude: str) -> None:
    async def main() -> None:
        end = await lone()
        messages, words = RUDE[rude]
        # With a waiting task the requests would be taken; the grant is the initial one.
        waits = "twice" not in rude and "flood" not in rude
        waiting = asyncio.create_task(anext(end.requests())) if waits else None
        asking = asyncio.create_task(end.request(b"?"))
        await settle()
        for data, imm in messages:
            end.arrive(data, imm)
        with pytest.raises(ConnectionLostError, match=words) as caught:
            await asking
        assert isinstance(end.cause, ProtocolError)
        assert isinstance(caught.value, ProtocolError)
        assert caught.value.request_sent
        if waiting is not None:
            with pytest.raises(ProtocolError):
                await waiting
        with pytest.raises(ProtocolError):
            await end.request(b"?")
        await part(end)

    run(main())


def test_a_flood_that_takes_no_refusals_ends(run: Run) -> None:
    """Refusals that have no room are bounded."""

    async def main() -> None:
        end = await lone()
        end.requests(limit=1, limit_bytes=1)
        end.credits = 0
        large = bytes(INITIAL_BYTES)
        for number in range(INITIAL_REQUESTS):
            end.arrive(frame(Kind.REQUEST, number) + large)
        await settle()
        assert end.cause is None
        assert held_of(end.exchange.served)[:2] == (INITIAL_REQUESTS, 1)
        end.arrive(frame(Kind.REQUEST, 99))
        await settle()
        assert isinstance(end.cause, ProtocolError)
        await part(end)

    run(main())


def test_a_flood_that_takes_no_answers_ends(run: Run) -> None:
    """Each answer is given up after a time, and the words about that wait for room."""

    async def main() -> None:
        end = await lone()
        requests = end.requests(limit=1)
        end.credits = 0
        for number in range(1000):
            end.arrive(frame(Kind.REQUEST, number))
            await settle()
            if end.cause is not None:
                break
            request = await anext(requests)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await request.reply(b"!")
            await settle()
        assert number <= INITIAL_REQUESTS + 2
        assert isinstance(end.cause, ProtocolError)
        with pytest.raises(ProtocolError, match="not taken 17 answers"):
            await anext(requests)
        await part(end)

    run(main())


def test_answers_that_were_given_up_and_told_do_not_count(run: Run) -> None:
    async def main() -> None:
        end = await lone()
        requests = end.requests(limit=1)
        for number in range(5 * INITIAL_REQUESTS):
            end.credits = 0
            end.arrive(frame(Kind.REQUEST, number))
            request = await anext(requests)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await request.reply(b"!")
            end.give(None)
            await settle()
        assert end.cause is None
        await part(end)

    run(main())


async def abandon(end: End, count: int) -> None:
    asking = [asyncio.create_task(end.request(b"?")) for _ in range(count)]
    await settle()
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


def test_what_a_peer_owes_is_bounded_whatever_it_grants(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST_ABANDONED", 8)

    async def main() -> None:
        end = await lone()
        end.arrive(frame(Kind.GRANT, ANSWER_BODY - 1, (1 << 64) - 1))
        await settle()
        await abandon(end, 8)
        for _ in range(20):
            with pytest.raises(RequestDeadlineError):
                await end.request(b"?", 0.001)
        assert held_by(end.exchange.calls)[0] == 8
        end.arrive(error_frame(end.sent[0][0][7], ErrorCode.CANCELED, "", ""))
        asking = asyncio.create_task(end.request(b"?"))
        await settle()
        end.arrive(frame(Kind.ANSWER, end.sent[-1][0][7]) + b"!")
        assert await asking == b"!"
        await part(end)

    run(main())


def test_a_peer_that_answers_no_cancellation_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "UNANSWERED_S", 0.4)

    async def main() -> None:
        end = await lone()
        for _ in range(6):  # a peer that ends a call now and then goes on
            await abandon(end, 2)
            await asyncio.sleep(0.12)
            assert end.cause is None
            end.arrive(error_frame(end.sent[-1][0][7], ErrorCode.CANCELED, "", ""))
            await settle()
        asking = asyncio.create_task(end.request(b"?"))
        await asyncio.sleep(0.6)  # so does a peer that has a call whose task waits
        assert end.cause is None
        end.arrive(frame(Kind.ANSWER, end.sent[-1][0][7]))
        await asking
        with pytest.raises(ConnectionLostError):
            await anext(end.requests())
        assert isinstance(end.cause, ProtocolError)
        assert "no cancellation" in str(end.cause)
        await part(end)

    run(main())


def test_no_time_runs_when_all_cancellations_are_answered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "UNANSWERED_S", 0.02)

    async def main() -> None:
        client, server = await joined()
        requests = server.requests()
        await settle()
        await abandon(client, 5)
        await settle()
        assert held_by(client.exchange.calls) == NOTHING
        await asyncio.sleep(0.06)
        assert client.cause is None
        del requests
        await part(client, server)

    run(main())


def test_frames_that_come_late_are_no_violation(run: Run) -> None:
    async def main() -> None:
        end = await lone()
        end.arrive(frame(Kind.CANCEL, 77))
        end.arrive(error_frame(77, 1, "", "", GIVEN_UP))
        await settle()
        assert end.cause is None
        await part(end)

    run(main())


def test_an_answer_twice_is_a_violation(run: Run) -> None:
    async def main() -> None:
        client = await lone()
        asking = asyncio.create_task(client.request(b"?"))
        await settle()
        number = client.sent[0][0][7]
        client.arrive(b"!", ANSWER_BODY | number)
        client.arrive(frame(Kind.ANSWER, number))
        assert await asking == b"!"
        await settle()
        assert isinstance(client.cause, ProtocolError)
        await part(client)

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_end_in_order_or_in_a_violation(run: Run, seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        end = await lone()
        asking = [asyncio.create_task(end.request(b"?")) for _ in range(4)]
        serving = asyncio.create_task(echo(end.requests(limit=8)))
        await settle()
        for _ in range(300):
            number = rng.randrange(8)
            kind = rng.choice(list(Kind))
            flags = rng.choice([0, 0, 1, 2])
            body = rng.randbytes(rng.choice([0, 0, 3]))
            if rng.random() < 0.3:
                end.arrive(body, number | rng.choice([0, ANSWER_BODY]))
            elif rng.random() < 0.02:
                end.arrive(rng.randbytes(rng.randrange(40)))
            else:
                end.arrive(frame(kind, number, rng.randrange(4), flags) + body)
            await settle(2)
        results = await asyncio.gather(*asking, return_exceptions=True)
        for result in results:
            assert isinstance(result, (bytes, ProtocolError, RequestError))
        assert isinstance(end.cause, ProtocolError)
        with pytest.raises(ProtocolError):
            await serving
        await part(end)

    run(main())


# The end


def test_at_the_end_all_waits_end(run: Run) -> None:
    async def main() -> None:
        client, server = await joined()
        requests = server.requests(limit=2)
        await settle()
        asking = [asyncio.create_task(client.request(b"?")) for _ in range(4)]
        request = await anext(requests)
        client.end()
        server.end()
        results: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionLostError] * 4
        assert [result.request_sent for result in results] == [True, True, False, False]
        assert len({id(result) for result in results}) == 4
        assert request.canceled
        with pytest.raises(ConnectionLostError):
            await anext(requests)
        await request.reply(b"nobody waits")
        with pytest.raises(ConnectionLostError):
            await client.request(b"?")
        await part(client, server)

    run(main())


def test_the_reader_that_is_canceled_ends_all(run: Run) -> None:
    """As `asyncio.run` does at its end."""

    async def main() -> None:
        client = await lone()
        asking = asyncio.create_task(client.request(b"?"))
        await settle()
        for task in asyncio.all_tasks() - {asyncio.current_task(), asking}:
            task.cancel()
        with pytest.raises(ResourceClosedError, match="canceled"):
            await asking
        with pytest.raises(ResourceClosedError, match="canceled"):
            await client.request(b"?")
        await part(client)

    run(main())


def test_numbers_wrap_and_skip_those_in_use(run: Run) -> None:
    async def main() -> None:
        client, server = await joined()
        requests = server.requests()
        first = asyncio.create_task(client.request(b"first"))
        kept = await anext(requests)
        set_number(client.exchange.calls, ANSWER_BODY - 2)
        for expected in (ANSWER_BODY - 1, 0, 2, 3):
            asking = asyncio.create_task(client.request(b"?"))
            request = await anext(requests)
            assert number_of(request) == expected
            await request.reply()
            await asking
        await kept.reply(b"last")
        assert await first == b"last"
        await part(client, server)

    run(main())
