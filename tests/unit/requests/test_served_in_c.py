"""Requests of the peer that C admits and answers, beside the same by Python."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import gc
import random
import struct
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiordma import (
    Connection,
    ConnectionConfig,
    ConnectionLostError,
    Message,
    RequestDeadlineError,
    RequestError,
    RequestRefusedError,
)
from aiordma._core import FOR_PYTHON, PeerRequest, RequestTable
from aiordma.link import tally
from aiordma.requests.exchange import Exchange
from aiordma.requests.served import Request, Served
from aiordma.requests.wire import HEADER_SIZE, Kind, frame
from aiordma.service.requests import handle_requests
from tests.inside.requests import exchange_of, held_by, held_of

from ..conftest import eager_collector, settle
from ..core.test_core_types import no_memory_at
from ..endpoint.fabric import Wire
from .test_calls_in_c import opened, served

NOTHING = (0, 0, 0, 0)
#: A connection that takes few messages at a time.
NARROW = ConnectionConfig(slot_size=4096, recv_depth=4, send_depth=4)


@pytest.fixture(autouse=True)
def unobserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have asked for spans, which Python makes."""
    monkeypatch.setattr(tally, "observed", False)


def leave_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have C admit nothing, and answer nothing."""
    monkeypatch.setattr(Served, "_let_c_admit", lambda _: None)
    monkeypatch.setattr(Request, "_answer", lambda *_: FOR_PYTHON)


@pytest.fixture(params=["C", "Python"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        leave_to_python(monkeypatch)
    return str(request.param)


def served_of(wire: Wire) -> Served:
    return exchange_of(wire.ends[1]).served


class Rude:
    """A client that sends any frames, and notes what comes without a look at the rules.

    Attributes:
        heard: The frames that have come, with their immediates.
    """

    def __init__(self, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
        self._connection = wire.ends[0]
        self._connection.requests()
        self.heard: list[tuple[bytes, int | None]] = []
        own, process = exchange_of(self._connection), Exchange._process

        def note(exchange: Exchange, message: Message) -> None:
            if exchange is not own:
                process(exchange, message)
                return
            self.heard.append((bytes(message), message.imm))
            message.release()

        monkeypatch.setattr(Exchange, "_process", note)

    async def send(self, data: bytes, imm: int | None = None) -> None:
        await Connection.send(self._connection, data, imm)


# One request


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"bytes", b"bytes"),
        (bytearray(b"bytearray"), b"bytearray"),
        (memoryview(b"view"), b"view"),
        (array.array("H", [1, 2]), struct.pack("HH", 1, 2)),
        (b"", b""),
        (None, b""),
        (bytes(4096 - HEADER_SIZE), bytes(4096 - HEADER_SIZE)),
        (bytes(5000), bytes(5000)),
    ],
)
@pytest.mark.parametrize("by", ["return", "reply"])
async def test_any_buffer_is_an_answer(way: str, answer: Any, body: bytes, by: str) -> None:
    async def handler(request: Request) -> Any:
        if by == "return":
            return answer
        await request.reply(b"" if answer is None else answer)
        assert request.answered
        return None

    async with served(handler) as wire:
        for _ in range(3):
            assert bytes(await wire.ends[0].request(b"?")) == body
        await settle()
        assert held_of(served_of(wire)) == NOTHING


@pytest.mark.parametrize("answer", ["text", 5, [b"a"], (b"a", b"b"), {}])
async def test_what_is_no_buffer_is_the_handlers_mistake(way: str, answer: Any) -> None:
    async def handler(request: Request) -> Any:
        if bytes(request.body) == b"reply":
            with pytest.raises(TypeError):
                await request.reply(answer)
            await request.reply(b"still open")
            return None
        return answer

    async with served(handler) as wire:
        with pytest.raises(RequestError) as caught:
            await wire.ends[0].request(b"?")
        assert caught.value.remote_type == "TypeError"
        assert bytes(await wire.ends[0].request(b"reply")) == b"still open"
        await settle()
        assert held_of(served_of(wire)) == NOTHING


async def test_a_request_is_answered_once(way: str) -> None:
    async def handler(request: Request) -> None:
        await request.reply(b"1")
        with pytest.raises(RuntimeError, match="answered before"):
            await request.reply(b"2")
        with pytest.raises(RuntimeError, match="answered before"):
            request.fail(ValueError())

    async with served(handler) as wire:
        for _ in range(3):
            assert bytes(await wire.ends[0].request(b"?")) == b"1"


async def test_an_answer_comes_from_the_loop_alone(way: str) -> None:
    caught: list[BaseException] = []

    async def handler(request: Request) -> bytes:
        def elsewhere() -> None:
            try:
                asyncio.run(request.reply(b"elsewhere"))
            except RuntimeError as exc:
                caught.append(exc)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return b"here"

    async with served(handler) as wire:
        for _ in range(2):
            assert bytes(await wire.ends[0].request(b"?")) == b"here"
    assert ["another event loop" in str(exc) for exc in caught] == [True, True]


async def test_what_the_handler_sees(way: str) -> None:
    seen: list[tuple[bytes, bool, bool, bool]] = []

    async def handler(request: Request) -> None:
        left = request.remaining
        assert (left is None) is (request.deadline is None)
        assert left is None or 5 < left <= 9
        seen.append((bytes(request.body), left is None, request.answered, request.canceled))
        assert "open" in repr(request)

    async with served(handler) as wire:
        for timeout in (None, 9):
            for _ in range(2):
                await wire.ends[0].request(b"?", timeout=timeout)
    assert seen == [(b"?", True, False, False)] * 2 + [(b"?", False, False, False)] * 2


@pytest.mark.one_loop  # uvloop's clock stands still within a turn
async def test_a_request_whose_time_is_over_does_not_begin(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bytes] = []

    async def handler(request: Request) -> bytes:
        begun.append(bytes(request.body))
        return b"!"

    wire = await opened()
    client = Rude(wire, monkeypatch)
    serving = asyncio.create_task(handle_requests(wire.ends[1], handler))
    for number, left in ((1, 0), (2, 1), (3, 0)):  # none, a microsecond, none
        await client.send(frame(Kind.REQUEST, number, left) + bytes([number]))
        await wire.run()
    assert begun == [b"\1", b"\3"]
    answers = [(data[2], data[7]) for data, _ in client.heard if data[2] != Kind.GRANT]
    assert answers == [(Kind.ANSWER, 1), (Kind.ERROR, 2), (Kind.ANSWER, 3)]
    assert held_of(served_of(wire)) == NOTHING
    await ended(wire, serving)


async def test_a_request_that_the_program_drops_fails_at_the_peer(way: str) -> None:
    wire = await opened()
    client, server = wire.ends
    requests = server.requests()
    for _ in range(3):
        asking = asyncio.create_task(client.request(b"?"))
        await wire.run()
        request = await anext(requests)
        assert held_of(served_of(wire)) == (1, 0, 1, 1)
        gone = weakref.ref(request)
        del request
        gc.collect()
        assert gone() is None
        await wire.run()
        with pytest.raises(RequestError, match="did not answer"):
            await asking
        assert held_of(served_of(wire)) == NOTHING
    await wire.close()


# Wherever the handler is begun


def is_handler(coro: Any) -> bool:
    return getattr(coro, "__qualname__", "") == "_Handlers._run"


async def test_a_factory_of_tasks_that_begins_at_once(way: str) -> None:
    """As asyncio.eager_task_factory of Python 3.12, with handlers that never wait."""
    loop = asyncio.get_running_loop()

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        if not is_handler(coro):
            return asyncio.Task(coro, loop=loop, **options)
        with pytest.raises(StopIteration):
            coro.send(None)
        done = loop.create_future()
        done.set_result(None)
        return done

    loop.set_task_factory(factory)
    try:
        async with served(max_concurrent=2) as wire:
            bodies = [bytes([number]) for number in range(20)]
            answers = await asyncio.gather(*(wire.ends[0].request(body) for body in bodies))
            assert [bytes(answer) for answer in answers] == bodies
            assert held_of(served_of(wire)) == NOTHING
    finally:
        loop.set_task_factory(None)


async def test_a_factory_of_tasks_that_fails_ends_the_connection(way: str) -> None:
    loop = asyncio.get_running_loop()

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        if is_handler(coro):
            coro.close()
            raise MemoryError
        return asyncio.Task(coro, loop=loop, **options)

    wire = await opened()
    client, server = wire.ends
    serving = asyncio.create_task(handle_requests(server, _echo))
    first = asyncio.create_task(client.request(b"?"))
    await wire.run()
    assert bytes(await first) == b"?"
    table = served_of(wire)
    loop.set_task_factory(factory)
    try:
        asking = asyncio.create_task(client.request(b"?"))
        await wire.run()
        with pytest.raises(ConnectionLostError, match="cannot be read"):
            await serving
    finally:
        loop.set_task_factory(None)
    await wire.lose()
    with pytest.raises(ConnectionLostError):
        await asking
    assert held_of(table)[:2] == (0, 0)


async def _echo(request: Request) -> bytes:
    return bytes(request.body)


# More than there is room for


async def narrow() -> Wire:
    wire = Wire(NARROW, NARROW)
    await wire.open()
    return wire


async def begun(wire: Wire, handler: Callable[[Request], Awaitable[Any]]) -> asyncio.Task[None]:
    """Serve the second end; the first request has been answered, so that C has all that follow."""
    serving = asyncio.create_task(handle_requests(wire.ends[1], handler))
    asking = asyncio.create_task(wire.ends[0].request(b""))
    await wire.run()
    await asking
    return serving


async def ended(wire: Wire, serving: asyncio.Task[None]) -> None:
    await wire.close()
    serving.cancel()
    await asyncio.wait([serving])


async def test_frames_of_calls_wait_in_line_and_keep_their_order() -> None:
    wire = await narrow()
    came: list[bytes] = []

    async def handler(request: Request) -> bytes:
        came.append(bytes(request.body))
        return bytes(request.body)

    serving = await begun(wire, handler)
    bodies = [bytes([number]) * 100 for number in range(14)]
    asking = [asyncio.create_task(wire.ends[0].request(body)) for body in bodies]
    await settle()
    assert wire.ends[0].stats.messages_sent < 14
    await wire.run()
    assert [bytes(await task) for task in asking] == bodies
    assert came[1:] == bodies
    assert held_by(exchange_of(wire.ends[0]).calls) == (0, 0, 0)
    assert held_of(served_of(wire)) == NOTHING
    await ended(wire, serving)


@pytest.mark.parametrize("depths", [(4, 4), (4, 16), (16, 2), (2, 1)])
@pytest.mark.parametrize("limit", [1, 4, 30])
async def test_calls_keep_their_order_in_both_lines(depths: tuple[int, int], limit: int) -> None:
    """They wait for the grant, and then for a slot or a credit."""
    config = ConnectionConfig(slot_size=4096, recv_depth=depths[0], send_depth=depths[1])
    wire = Wire(config, config)
    await wire.open()
    came: list[bytes] = []

    async def handler(request: Request) -> bytes:
        came.append(body := bytes(request.body))
        await settle(len(came) % 3)
        return body

    serving = asyncio.create_task(handle_requests(wire.ends[1], handler, limit=limit))
    bodies = [bytes([number]) * (number * 40 % 3000 + 1) for number in range(60)]
    asking: list[asyncio.Task[Message]] = []
    for body in bodies:
        asking.append(asyncio.create_task(wire.ends[0].request(body, timeout=30)))
        if body[0] % 7 == 0:
            await wire.run()
    await wire.run()
    assert [bytes(await task) for task in asking] == came == bodies
    assert held_by(exchange_of(wire.ends[0]).calls) == (0, 0, 0)
    assert held_of(served_of(wire)) == NOTHING
    await ended(wire, serving)


@pytest.mark.parametrize("how", ["canceled", "late", "closed"])
async def test_a_call_that_ends_in_line_is_never_sent(how: str) -> None:
    wire = await narrow()
    came: list[bytes] = []

    async def handler(request: Request) -> bytes:
        came.append(bytes(request.body))
        return b"!"

    serving = await begun(wire, handler)
    client = wire.ends[0]
    asking = [asyncio.create_task(client.request(bytes([number]))) for number in range(8)]
    if how == "late":  # the first one sets the timer, which Python does
        asking.append(asyncio.create_task(client.request(b"never", timeout=0.01)))
    await settle()
    queued, made = wire.links[0].state.queued, len(asking)
    coro = client.request(b"never", timeout=0.02 if how == "late" else None)
    if how == "closed":
        coro.send(None)
        assert held_by(exchange_of(client).calls)[0] == made + 1
        coro.close()
    else:
        task: asyncio.Task[Message] = asyncio.create_task(coro)
        await settle()
        assert held_by(exchange_of(client).calls)[0] == made + 1
        if how == "canceled":
            task.cancel()
        assert (await asyncio.wait([task], timeout=5))[0], "it does not end"
        with pytest.raises(asyncio.CancelledError if how == "canceled" else RequestDeadlineError):
            await task
    await settle()
    if how == "late":
        with pytest.raises(RequestDeadlineError):
            await asking.pop()
        queued -= 1
    assert wire.links[0].state.queued == queued
    assert held_by(exchange_of(client).calls)[0] == 8
    behind = asyncio.create_task(client.request(b"behind"))
    await wire.run()
    assert {bytes(await task) for task in (*asking, behind)} == {b"!"}
    assert b"never" not in came
    assert b"behind" in came
    assert held_by(exchange_of(client).calls) == (0, 0, 0)
    await ended(wire, serving)


async def test_calls_in_line_end_with_the_connection_and_were_not_sent() -> None:
    wire = await narrow()

    async def handler(request: Request) -> bytes:
        return b"!"

    serving = await begun(wire, handler)
    client = wire.ends[0]
    asking = [asyncio.create_task(client.request(bytes([number]))) for number in range(8)]
    await settle()
    sent = client.stats.messages_sent
    wire.links[0].fail(ConnectionLostError(errno.ECONNRESET, "lost"))
    told = []
    for task in asking:
        with pytest.raises(ConnectionLostError) as caught:
            await task
        told.append(caught.value.request_sent)
    assert 0 < told.count(True) < 8
    assert told == sorted(told, reverse=True)
    assert client.stats.messages_sent == sent
    await wire.lose()
    serving.cancel()
    await asyncio.wait([serving])


@pytest.mark.parametrize("by", ["return", "reply"])
async def test_answers_wait_in_line(way: str, by: str) -> None:
    wire = await narrow()
    go = asyncio.Event()

    async def handler(request: Request) -> bytes | None:
        if not request.body:
            return b""
        await go.wait()
        if by == "return":
            return bytes(request.body)
        await request.reply(request.body)
        return None

    serving = await begun(wire, handler)
    bodies = [bytes([number]) * 100 for number in range(14)]
    asking = [asyncio.create_task(wire.ends[0].request(body)) for body in bodies]
    await wire.run()
    go.set()
    await settle()
    assert held_of(served_of(wire))[2] > 0, "an answer that is not sent counts"
    await wire.run()
    assert [bytes(await task) for task in asking] == bodies
    assert held_of(served_of(wire)) == NOTHING
    await ended(wire, serving)


async def test_an_answer_that_is_given_up_in_line(way: str) -> None:
    wire = await narrow()
    go = asyncio.Event()
    tasks: list[Any] = []

    async def handler(request: Request) -> bytes:
        if request.body:
            tasks.append(asyncio.current_task())
            await go.wait()
        return bytes(request.body)

    serving = await begun(wire, handler)
    asking = [asyncio.create_task(wire.ends[0].request(bytes([n]))) for n in range(12)]
    await wire.run()
    assert len(tasks) == 12
    go.set()
    await settle()
    tasks[11].cancel()
    await settle()
    await wire.run()
    for number, task in enumerate(asking[:11]):
        assert bytes(await task) == bytes([number])
    with pytest.raises(RequestError, match="gave up"):
        await asking[11]
    await wire.run()
    assert held_of(served_of(wire)) == NOTHING
    assert bytes(await answered(wire, b"again")) == b"again"
    await ended(wire, serving)


async def answered(wire: Wire, body: bytes) -> Message:
    asking = asyncio.create_task(wire.ends[0].request(body))
    await wire.run()
    return await asking


# Hostile and random peers


class Script:
    """A client that sends any frames, and a server whose handlers end when the script says so."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._going: dict[bytes, asyncio.Event] = {}
        self._last = 0
        self.log: list[Any] = []

    async def handle(self, request: Request) -> Any:
        body = bytes(request.body)
        go = self._going.setdefault(body, asyncio.Event())
        self.log.append(("begins", body))
        try:
            await go.wait()
        except asyncio.CancelledError:
            self.log.append(("canceled", body, request.canceled))
            raise
        finally:
            self._going.pop(body, None)
        kind = body[0] % 5
        if kind == 0:
            raise ValueError(body.hex())
        if kind == 1:
            await request.reply(body)
            return None
        return [b"", body, body * 3, None][kind - 1] if kind < 4 else bytearray(body)

    async def run(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        chance = self._random
        wire = await opened()
        client = Rude(wire, monkeypatch)
        serving = asyncio.create_task(
            handle_requests(
                wire.ends[1], self.handle, max_concurrent=chance.choice((1, 3, 100)),
                limit=chance.choice((2, 5, 300)), limit_bytes=chance.choice((1, 400, 1 << 20)),
            )
        )  # fmt: skip
        await settle()
        table = served_of(wire)
        for serial in range(chance.randrange(5, 80)):
            body = bytes([chance.randrange(256)]) + serial.to_bytes(2, "big") * chance.randrange(90)
            with contextlib.suppress(ConnectionLostError):
                await self._act(client, body)
            if chance.random() < 0.5:
                await wire.run()
                self.log.append(held_of(table))
        while self._going:
            for go in list(self._going.values()):
                go.set()
            await wire.run(3)
        self.log += [held_of(table), serving.done(), client.heard]
        serving.cancel()
        await wire.lose()
        await asyncio.wait([serving])
        self.log.append(serving.cancelled() or repr(serving.exception()))
        return self.log

    async def _act(self, client: Rude, body: bytes) -> None:
        chance = self._random
        number = chance.randrange(12 if chance.random() < 0.95 else 1 << 31)
        argument = chance.choice((0, 0, 10_000_000))
        match chance.choice(("ask",) * 8 + ("end",) * 5 + ("cancel", "large", "wrong")):
            case "ask":
                await client.send(frame(Kind.REQUEST, self._new(number), argument) + body)
            case "large":
                number = self._new(number)
                await client.send(frame(Kind.REQUEST, number, argument, 1))
                await client.send(body * 40, number)
            case "cancel":
                await client.send(frame(Kind.CANCEL, number))
            case "wrong" if chance.random() < 0.1:
                await client.send(bytes([0xA5, 1, chance.randrange(9), chance.randrange(4)]) * 4)
            case "end" if self._going:
                self._going[chance.choice(sorted(self._going))].set()

    def _new(self, number: int) -> int:
        """Mostly a number that was not used, so that a script gets far."""
        self._last += 1
        return 100 + self._last if self._random.random() < 0.9 else number


@pytest.mark.parametrize("wrong", ["twice", "more than 16"])
async def test_a_rude_peer_ends_its_connection(
    way: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await opened()
    client = Rude(wire, monkeypatch)
    begun: list[bytes] = []

    async def handler(request: Request) -> None:
        begun.append(bytes(request.body))
        await asyncio.Event().wait()

    serving = asyncio.create_task(handle_requests(wire.ends[1], handler, limit=16))
    for number in range(17 if wrong == "more than 16" else 3):
        await client.send(frame(Kind.REQUEST, min(number, 1) if wrong == "twice" else number))
        await wire.run()
    assert serving.done()
    with pytest.raises(ConnectionLostError, match=wrong):
        await serving
    assert len(begun) == (16 if wrong == "more than 16" else 2)
    await wire.lose()


class NoLease:
    """A budget that has nothing left."""

    def resize(self, size: int) -> bool:
        return False


async def test_requests_beyond_the_budget_are_refused(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await opened()
    serving = await begun(wire, _echo)
    table = served_of(wire)
    monkeypatch.setattr(table, "_lease", NoLease())
    table.set_lease(100, 0)
    assert bytes(await answered(wire, bytes(100))) == bytes(100)
    with pytest.raises(RequestRefusedError, match="take all the memory"):
        await answered(wire, bytes(101))
    assert held_of(table) == NOTHING
    await ended(wire, serving)


async def test_no_request_overtakes_those_that_wait(way: str) -> None:
    """One comes after room was made, and before the loop has those begin that wait."""
    wire = await opened()
    order: list[bytes] = []

    async def handler(request: Request) -> None:
        order.append(bytes(request.body))
        if order[-1] == b"1":
            await go.wait()
            await request.reply()
            wire.settle()  # brings the third
            wire.links[1].drain.deliver()

    go = asyncio.Event()
    serving = asyncio.create_task(handle_requests(wire.ends[1], handler, limit=1))
    client = wire.ends[0]
    await answered(wire, b"0")
    asking = [asyncio.create_task(client.request(b"1"))]
    await wire.run()
    exchange_of(client).calls.on_grant(16, 1 << 20)  # a client that does not keep to it
    asking.append(asyncio.create_task(client.request(b"2")))
    await wire.run()
    assert held_of(served_of(wire))[1] == 1
    asking.append(asyncio.create_task(client.request(b"3")))
    await settle()
    go.set()
    await wire.run()
    await asyncio.gather(*asking)
    assert order == [b"0", b"1", b"2", b"3"]
    await ended(wire, serving)


@pytest.mark.parametrize("seed", range(60))
async def test_c_does_what_python_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the peer sends: the same frames, in the same order, and the same counts."""
    monkeypatch.setattr("aiordma.service.requests._log.exception", lambda *_: None)
    with monkeypatch.context() as patched:
        in_c = await Script(seed).run(patched)
    with monkeypatch.context() as patched:
        leave_to_python(patched)
        in_python = await Script(seed).run(patched)
    assert in_c == in_python


# The collector, and memory that is out


async def test_the_collector_may_run_at_any_step_of_a_server() -> None:
    gc.collect()
    gc.freeze()
    with eager_collector():
        wire = await narrow()
        serving = await begun(wire, _echo)
        asking = [asyncio.create_task(wire.ends[0].request(bytes([n]))) for n in range(12)]
        await wire.run()
        assert [bytes(await task) for task in asking] == [bytes([n]) for n in range(12)]
        assert held_of(served_of(wire)) == NOTHING
        await ended(wire, serving)


@pytest.mark.one_loop
# Of a task for which there is no memory, and that of what is being deallocated then.
@pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", range(60))
async def test_a_server_whose_memory_is_out(number: int) -> None:
    """At each allocation while a request is delivered: it is served, or its connection ends."""
    asyncio.get_running_loop().set_debug(False)  # which allocates, too
    wire = await opened()
    serving = await begun(wire, _echo)
    table, link = served_of(wire), wire.links[1]
    asking = asyncio.create_task(wire.ends[0].request(b"??"))
    await settle()
    link.delivering = False
    link.land()
    link.process()
    link.delivering = True
    with contextlib.suppress(MemoryError, SystemError), no_memory_at(number):
        link.drain.deliver()
    await wire.run()
    if serving.done():
        await wire.lose()
        with pytest.raises(ConnectionLostError):
            await asking
        assert "cannot be read" in str(serving.exception())
        assert held_of(table)[:2] == (0, 0)
        return
    assert bytes(await asking) == b"??"
    assert held_of(table) == NOTHING
    await ended(wire, serving)


# The table alone


class Table(RequestTable):
    """What C calls of Python's subclass, noted."""

    def __init__(self, *_: Any) -> None:
        self.told: list[str] = []

    def _narrow(self) -> None:
        self.told.append("narrow")

    def _let_next(self) -> None:
        self.told.append("let next")


class Plain(PeerRequest):
    """A request that nobody hears of when it is dropped."""

    def _dropped(self) -> None:
        self._note_answered()

    _answer_for_the_program = _dropped


class Starter:
    """Begins with requests, or does not, as it was told."""

    def __init__(self, *begins: bool | BaseException) -> None:
        self._begins = list(begins)
        self.begun: list[Any] = []

    def begin(self, request: Any) -> bool:
        begins = self._begins.pop(0)
        if isinstance(begins, BaseException):
            raise begins
        if begins:
            self.begun.append(request)
        return begins


def a_table(requests: int = 2, size: int = 100) -> Table:
    return Table(Plain, requests, size, 1000)


def a_request(table: RequestTable, size: int = 10) -> Plain:
    return Plain(table, 1, None, Message(memoryview(bytes(size))))


def test_the_room_of_a_grant() -> None:
    table = a_table()
    assert table.has_room(1000), "one that is alone"
    table.note_taken()
    assert table.has_room(100)
    assert not table.has_room(101)
    table.note_taken()
    assert not table.has_room(0)
    table.set_grant(3, 50)
    assert (table.hard_limit, table.hard_bytes) == (3, 100)
    assert table.has_room(50)
    table.set_grant(1, 200)
    assert (table.limit, table.limit_bytes) == (1, 200)
    assert (table.hard_limit, table.hard_bytes) == (3, 200)


def test_what_is_done_lets_others_in() -> None:
    table = a_table()
    table.hold(70)
    table.note_taken()
    table.note_taken()
    table.set_lease(1000, 50)
    table.done(10)
    assert (table.taken, table.held, table.told) == (1, 60, [])
    table.queue[None] = None
    table.done(20)
    assert (table.taken, table.held, table.told) == (0, 40, ["narrow", "let next"])


def test_the_first_starter_that_may_begins() -> None:
    table = a_table()
    request = a_request(table)
    assert not table.begin(request)
    first, second = Starter(False, False), Starter(True)
    table.starters.extend((first, second))
    assert table.begin(request)
    assert request._starter is second
    assert (table.taken, first.begun, second.begun) == (1, [], [request])
    assert request._end() is False
    assert request._starter is None


def test_a_starter_that_raises() -> None:
    table = a_table()
    table.starters.append(Starter(KeyError("begin")))
    with pytest.raises(KeyError, match="begin"):
        table.begin(a_request(table))


def test_no_request_begins_beyond_the_grant() -> None:
    table = a_table(requests=1)
    table.starters.append(starter := Starter(True, True))
    assert table.begin(a_request(table))
    assert not table.begin(a_request(table))
    assert len(starter.begun) == 1


def test_a_request_without_a_connection_is_left_to_python() -> None:
    table = a_table()
    request = a_request(table)
    assert request._answer(b"!") == FOR_PYTHON
    assert not request._answered
    assert (request._number, request._size, request.deadline) == (1, 10, None)


def test_what_python_may_not_write() -> None:
    request = a_request(a_table())
    for name in ("body", "deadline", "_answered", "_canceled", "_number", "_size", "_served"):
        with pytest.raises(AttributeError):
            setattr(request, name, 1)


@pytest.mark.parametrize(
    "wrong", [(), (Plain,), (object, 1, 1, 1), (Plain, 1, 1, 1, 5), (5, 1, 1, 1)]
)
def test_a_table_of_other_things(wrong: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        RequestTable(*wrong)


def test_a_request_of_other_things() -> None:
    table = a_table()
    body = Message(memoryview(b"?"))
    for wrong in ((), (None, 1, None, body), (table, "1", None, body), (table, 1, None, b"?")):
        with pytest.raises(TypeError):
            Plain(*wrong)
    with pytest.raises(TypeError):
        table.begin(None)  # type: ignore[arg-type]


def test_a_request_that_is_dropped_is_told_once() -> None:
    told: list[int] = []

    class Told(PeerRequest):
        def _dropped(self) -> None:
            told.append(self._number)

    table = a_table()
    Told(table, 7, None, Message(memoryview(b"?")))
    assert told == [7]
    request = Told(table, 8, None, Message(memoryview(b"?")))
    request._note_answered()
    del request
    assert told == [7]
