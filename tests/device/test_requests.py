"""Requests and the pool, over a device: of all sizes, many at a time, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aiordma
import aiordma.metrics
from aiordma import ConnectionConfig, ListenerLimits
from tests.device.bad_arguments import (
    NO_BYTES,
    NO_DEADLINE,
    NO_INT_OR_NONE,
    STRIDED,
    Bad,
    no_mistakes,
)
from tests.device.meeting import Pair, paired, part
from tests.device.oracle import collect, until
from tests.device.request_server import answer_to, question
from tests.device.test_examples import first_line
from tests.forks import fork_quietly
from tests.inside.requests import exchange_of, held_by

pytestmark = pytest.mark.device

LIMIT_S = 60.0
NOTHING = (0, 0, 0)
SERVER = Path(__file__).with_name("request_server.py")


async def echo(request: aiordma.Request) -> aiordma.Message:
    return request.body


async def is_idle(connection: aiordma.Connection) -> None:
    """No number is taken."""
    calls = exchange_of(connection).calls
    await until(lambda: held_by(calls) == NOTHING, LIMIT_S)


@pytest.mark.smoke
async def test_requests_of_all_sizes(address: str) -> None:
    async with (
        aiordma.serve_requests(echo, address, 0) as server,
        aiordma.connect(address, server.port) as client,
    ):
        for size in (0, 1, 100, 5000, 5856, 5857, 6000, 70_000, 300_000, 3_000_000):
            data = random.Random(size).randbytes(size)
            with await client.request(data, timeout=LIMIT_S) as answer:
                assert answer == data
        await is_idle(client)


async def test_both_sides_ask_and_serve(pair: Pair) -> None:
    serving = [asyncio.create_task(aiordma.handle_requests(end, echo)) for end in pair]
    async with asyncio.timeout(LIMIT_S):
        blocks = [random.Random(n).randbytes(n * 700) for n in range(50)]
        answers = await asyncio.gather(*(end.request(b) for b in blocks for end in pair))
        assert [bytes(answer) for answer in answers] == [b for b in blocks for _ in pair]
        del answers
        await part(*pair)
        await asyncio.gather(*serving)


async def test_messages_and_requests_do_not_mix(pair: Pair) -> None:
    client, server = pair
    await client.send(b"before")
    receiving = asyncio.create_task(server.recv())
    assert await receiving == b"before"
    messages = aiter(server)
    waiting = asyncio.create_task(server.recv())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match=r"a task waits in recv\(\)"):
        server.requests()
    waiting.cancel()
    await asyncio.wait([waiting])
    requests = server.requests()
    asking = asyncio.create_task(client.request(b"?"))
    request = await anext(requests)
    for call in (server.recv, lambda: anext(messages), lambda: anext(server)):
        with pytest.raises(RuntimeError, match="carries requests"):
            await call()
    for end in pair:
        with pytest.raises(RuntimeError, match="carries requests"):
            await end.send(b"x")
    await request.reply(b"!")
    assert await asking == b"!"
    for limits in ({"limit": 0}, {"limit": 1 << 20}, {"limit_bytes": 0}):
        with pytest.raises(ValueError, match="limit"):
            server.requests(**limits)
    with pytest.raises(TypeError, match="limit"):
        server.requests(limit=True)
    async with server.expose(8, write=True) as region:
        await client.write(region, b"12345678")
        with pytest.raises(RuntimeError, match="carries requests"):
            await client.write(region, b"12345678", imm=1)


@pytest.mark.parametrize("timeout", [None, LIMIT_S])
async def test_a_request_that_is_canceled_before_its_first_step(
    pair: Pair, timeout: float | None
) -> None:
    """Requests are counted, so that one coroutine has another in it."""
    aiordma.metrics.snapshot()
    asking = asyncio.ensure_future(pair[0].request(b"?", timeout=timeout))
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    del asking
    gc.collect()


@pytest.mark.parametrize("imm", [None, 7, 1 << 31])
@pytest.mark.parametrize("size", [9, 300_000])
async def test_a_message_to_a_server_of_requests(address: str, size: int, imm: int | None) -> None:
    async with (
        aiordma.serve_requests(echo, address, 0) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        await client.send(bytes(size), imm)
        with pytest.raises(aiordma.ProtocolError, match="it takes requests there") as caught:
            await client.recv()
        assert "request()" in caught.value.hint


@pytest.mark.parametrize("size", [0, 10, 100_000])
@pytest.mark.parametrize("how", ["recv", "recv_into", "async for", "two tasks"])
async def test_a_request_to_a_server_of_messages(address: str, how: str, size: int) -> None:
    """`serve` in place of `serve_requests`: both sides are told."""
    told: list[BaseException] = []
    got: list[bytes] = []

    async def receive(connection: aiordma.Connection) -> None:
        try:
            if how == "recv_into":
                memory = bytearray(1 << 20)
                while True:
                    got.append(bytes(memory[: await connection.recv_into(memory)]))
            elif how == "async for":
                messages = aiter(connection)
                while True:
                    got.append(bytes(await anext(messages)))
            else:
                while True:
                    got.append(bytes(await connection.recv()))
        except aiordma.ConnectionLostError as exc:
            told.append(exc)
            raise

    async def serve(connection: aiordma.Connection) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(2 if how == "two tasks" else 1):
                group.create_task(receive(connection))

    async with (
        aiordma.serve(serve, address, 0) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        await client.send(b"before")
        with pytest.raises(aiordma.ProtocolError, match="receives messages there") as caught:
            await client.request(bytes(size))
        assert "serve_requests" in caught.value.hint
        await until(lambda: not server.connections, LIMIT_S)
    assert {str(exc) for exc in told} == {str(told[0])}
    assert "the peer uses requests" in str(told[0])
    assert got == [b"before"]


async def test_a_request_that_waits_for_requests(pair: Pair) -> None:
    """The program takes the last message, and then requests: the request waited behind it."""
    client, server = pair
    await client.send(b"a login")
    asking = asyncio.create_task(client.request(b"?", timeout=LIMIT_S))
    await until(lambda: held_by(exchange_of(client).calls)[0] == 1, LIMIT_S)
    await client.flush()
    assert await server.recv() == b"a login"
    request = await anext(server.requests())
    await request.reply(b"!")
    assert await asking == b"!"


async def test_the_words_of_an_error(pair: Pair) -> None:
    """Those of the peer's exception, also where a handler passes an error on."""

    class NoSuchKeyError(aiordma.RequestError):
        pass

    async def refuse(request: aiordma.Request) -> None:
        raise NoSuchKeyError("k")

    client, server = pair

    async def pass_on(request: aiordma.Request) -> aiordma.Message:
        return await client.request(request.body, timeout=LIMIT_S)

    serving = [
        asyncio.create_task(aiordma.handle_requests(*each))
        for each in ((server, refuse), (client, pass_on))
    ]
    with pytest.raises(aiordma.RequestError) as caught:
        await server.request(b"?", timeout=LIMIT_S)
    told = caught.value
    assert (str(told), told.remote_type, told.remote_text) == (
        "NoSuchKeyError: k", "NoSuchKeyError", "k",
    )  # fmt: skip
    await part(*pair)
    await asyncio.gather(*serving)


async def test_a_raw_connection_has_no_requests(address: str) -> None:
    async with paired(address, ConnectionConfig(raw=True)) as (client, server):
        for call in (lambda: client.request(b""), lambda: anext(server.requests())):
            with pytest.raises(aiordma.NotSupportedError):
                await call()
        await client.send(b"x")
        assert await server.recv() == b"x"


async def test_a_message_too_large_for_the_peer(address: str) -> None:
    small = ConnectionConfig(max_message_size=64 << 10)
    async with paired(address, small) as (client, server):
        requests = server.requests()
        with pytest.raises(aiordma.MessageTooLargeError):
            await client.request(bytes(1 << 20))
        asking = asyncio.create_task(client.request(bytes(64 << 10)))
        request = await anext(requests)
        with pytest.raises(aiordma.MessageTooLargeError):
            await request.reply(bytes(1 << 20))
        await request.reply(b"!")
        assert await asking == b"!"
        assert held_by(exchange_of(client).calls) == NOTHING


def serve_with(address: str, name: str, value: Any) -> None:
    aiordma.serve_requests(echo, address, 0, **{name: value})


async def test_g05_bad_arguments_take_nothing(address: str) -> None:
    no_limit = [*NO_INT_OR_NONE, 0, -1, 1 << 60]
    async with (
        aiordma.serve_requests(echo, address, 0) as server,
        aiordma.connect(address, server.port) as client,
        aiordma.Pool(address, server.port) as pool,
    ):

        async def works(name: str) -> None:
            assert await client.request(b"?", timeout=LIMIT_S) == b"?", name
            assert await pool.request(b"?", timeout=LIMIT_S) == b"?", name
            assert held_by(exchange_of(client).calls) == NOTHING, name

        await works("the test")
        with no_mistakes() as mistakes:
            table: list[Bad] = [
                ("request", client.request, [*NO_BYTES, STRIDED]),
                ("request(timeout)", lambda x: client.request(b"", timeout=x), NO_DEADLINE),
                ("requests(limit)", lambda x: client.requests(limit=x), no_limit),
                ("requests(limit_bytes)", lambda x: client.requests(limit_bytes=x), no_limit),
                ("handle_requests", lambda x: aiordma.handle_requests(x, echo), [None, 1, pool]),
                (
                    "handle_requests(handler)",
                    lambda x: aiordma.handle_requests(client, x),
                    [None, 1, b"handler"],
                ),
                (
                    "handle_requests(max_concurrent)",
                    lambda x: aiordma.handle_requests(client, echo, max_concurrent=x),
                    no_limit,
                ),
                ("pool.request", pool.request, [*NO_BYTES, STRIDED]),
                ("pool.request(timeout)", lambda x: pool.request(b"", timeout=x), NO_DEADLINE),
                ("pool.connection", pool.connection, NO_DEADLINE),
                ("pool.wait", pool.wait, NO_DEADLINE),
            ]
            await mistakes.of_waits(table, works)
            for name in ("max_concurrent", "limit", "limit_bytes"):
                for wrong in no_limit:
                    mistakes.of_call(
                        f"serve_requests({name})", partial(serve_with, address, name), wrong
                    )
        assert pool.stats.available == 1


async def test_a_handler_knows_who_asks(address: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[aiordma.Request] = []

    async def serve(request: aiordma.Request) -> bytes:
        seen.append(request)
        await request.reply(b"one")
        return b"two"  # which is logged

    async with (
        aiordma.serve_requests(serve, address, 0) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        assert await client.request(b"?") == b"one"
        (request,) = seen
        (connection,) = server.connections
        assert request.connection is connection
        assert request.peername == connection.get_extra_info("peername")
        host, port = client.get_extra_info("sockname")
        assert request.peername == (host, port)
        whose = f"of {host} port {port}"
        assert whose in repr(request)
        await until(lambda: "returned another answer" in caplog.text, LIMIT_S)
        (line,) = [each.message for each in caplog.records if each.levelno >= logging.ERROR]
        assert whose in line
        assert f"the handler {serve.__qualname__} has answered it" in line
        caplog.clear()
        del connection
    await until(lambda: not server.connections, LIMIT_S)
    seen.clear()


@pytest.mark.parametrize("call", ["serve_requests", "handle_requests"])
async def test_the_log_names_a_handler_whose_result_is_no_answer(
    address: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback ends in the library, as the handler has returned."""

    async def answering(_: aiordma.Request) -> Any:
        return {"a": "dict"}

    if call == "serve_requests":
        serving = aiordma.serve_requests(answering, address, 0)
    else:
        serving = aiordma.serve(lambda each: aiordma.handle_requests(each, answering), address, 0)
    async with (
        serving as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        with pytest.raises(aiordma.RequestError, match="dict") as caught:
            await client.request(b"?")
        assert caught.value.remote_type == "TypeError"
    (line,) = [each.message for each in caplog.records if each.levelno >= logging.ERROR]
    assert line.startswith(f"the handler {answering.__qualname__} of <Request ")


async def test_at_the_end_of_a_server_handlers_finish_or_are_refused(address: str) -> None:
    go_on = asyncio.Event()
    begun: list[bytes] = []

    async def serve(request: aiordma.Request) -> bytes:
        begun.append(bytes(request.body))
        await (go_on.wait() if request.body == b"short" else asyncio.Event().wait())
        return b"done"

    async with (
        aiordma.serve_requests(serve, address, 0, grace_s=1) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        asking = [asyncio.create_task(client.request(word)) for word in (b"short", b"long")]
        await until(lambda: len(begun) == 2, LIMIT_S)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        go_on.set()
        assert await asking[0] == b"done"
        with pytest.raises(aiordma.RequestError, match="the server stopped while it served"):
            await asking[1]
        await stopping
        with pytest.raises(aiordma.ConnectionLostError):
            await client.request(b"?")


@pytest.mark.parametrize("kind", ["requests", "messages"])
async def test_a_handler_that_awaits_what_is_canceled_has_raised(
    address: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own task is not canceled, and nothing stops."""

    async def fails(_: object) -> None:
        other = asyncio.create_task(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(other.cancel)
        await other

    async with contextlib.AsyncExitStack() as stack:
        serve = aiordma.serve_requests if kind == "requests" else aiordma.serve
        server = await stack.enter_async_context(serve(fails, address, 0))
        client = await stack.enter_async_context(aiordma.connect(address, server.port))
        async with asyncio.timeout(LIMIT_S):
            if kind == "requests":
                with pytest.raises(aiordma.RequestError) as told:
                    await client.request(b"?")
                assert told.value.remote_type == "CancelledError"
                assert "stopped" not in str(told.value)
            else:
                with pytest.raises(aiordma.ConnectionLostError):
                    await client.recv()
    assert "the handler " in caplog.text
    assert "has raised" in caplog.text


async def test_a_stopping_server_refuses_what_no_handler_has_begun_with(address: str) -> None:
    """However many wait or come late, each hears what has become of its request."""
    begun = 0

    async def serve(_: aiordma.Request) -> None:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    async with (
        aiordma.serve_requests(serve, address, 0, grace_s=0.5, max_concurrent=10) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        asking = [asyncio.create_task(client.request(b"?")) for _ in range(40)]
        await until(lambda: begun == 10 and client.stats.messages_sent >= 40, LIMIT_S)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        asking += [asyncio.create_task(client.request(b"late" * 50_000 * n)) for n in range(2)]
        ends = await asyncio.gather(*asking, return_exceptions=True)
        await stopping
    assert begun == 10
    kinds = Counter(type(end) for end in ends)
    assert kinds == {aiordma.RequestError: 10, aiordma.RequestRefusedError: 32}
    assert {str(end) for end in ends[:40] if isinstance(end, aiordma.RequestRefusedError)} == {
        "the server is stopping"
    }
    assert all(end.try_again for end in ends if isinstance(end, aiordma.RequestRefusedError))


async def test_a_client_that_goes_cancels_its_handlers(address: str) -> None:
    begun: list[aiordma.Request] = []
    canceled: list[bool] = []

    async def serve(request: aiordma.Request) -> None:
        begun.append(request)
        try:
            await asyncio.Event().wait()
        finally:
            canceled.append(request.canceled)

    async with aiordma.serve_requests(serve, address, 0) as server:
        client = await aiordma.connect(address, server.port)
        asking = [asyncio.create_task(client.request(b"?")) for _ in range(3)]
        await until(lambda: len(begun) == 3, LIMIT_S)
        client.abort()
        for task in asking:
            with pytest.raises(aiordma.ResourceClosedError):
                await task
        await client.wait_closed()
        await until(lambda: not server.connections, LIMIT_S)
    assert canceled == [True] * 3
    with pytest.raises(RuntimeError, match="answered before"):  # the helper has given it up
        await begun.pop().reply()
    begun.clear()


async def test_a_closed_connection_leaves_no_cycle(address: str) -> None:
    """It is gone with its last reference, and not when the collector runs."""

    async def serve(request: aiordma.Request) -> aiordma.Message:
        if bytes(request.body) == b"late":  # an answer can be here before the shortest time is over
            await asyncio.Event().wait()
        return await echo(request)

    async with aiordma.serve_requests(serve, address, 0) as server:
        collect()
        gc.disable()
        try:
            client = await aiordma.connect(address, server.port)
            for size in (10, 100_000):
                assert await client.request(bytes(size)) == bytes(size)
            with pytest.raises(TimeoutError):
                await client.request(b"late", timeout=1e-9)
            asking = asyncio.create_task(client.request(b"?"))
            await asyncio.sleep(0)
            await client.close()
            await asyncio.wait([asking])
            assert isinstance(asking.exception(), aiordma.ResourceClosedError)
            with pytest.raises(aiordma.ResourceClosedError):
                await client.request(b"?")
            with pytest.raises(aiordma.ResourceClosedError):
                await client.send(b"?")
            alive = weakref.ref(client)
            del client, asking
            await until(lambda: alive() is None, LIMIT_S)
        finally:
            gc.enable()


# The whole thing


def start(address: str, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(SERVER), address, str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    line = first_line(process)
    if not line.strip().isdecimal():
        process.kill()
        out, err = process.communicate()
        raise AssertionError(line + out + err)
    return process, int(line)


def size_of(rng: random.Random) -> int:
    """1 byte to 300 KiB, mostly small."""
    return int(300 * 1024 ** (rng.random() ** 4)) if rng.random() < 0.1 else rng.randint(1, 2000)


async def ask(rng: random.Random, request: Any, outcomes: Counter[str]) -> None:
    """A request, perhaps canceled, or with a short time; its answer is right, or an error."""
    seed, size = rng.getrandbits(32), size_of(rng)
    mood = rng.random()
    wait_s = rng.choice([0.05, 0.2]) if mood < 0.1 else 0.0
    asked = question(seed, -1 if mood > 0.98 else size, wait_s, size_of(rng))
    timeout = rng.uniform(0.001, 0.1) if rng.random() < 0.1 else LIMIT_S
    task = asyncio.ensure_future(request(asked, timeout=timeout))
    if rng.random() < 0.1:
        task.get_loop().call_later(rng.uniform(0, 0.1), task.cancel)
    await asyncio.wait([task])
    if task.cancelled():
        outcomes["canceled"] += 1
    elif (exc := task.exception()) is None:
        with task.result() as answer:
            assert answer == answer_to(seed, size)
        outcomes["right"] += 1
    elif isinstance(exc, TimeoutError):
        assert timeout < LIMIT_S, f"nothing came for {LIMIT_S} s"
        outcomes["late"] += 1
    else:
        outcomes[type(exc).__name__] += 1
        if type(exc) is aiordma.RequestError:
            assert (exc.remote_type, mood > 0.98) == ("ValueError", True)
        else:
            assert isinstance(exc, aiordma.ConnectionLostError)


async def storm(request: Any, count: int, seed: int) -> Counter[str]:
    """So many requests from 100 tasks."""
    print("seed", seed)
    outcomes: Counter[str] = Counter()

    async def caller(number: int) -> None:
        rng = random.Random(seed + number)
        for _ in range(count // 100):
            await ask(rng, request, outcomes)

    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(caller(number))
    print(dict(outcomes))
    assert outcomes.total() == count
    return outcomes


def any_seed() -> int:
    """Of the environment, to repeat a run."""
    return int(os.environ.get("AIORDMA_SEED", random.getrandbits(32)))


async def more_than(pool: aiordma.Pool, counter: str, number: float) -> None:
    await until(lambda: getattr(pool.stats, counter) > number, LIMIT_S)


@pytest.mark.parametrize(
    ("count", "kills"),
    [(1000, 1), pytest.param(10_000, 2, marks=[pytest.mark.slow, pytest.mark.one_device])],
)
async def test_a_pool_recovers_from_a_killed_server(address: str, count: int, kills: int) -> None:
    asyncio.get_running_loop().set_debug(False)
    process, port = await asyncio.to_thread(start, address)
    try:
        async with aiordma.Pool(address, port, max_size=4, max_pause=0.5) as pool:
            await pool.wait()
            storming = asyncio.create_task(storm(pool.request, count, any_seed()))
            for kill in range(kills):
                asked = count * (kill + 1) / (kills + 2)
                await more_than(pool, "requests", asked)
                lost = pool.stats.lost
                process.kill()
                await asyncio.to_thread(process.communicate)
                await more_than(pool, "lost", lost)
                process, _ = await asyncio.to_thread(start, address, port)
            outcomes = await storming
            assert outcomes["right"] > count / 2
            # After that there are connections and answers as before.
            await pool.wait(LIMIT_S)
            answer = await pool.request(question(7, 99, 0, 0), timeout=LIMIT_S)
            assert answer == answer_to(7, 99)
            stats = pool.stats
            print(stats)
            assert stats.lost >= kills
            assert stats.reconnects
            assert stats.waiting == 0
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
            assert (process.returncode, out) == (0, "")
            # Handlers have raised on purpose, which is logged, and nothing else.
            assert err.count("Traceback") == err.count("the handler ")
    finally:
        process.kill()
        process.communicate()


async def test_a_pool_whose_server_limits_it(address: str) -> None:
    """The server takes two connections; the pool works with these."""
    limits = ListenerLimits(max_connections=2)
    async with aiordma.serve_requests(echo, address, 0, limits=limits) as server:
        pool = aiordma.Pool(address, server.port, min_size=0, max_size=4, timeout=LIMIT_S)
        async with pool:
            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(lend(pool))
            assert pool.stats.size <= 2


async def lend(pool: aiordma.Pool) -> None:
    async with pool.connection() as connection:
        assert await connection.request(b"?", timeout=LIMIT_S) == b"?"


async def test_a_pool_in_a_forked_child(address: str) -> None:
    async with (
        aiordma.serve_requests(echo, address, 0) as server,
        aiordma.Pool(address, server.port) as pool,
    ):
        assert await pool.request(b"?") == b"?"
        pid = fork_quietly()
        if not pid:
            try:
                for use in (lambda: pool.stats, lambda: pool.request(b"?"), pool.connection):
                    try:
                        use()
                    except aiordma.ForkedError:
                        continue
                    os._exit(1)
                os._exit(0)
            finally:
                os._exit(2)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await pool.request(b"?") == b"?"
