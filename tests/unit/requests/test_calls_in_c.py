"""Requests between two connections: calls that C makes, and what it leaves to Python."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiordma import (
    ConnectionConfig,
    ConnectionLostError,
    Message,
    RequestDeadlineError,
    RequestError,
    ResourceClosedError,
)
from aiordma._core import Call, CallTable, Coroutine
from aiordma.link import tally
from aiordma.requests.wire import ANSWER_BODY, Kind, error_frame, frame
from aiordma.service.requests import handle_requests
from tests.inside.requests import exchange_of, held_by, set_number

from ..conftest import eager_collector, settle
from ..endpoint.fabric import Wire

CONFIG = ConnectionConfig(slot_size=4096)


@pytest.fixture(autouse=True)
def unobserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have asked for spans, which Python makes."""
    monkeypatch.setattr(tally, "observed", False)


async def opened(config: ConnectionConfig = CONFIG) -> Wire:
    wire = Wire(config, config)
    await wire.open()
    return wire


@asynccontextmanager
async def served(handler: Any = None, **limits: Any) -> AsyncIterator[Wire]:
    """A wire whose second end answers, by default with the same bytes, while adapters work."""

    async def echo(request: Any) -> bytes:
        return bytes(request.body)

    wire = await opened()
    serving = asyncio.create_task(handle_requests(wire.ends[1], handler or echo, **limits))

    async def work() -> None:
        while True:
            wire.settle()
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    try:
        yield wire
    finally:
        working.cancel()
        await wire.close()
        serving.cancel()  # a handler may go on for ever
        await asyncio.wait([serving])


async def test_calls_of_many_tasks_get_their_answers() -> None:
    async with served() as wire:
        client = wire.ends[0]

        async def ask(number: int) -> None:
            for turn in range(20):
                body = f"{number}-{turn}".encode() * random.randrange(1, 9)
                assert bytes(await client.request(body)) == body

        await asyncio.gather(*(ask(number) for number in range(30)))
        assert held_by(exchange_of(client).calls) == (0, 0, 0)


@pytest.mark.parametrize(
    "body", [b"x" * 200, bytearray(b"x" * 200), memoryview(b"x" * 200), b"", b"x" * 4000]
)
async def test_any_buffer_is_a_request(body: Any) -> None:
    async with served() as wire:
        assert bytes(await wire.ends[0].request(body)) == bytes(body)


async def test_what_is_no_buffer_is_refused_and_costs_nothing() -> None:
    async with served() as wire:
        assert bytes(await wire.ends[0].request(b"?")) == b"?"  # the first one sets a timer
        for wrong in ("text", 5, None, [b"a", b"b"], (b"a",)):
            with pytest.raises(TypeError):
                await wire.ends[0].request(wrong)
        assert held_by(exchange_of(wire.ends[0]).calls) == (0, 0, 0)


async def test_a_request_is_a_coroutine_in_every_respect() -> None:
    async with served() as wire:
        assert bytes(await wire.ends[0].request(b"?")) == b"?"  # the first one sets a timer
        asking = wire.ends[0].request(b"?")
        assert isinstance(asking, Coroutine)
        assert inspect.iscoroutine(asking) or asyncio.iscoroutine(asking)
        assert repr(asking).startswith("<coroutine object Connection.request at")
        assert asking.__qualname__ == "Connection.request"
        assert asking.cr_frame is not None
        assert asking.cr_frame.f_code.co_name == "request"
        task: asyncio.Task[Message] = asyncio.create_task(asking)
        await asyncio.sleep(0)
        assert isinstance(asking.cr_await, Call)
        assert bytes(await task) == b"?"
        with pytest.raises(RuntimeError, match="cannot reuse"):
            await asking
        forgotten = [wire.ends[0].request(b"?")]
        with pytest.warns(RuntimeWarning, match=r"'Connection.request' was never awaited"):
            forgotten.clear()
        asking = wire.ends[0].request(b"?")
        asking.close()


async def test_the_time_is_over() -> None:
    waiting = asyncio.Event()

    async def handler(request: Any) -> bytes:
        if bytes(request.body) == b"wait":
            try:
                await asyncio.Event().wait()
            finally:
                assert request.canceled
                waiting.set()
        return b"answer"

    async with served(handler) as wire:
        client = wire.ends[0]
        with pytest.raises(RequestDeadlineError, match=r"within 0\.05 s"):
            await client.request(b"wait", timeout=0.05)
        await waiting.wait()
        assert bytes(await client.request(b"?")) == b"answer"
        with pytest.raises(RequestDeadlineError, match="had passed before"):
            await client.request(b"?", timeout=0)


@pytest.mark.parametrize("when", ["before its step", "while it waits"])
async def test_a_canceled_call_is_told_to_the_peer(when: str) -> None:
    canceled: list[bytes] = []

    async def handler(request: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            canceled.append(bytes(request.body))

    async with served(handler) as wire:
        client = wire.ends[0]
        task = asyncio.create_task(client.request(b"1"))
        if when != "before its step":
            await settle()
        if when == "while it waits":
            while not wire.ends[1].stats.messages_received:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while held_by(exchange_of(client).calls)[0]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert canceled == ([b"1"] if when == "while it waits" else [])


async def test_a_call_that_is_closed_is_told_to_the_peer() -> None:
    """As a coroutine that the collector finds, whose task never ended."""
    async with served() as wire:
        client = wire.ends[0]
        assert bytes(await client.request(b"?")) == b"?"
        asking = client.request(b"1")
        asking.send(None)
        assert held_by(exchange_of(client).calls)[0] == 1
        asking.close()
        while held_by(exchange_of(client).calls)[0]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert bytes(await client.request(b"2")) == b"2"


async def test_the_error_of_a_handler() -> None:
    async def handler(request: Any) -> bytes:
        raise RequestError("no", remote_type="Broken", remote_text="no")

    async with served(handler) as wire:
        with pytest.raises(RequestError, match="no"):
            await wire.ends[0].request(b"?")
        assert held_by(exchange_of(wire.ends[0]).calls) == (0, 0, 0)


async def test_more_calls_than_were_granted_wait_in_line() -> None:
    running = most = 0

    async def handler(request: Any) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await settle(20)
        running -= 1
        return bytes(request.body)

    async with served(handler, limit=4, max_concurrent=3) as wire:
        client = wire.ends[0]
        bodies = [str(number).encode() for number in range(60)]
        answers = await asyncio.gather(*(client.request(body) for body in bodies))
        assert [bytes(answer) for answer in answers] == bodies
        assert most == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(Kind.ANSWER, 77) + b"?", "answer to request 77"),
        (frame(Kind.REQUEST, ANSWER_BODY) + b"?", "number"),
        (bytes(frame(Kind.ANSWER, 1)[:8]), "no request"),
        (b"\xa5\x02" + frame(Kind.ANSWER, 1)[2:], "version 2"),
        (frame(Kind.ANSWER, 1, flags=4), "flags 0x4"),
        (error_frame(78, 1, "", ""), "an error for request 78"),
        (b"hello, world, a message", "no request"),
    ],
)
async def test_a_frame_that_is_wrong_ends_the_connection(data: bytes, words: str) -> None:
    wire = await opened()
    client, server = wire.ends
    asking = asyncio.create_task(client.request(b"?"))
    await wire.run()
    await server.send(data)
    await wire.run()
    with pytest.raises(ConnectionLostError, match=words):
        await asking
    with pytest.raises(ConnectionLostError):
        await client.request(b"?")
    await wire.lose()


async def test_calls_end_with_the_connection() -> None:
    wire = await opened()
    client = wire.ends[0]
    asking = [asyncio.create_task(client.request(b"?")) for _ in range(5)]
    await wire.run()
    await wire.close()
    for task in asking:
        with pytest.raises((ConnectionLostError, ResourceClosedError)):
            await task
    with pytest.raises(ResourceClosedError):
        await client.request(b"?")


async def test_numbers_wrap_in_c() -> None:
    async with served() as wire:
        client = wire.ends[0]
        assert bytes(await client.request(b"?")) == b"?"
        set_number(exchange_of(client).calls, ANSWER_BODY - 3)
        answers = await asyncio.gather(*(client.request(bytes([n])) for n in range(6)))
        assert [bytes(answer) for answer in answers] == [bytes([n]) for n in range(6)]


async def test_the_collector_may_run_at_any_step() -> None:
    gc.collect()
    gc.freeze()
    with eager_collector():
        async with served() as wire:
            client = wire.ends[0]
            tasks = [asyncio.create_task(client.request(bytes([n]))) for n in range(12)]
            await settle(2)
            for task in tasks[::3]:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for number, end in enumerate(ends):
                assert isinstance(end, Message | asyncio.CancelledError), end
                if isinstance(end, Message):
                    assert bytes(end) == bytes([number])
            assert bytes(await client.request(b"?")) == b"?"


async def test_bytes_are_looked_at_when_no_other_code_can_run_any_more() -> None:
    """The collector runs at the first object that a request makes, and shrinks its bytes."""
    async with served() as wire:
        client = wire.ends[0]
        assert bytes(await client.request(b"?")) == b"?"
        body = bytearray(b"A" * 3000)
        asking = client.request(body)

        def shrink(phase: str, info: dict[str, int]) -> None:
            body[:] = b"x"

        before = gc.get_threshold()
        gc.callbacks.append(shrink)
        gc.set_threshold(1, 1000, 1000)
        try:
            task: asyncio.Task[Message] = asyncio.create_task(asking)
            await asyncio.sleep(0)
        finally:
            gc.set_threshold(*before)
            gc.callbacks.remove(shrink)
        assert bytes(await task) in {b"x", b"A" * 3000}


@pytest.mark.parametrize("call", ["request", "requests"])
async def test_a_call_that_is_refused_leaves_a_connection_for_messages(call: str) -> None:
    wire = await opened()
    client, server = wire.ends
    receiving = asyncio.create_task(client.recv())
    await settle()
    with pytest.raises(RuntimeError, match="a task waits in recv"):
        client.request(b"?") if call == "request" else client.requests()
    await server.send(b"a message")
    await wire.run()
    assert bytes(await receiving) == b"a message"
    await wire.close()


async def test_a_peer_that_breaks_the_rules_while_tasks_wait_in_line() -> None:
    wire = await opened()
    client, server = wire.ends
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    tasks = [asyncio.create_task(client.request(b"?")) for _ in range(20)]
    await wire.run()
    await server.send(frame(Kind.ANSWER, 77) + b"?")
    await wire.run()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(end, ConnectionLostError)
    await wire.lose()
    assert told == []


async def test_a_request_begins_when_another_was_answered_and_goes_on() -> None:
    """Its handler has replied, so that it takes no part of the limit any more."""
    begun: list[bytes] = []

    async def handler(request: Any) -> None:
        begun.append(bytes(request.body))
        await request.reply(b"ok")
        await asyncio.Event().wait()

    async with served(handler, limit=1) as wire:
        asking = [wire.ends[0].request(bytes([number])) for number in range(4)]
        assert [bytes(answer) for answer in await asyncio.gather(*asking)] == [b"ok"] * 4
        assert sorted(begun) == [bytes([number]) for number in range(4)]


async def test_no_handler_sees_the_variables_of_another() -> None:
    """Wherever it is begun: by a drain, by the end of another, or by the answer of another."""
    who: contextvars.ContextVar[bytes] = contextvars.ContextVar("who", default=b"nobody")
    seen: list[bytes] = []

    async def handler(request: Any) -> bytes:
        seen.append(who.get())
        who.set(bytes(request.body))
        await settle(3)
        return b"ok"

    async with served(handler, max_concurrent=2) as wire:
        asking = [wire.ends[0].request(bytes([number])) for number in range(12)]
        await asyncio.gather(*asking)
    assert seen == [b"nobody"] * 12


async def test_requests_by_hand_beside_handlers() -> None:
    async def handler(request: Any) -> None:
        await asyncio.Event().wait()

    async with served(handler, max_concurrent=1) as wire:
        client, server = wire.ends
        busy = asyncio.create_task(client.request(b"1"))

        async def by_hand() -> None:
            async for request in server.requests():
                await request.reply(b"by hand")

        serving = asyncio.create_task(by_hand())
        await settle(20)
        assert bytes(await client.request(b"2")) == b"by hand"
        for task in (busy, serving):
            task.cancel()


async def test_handlers_that_are_canceled_beside_others() -> None:
    async def other(request: Any) -> bytes:
        return b"other"

    async with served() as wire:
        client, server = wire.ends
        assert bytes(await client.request(b"1")) == b"1"
        second = asyncio.create_task(handle_requests(server, other))
        await settle()
        assert bytes(await client.request(b"2")) in {b"2", b"other"}
        second.cancel()
        await asyncio.wait([second])
        assert bytes(await client.request(b"3")) == b"3"


# Calls that wait for the peer's grant


@asynccontextmanager
async def one_at_a_time(**limits: Any) -> AsyncIterator[tuple[Wire, list[bytes], asyncio.Event]]:
    """A wire whose server has granted one request, and has it: what came, and what ends it."""
    came, go = list[bytes](), asyncio.Event()

    async def handler(request: Any) -> bytes:
        came.append(bytes(request.body))
        if came[-1] == b"held":
            await go.wait()
        return came[-1]

    async with served(handler, limit=1, **limits) as wire:
        client = wire.ends[0]
        assert bytes(await client.request(b"first")) == b"first"  # behind it comes the grant
        await settle()
        held = asyncio.create_task(client.request(b"held"))
        await settle(20)
        assert came == [b"first", b"held"]
        yield wire, came, go
        go.set()
        assert bytes(await held) == b"held"
        assert held_by(exchange_of(client).calls) == (0, 0, 0)
        assert len(exchange_of(client).calls) == 0


async def test_calls_in_line_keep_their_order_with_those_of_python() -> None:
    """With `into`, a call is made in Python; all stand in one line."""
    into = bytearray(9)
    async with one_at_a_time() as (wire, came, go):
        client = wire.ends[0]
        asking: list[asyncio.Task[Any]] = []
        for number in range(9):
            body = bytes([number])
            ask = client.request(body, into=into) if number % 3 == 1 else client.request(body)
            asking.append(asyncio.create_task(ask))
        await settle()
        assert len(exchange_of(client).calls) == 10
        go.set()
        await asyncio.gather(*asking)
        assert came[2:] == [bytes([number]) for number in range(9)]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("how", ["canceled", "late", "thrown into", "closed"])
async def test_a_call_that_ends_in_the_line_of_the_grant(how: str, place: int) -> None:
    async with one_at_a_time() as (wire, came, go):
        client = wire.ends[0]
        ends = client.request(b"ends", timeout=0.02 if how == "late" else None)
        others: list[asyncio.Task[Message]] = []
        task: asyncio.Task[Message] | None = None
        for number in range(3):
            if number == place and how in {"canceled", "late"}:
                task = asyncio.create_task(ends)
            elif number == place:
                ends.send(None)
            else:
                others.append(asyncio.create_task(client.request(bytes([number]))))
            await settle()
        if task is not None:
            if how == "canceled":
                task.cancel()
            error = asyncio.CancelledError if how == "canceled" else RequestDeadlineError
            with pytest.raises(error):
                await task
        elif how == "closed":
            ends.close()
        else:
            with pytest.raises(KeyError):
                ends.throw(KeyError())
        await settle()
        go.set()
        answers = [bytes(await other) for other in others]
        assert came[2:] == answers == [bytes([n]) for n in range(3) if n != place]


async def test_a_call_that_is_canceled_when_it_was_let_in() -> None:
    """In the turn in which it would send: the next one gets its part of the grant."""
    async with one_at_a_time() as (wire, came, go):
        client = wire.ends[0]
        calls = exchange_of(client).calls
        first, second = (asyncio.create_task(client.request(body)) for body in (b"1", b"2"))
        await settle()
        calls.on_grant(2, 1 << 20)  # lets in the first
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        assert bytes(await second) == b"2"
        assert came[2:] == [b"2"]


async def test_bytes_that_change_in_line() -> None:
    """The program should not do so: what is sent is what there is then, and all is counted."""
    async with one_at_a_time() as (wire, came, go):
        client = wire.ends[0]
        bodies = [bytearray(b"x" * 50) for _ in range(3)]
        asking = [asyncio.create_task(client.request(body)) for body in bodies]
        await settle()
        bodies[0][:] = b"y" * 50
        bodies[1][:] = b"short"
        bodies[2][:] = bytes(9000)  # more than fits into a slot
        go.set()
        answers = [bytes(await task) for task in asking]
        assert answers == [b"y" * 50, b"short", bytes(9000)]
        assert came[2:] == answers


async def test_calls_in_the_line_of_the_grant_end_with_the_connection() -> None:
    wire = await opened()
    client = wire.ends[0]
    asking = [asyncio.create_task(client.request(b"?")) for _ in range(20)]
    await wire.run()
    await wire.lose()
    sent = []
    for task in asking:
        with pytest.raises(ConnectionLostError) as caught:
            await task
        sent.append(caught.value.request_sent)
    assert sent == [True] * 16 + [False] * 4


async def test_the_peer_is_told_the_time_that_is_left_behind_the_line() -> None:
    left: list[float | None] = []

    async def handler(request: Any) -> None:
        left.append(request.remaining)
        await asyncio.sleep(0.06 if len(left) == 2 else 0)

    async with served(handler, limit=1) as wire:
        client = wire.ends[0]
        await client.request(b"?")
        await settle()
        await asyncio.gather(*(client.request(b"?", timeout=9) for _ in range(2)))
    assert left[0] is None
    assert left[1] is not None
    assert left[2] is not None
    assert left[2] < left[1] - 0.04


async def test_a_call_that_is_not_in_line_cannot_be_let_in() -> None:
    loop, calls = asyncio.get_running_loop(), table()
    calls.take(1)
    call = calls.enter(loop, 1, 1.0, 1.0)
    assert not call.done()
    with pytest.raises(RuntimeError, match="does not wait for the grant"):
        call.set_result(None)
    calls.end(call, RequestError("no"))
    assert call.done()


# The table alone.


def table(calls: int = 2, size: int = 100, abandoned: int = 2) -> CallTable:
    return CallTable(None, None, calls, size, abandoned)


async def test_what_fits_under_a_grant() -> None:
    calls = table()
    assert calls.fits(1_000_000), "one that is alone"
    calls.take(60)
    assert calls.fits(40)
    assert not calls.fits(41)
    calls.take(40)
    assert not calls.fits(0)
    calls.give_back(60)
    assert (calls.taken, calls.taken_bytes) == (1, 40)
    calls.set_grant(1, 100)
    assert not calls.fits(0)
    calls.set_grant(1 << 32, (1 << 64) - 1)
    assert calls.fits(1)


async def test_abandoned_calls_have_a_bound_of_their_own() -> None:
    loop, calls = asyncio.get_running_loop(), table(calls=9)
    made = []
    for _ in range(2):
        calls.take(1)
        made.append(calls.enter(loop, 1, 1.0, 1.0))
        assert calls.abandon(made[-1], True)
        assert made[-1].abandoned
    assert calls.abandoned == 2
    assert not calls.fits(1)
    assert [calls.step(), calls.step()] == [1, 2]
    assert calls.finish(made[0], None, None)
    assert calls.abandoned == 1
    assert calls.step() == 1
    assert not calls.finish(made[0], None, None), "it has ended before"
    assert calls.fits(1)


async def test_a_call_that_was_not_sent_frees_its_number() -> None:
    loop, calls = asyncio.get_running_loop(), table()
    calls.take(7)
    call = calls.enter(loop, 7, 1.0, 1.0)
    assert calls.find(call.number) is call
    assert not calls.abandon(call, False)
    assert calls.find(call.number) is None
    assert (len(calls), calls.taken, calls.taken_bytes) == (0, 0, 0)
    assert not calls.abandon(call, True), "it is not in the table"


async def test_an_answer_before_the_wait_and_an_error_behind_it() -> None:
    loop, calls = asyncio.get_running_loop(), table()
    calls.take(1)
    call = calls.enter(loop, 1, 1.0, 1.0)
    answer = Message(memoryview(b"answer"))
    assert calls.finish(call, answer, None)
    calls.end(call, ConnectionLostError(5, "too late"))
    calls.resume()
    assert call.ended
    assert call.answer is answer
    assert await call is answer
    with pytest.raises(RuntimeError, match="no answer any more"):
        await call


async def test_a_call_is_awaited_by_one_task() -> None:
    loop, calls = asyncio.get_running_loop(), table()
    calls.take(1)
    call = calls.enter(loop, 1, 1.0, 1.0)

    async def wait() -> Message:
        return await call

    first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
    await settle()
    with pytest.raises(RuntimeError, match="another task"):
        await second
    calls.finish(call, Message(memoryview(b"!")), None)
    calls.resume()
    assert bytes(await first) == b"!"


async def test_what_one_task_raises_leaves_the_others_their_answers() -> None:
    """As a task that ends the loop: it runs again, and the others go on."""
    loop, calls = asyncio.get_running_loop(), table(calls=3)
    made = []
    for _ in range(3):
        calls.take(1)
        made.append(calls.enter(loop, 1, 1.0, 1.0))

    async def wait(call: Call) -> Message:
        return await call

    def leave() -> None:
        raise SystemExit(3)

    made[0].call_instead(leave)
    tasks = [asyncio.create_task(wait(call)) for call in made[1:]]
    await settle()
    for number, call in enumerate(made):
        calls.finish(call, Message(memoryview(bytes([number]))), None)
    with pytest.raises(SystemExit):
        calls.resume()
    assert [bytes(await task) for task in tasks] == [b"\1", b"\2"]


async def test_a_task_that_is_canceled_when_its_answer_is_here() -> None:
    loop, calls = asyncio.get_running_loop(), table()
    calls.take(1)
    call = calls.enter(loop, 1, 1.0, 1.0)

    async def wait() -> Message:
        return await call

    task = asyncio.create_task(wait())
    await settle()
    calls.finish(call, Message(memoryview(b"!")), None)
    calls.resume()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.ended
    assert not calls.abandon(call, True), "the peer has answered"


async def test_calls_of_another_table_are_not_touched() -> None:
    loop, one, two = asyncio.get_running_loop(), table(), table()
    one.take(1)
    call = one.enter(loop, 1, 1.0, 1.0)
    two.take(1)
    two.enter(loop, 1, 1.0, 1.0)
    assert not two.finish(call, None, RequestError("no"))
    assert not call.ended
    for wrong in (None, 5, "call"):
        with pytest.raises(TypeError):
            two.finish(wrong, None, None)  # type: ignore[arg-type]
