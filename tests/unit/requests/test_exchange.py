"""Requests over a pipe in memory: answers, errors, deadlines, cancellation, and the end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiordma import (
    ConnectionLostError,
    MessageTooLargeError,
    Request,
    RequestDeadlineError,
    RequestError,
    RequestRefusedError,
    RequestUnknownError,
    ResourceClosedError,
)
from aiordma._core import Message
from aiordma.endpoint.outcome import ended_error, left_error
from aiordma.loop.timers import Timer, call_later
from aiordma.requests import calls as calls_module
from aiordma.requests.wire import (
    ANSWER_BODY,
    HEADER_SIZE,
    STOPPED,
    ErrorCode,
    Kind,
    frame,
)
from tests.device.stepping import Steps, every_step, run_canceled
from tests.inside.requests import (
    expire,
    held_by,
    held_of,
    is_waiting,
    number_of,
    ring,
    set_number,
)

from ..conftest import settle
from .pipe import LARGE, LARGEST, NOTHING, ROOM, End, echo, joined, lone, part

SIZES = [0, 1, ROOM - HEADER_SIZE, ROOM - HEADER_SIZE + 1, ROOM, len(LARGE)]


def hold_up(seconds: float) -> None:
    """As a program that computes in its loop."""
    time.sleep(seconds)


async def serve(end: End, handler: Callable[[Request], Awaitable[object]]) -> None:
    async for request in end.requests():
        await handler(request)


async def test_errors_of_the_handler() -> None:
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


async def test_a_request_is_answered_once() -> None:
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


async def test_a_request_is_open_after_a_reply_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(data: bytes, imm: None) -> int:
        raise MemoryError

    client, server = await joined()
    requests = server.requests()
    asking = asyncio.create_task(client.request(b"?"))
    request = await anext(requests)
    with monkeypatch.context() as patch:
        patch.setattr(server.exchange.served, "sender", fail)
        with pytest.raises(MemoryError):
            await request.reply(b"lost")
    assert not request.answered
    assert held_of(server.exchange.served) == (1, 0, 1, 1)
    await request.reply(b"!")
    assert await asking == b"!"
    assert held_of(server.exchange.served) == (0, *NOTHING)
    await part(client, server)


# Deadlines and cancellation


async def test_the_deadline_travels() -> None:
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


async def test_an_expired_request_is_not_served() -> None:
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


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("size", [1, len(LARGE)])
async def test_an_answer_that_is_here_is_returned(size: int, *, into: bool) -> None:
    """The loop was busy past the deadline: the answer and the timer come in the same turn."""
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


async def test_many_deadlines_share_a_timer() -> None:
    """Each call ends at its own, in whatever order they were made."""
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
    assert 0.398 <= client.loop.time() - began < 10, "of which uvloop counts milliseconds"
    for task in (tasks[2], tasks[6]):
        assert not task.done()
        task.cancel()
    await asyncio.wait(tasks)
    await part(client)


@pytest.mark.parametrize("into", [False, True])
async def test_the_default_limit_ends_each_wait(
    monkeypatch: pytest.MonkeyPatch, *, into: bool
) -> None:
    """For the answer, for room to send and for the grant; with one timer for all of them."""
    timers: list[float] = []

    def count(loop: asyncio.AbstractEventLoop, delay: float, function: Callable[[], None]) -> Timer:
        timers.append(delay)
        return call_later(loop, delay, function)

    monkeypatch.setattr(calls_module, "call_later", count)
    client = await lone(limit_s=0.25)
    calls = client.exchange.calls
    client.credits = 5
    memory = [bytearray(4) if into else None for _ in range(40)]
    tasks = [asyncio.ensure_future(calls.request(b"?", ..., each)) for each in memory]
    await settle()
    assert timers == pytest.approx([0.25], abs=0.1)
    assert held_by(calls) == (16, 16, 16)
    assert [is_waiting(calls, task) for task in tasks] == [into] * 5 + [True] * 35
    assert len(client.sent) == 5
    assert {data[8:HEADER_SIZE] for data, _ in client.sent} == {bytes(8)}, "it is not told"
    began = client.loop.time()
    await asyncio.wait(tasks)
    assert 0.2 <= client.loop.time() - began < 10
    for task in tasks:
        assert isinstance(task.exception(), RequestDeadlineError)
        assert "no answer to the request within 0.25 s" in str(task.exception())
        assert not task.cancelling()
        assert not is_waiting(calls, task)
    assert held_by(calls) == (5, 5, 5), "until the peer has answered the cancellation"
    client.give(None)
    await settle()
    assert [data[2] for data, _ in client.sent[5:]] == [Kind.CANCEL] * 5
    await part(client)
    monkeypatch.setattr(calls_module, "call_later", None)
    with pytest.raises(ResourceClosedError):  # and sets no timer
        await client.request(b"?", 0.1)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("credits", [0, None])
async def test_a_deadline_and_a_cancellation(credits: int | None, *, both: bool) -> None:
    """The task that was canceled, too, ends so; and no cancellation of ours is left in a task."""
    client = await lone()
    client.exchange.calls.on_grant(1, 1000)
    client.credits = credits
    first = asyncio.create_task(client.request(b"1"))
    await settle()
    waiting = first if credits == 0 else asyncio.create_task(client.request(b"2"))
    await settle()
    expire(client.exchange.calls, waiting)
    if both:
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError if both else RequestDeadlineError):
        await waiting
    assert waiting.cancelling() == both
    first.cancel()
    await asyncio.wait([first])
    await part(client)


async def test_a_deadline_after_the_line_of_the_grant() -> None:
    """Though the timer of all calls rings while the task is let in, and has not gone on."""
    client = await lone()
    calls = client.exchange.calls
    calls.on_grant(1, 1000)
    first = asyncio.create_task(client.request(b"1"))
    await settle()
    second = asyncio.create_task(client.request(b"2", 0.2))
    await settle()
    calls.on_answer(1, Message(memoryview(b"answer")))
    asyncio.get_running_loop().call_soon(calls.resume)
    ring(calls)
    assert await first == b"answer"
    await settle()
    assert len(client.sent) == 2
    await asyncio.wait([second], timeout=10)
    assert second.done(), "it waits for ever"
    assert isinstance(second.exception(), RequestDeadlineError)
    await part(client)


async def test_a_deadline_in_the_line_of_the_grant() -> None:
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


@pytest.mark.parametrize("size", [1, len(LARGE)])
@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_cancellation_is_told(how: str, size: int) -> None:
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


async def test_a_canceled_request_leaves_the_line_of_the_server() -> None:
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


async def drip(end: End) -> None:
    """Room for three messages, later, a message at a time."""
    for _ in range(3):
        await settle()
        end.give(1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, len(LARGE)])
@pytest.mark.parametrize("credits", [0, None])
async def test_a_request_canceled_at_every_await(
    *, late: bool, size: int, credits: int | None
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

    for steps in every_step(late=late):
        await scenario(steps)
        assert steps.at < 20
    assert steps.at > 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size", [1, len(LARGE)])
async def test_a_reply_canceled_at_every_await(*, late: bool, size: int) -> None:
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

    for steps in every_step(late=late):
        await scenario(steps)
    assert steps.at > 1


@pytest.mark.parametrize("late", [False, True])
async def test_a_wait_for_requests_canceled_at_every_await(*, late: bool) -> None:
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

    for steps in every_step(late=late):
        await scenario(steps)
    assert steps.at > 1


@pytest.mark.parametrize("late", [False, True])
async def test_the_line_for_the_grant_canceled_at_every_await(*, late: bool) -> None:
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

    for steps in every_step(late=late):
        await scenario(steps)
    assert steps.at > 1


# The end


async def test_at_the_end_all_waits_end() -> None:
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


@pytest.mark.parametrize("answered", [0, 1, 3])
async def test_after_a_close_in_good_order_a_request_was_not_served(answered: int) -> None:
    """The peer says whether it was: an older one never does."""
    client, server = await joined()
    requests = server.requests(limit=2)
    await settle()
    asking = [asyncio.create_task(client.request(b"?")) for _ in range(4)]
    await (await anext(requests)).reply(b"!")
    assert await asking[0] == b"!"
    client.end(ended_error(answered))
    results: list[Any] = await asyncio.gather(*asking[1:], return_exceptions=True)
    if answered:
        assert [type(each) for each in results] == [RequestRefusedError] * 3
        assert all(each.try_again and each._stopping for each in results)
    else:
        assert [type(each) for each in results] == [ConnectionLostError] * 3
        assert [each.request_sent for each in results] == [True, True, False]
    assert client.stopping
    with pytest.raises(ConnectionLostError):
        await client.request(b"?")
    await part(client, server)


class WithoutBodies(End):
    """A connection whose peer reads no large message, and leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.left = asyncio.Event()

    async def _send(self, data: Any, imm: int | None) -> None:
        if len(data) > ROOM:
            await self.left.wait()
            raise left_error()
        await super()._send(data, imm)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("answered", [0, 1])
async def test_the_send_of_a_body_ends_as_the_request(answered: int, at_once: bool) -> None:
    """It hears of the disconnection only, perhaps before the peer's last word is read."""
    client = WithoutBodies()
    asking = asyncio.create_task(client.request(LARGE))
    await settle()
    if at_once:
        client.left.set()
    client.end(ended_error(answered))
    await settle()
    client.left.set()
    if answered:
        with pytest.raises(RequestRefusedError) as refused:
            await asking
        assert refused.value.try_again
        assert refused.value._stopping
    else:
        with pytest.raises(ConnectionLostError) as lost:
            await asking
        assert lost.value.request_sent
    await part(client)


async def test_whether_all_that_was_served_is_answered() -> None:
    client, server = await joined()
    requests, served = server.requests(), server.exchange.served
    assert served.all_answered
    asking = [asyncio.create_task(client.request(b"?")) for _ in range(3)]
    await settle()
    assert served.all_answered  # the program has got none of them
    request = await anext(requests)
    assert not served.all_answered
    server.give(None)
    server.credits = 0
    replying = asyncio.create_task(request.reply(b"!"))
    await settle()
    assert not served.all_answered  # the answer waits for room
    server.give(1)
    await replying
    assert served.all_answered
    (await anext(requests)).fail(ValueError())
    assert not served.all_answered
    server.give(1)
    await settle()
    assert served.all_answered
    request = await anext(requests)
    replying = asyncio.create_task(request.reply(b"!"))
    await settle()
    replying.cancel()
    await asyncio.wait([replying])
    assert not served.all_answered  # the peer is still to be told that the answer was given up
    server.give(1)
    await settle()
    assert served.all_answered
    served.stop()
    asking.append(asyncio.create_task(client.request(b"?")))
    await settle()
    assert served.all_answered  # a refusal that waits for room is of none that was served
    await part(client, server)
    await asyncio.wait(asking)


async def test_what_comes_to_a_server_that_is_stopping_is_refused() -> None:
    client, server = await joined()
    requests = server.requests()
    asking = [asyncio.create_task(client.request(b"?"))]
    await settle()
    server.exchange.served.stop()
    asking.append(asyncio.create_task(client.request(b"?")))
    with pytest.raises(RequestRefusedError, match="the server is stopping") as caught:
        await asking[1]
    assert (caught.value.try_again, caught.value.remote_type) == (True, "")
    assert client.stopping
    assert not asking[0].done()
    await (await anext(requests)).reply(b"!")
    assert await asking[0] == b"!"
    await part(client, server)


@pytest.mark.parametrize("stopping", [False, True])
async def test_an_answer_that_is_given_up_says_whether_the_server_stops(stopping: bool) -> None:
    """A pool sends a request again whose handler was canceled for that reason."""
    client, server = await joined()
    requests = server.requests()
    asking = asyncio.create_task(client.request(b"?"))
    request = await anext(requests)
    server.credits = 0
    replying = asyncio.create_task(request.reply(b"!"))
    await settle()
    if stopping:
        server.exchange.served.stop()
    replying.cancel()
    await asyncio.wait([replying])
    server.give(1)
    with pytest.raises(RequestError) as given_up:
        await asking
    assert (given_up.value.remote_text == STOPPED) == stopping
    assert given_up.value.remote_type == ("CancelledError" if stopping else "")
    await part(client, server)


async def test_numbers_wrap_and_skip_those_in_use() -> None:
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


async def test_a_request_that_is_dropped_elsewhere_while_it_is_canceled_ends_once() -> None:
    """Its finalizer, in another thread, is told to the loop later than a CANCEL that has come."""
    client, server = await joined()
    requests = server.requests()
    asking = asyncio.create_task(client.request(b"x"))
    await settle()
    held = [await anext(requests)]
    await settle()
    client.peer, sent = None, len(client.sent)  # the CANCEL is on its way
    asking.cancel()
    await settle()
    ((data, imm),) = client.sent[sent:]
    client.peer, sent = server, len(server.sent)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    server.arrive(data, imm)
    server.exchange.read()
    await settle()
    assert len(server.sent) == sent + 1
    assert client.cause is None
    again = asyncio.create_task(client.request(b"y"))
    await settle()
    await (await anext(requests)).reply(b"z")
    assert await again == b"z"
    await part(client, server)
