"""serve(): a handler for each connection, and an end in good order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import aiordma
from tests.device.oracle import until
from tests.device.test_examples import first_line

pytestmark = pytest.mark.device

LIMIT_S = 30.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "server.py"


async def echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def ask(connection: aiordma.Connection, question: bytes = b"?") -> bytes:
    async with asyncio.timeout(LIMIT_S):
        await connection.send(question)
        return bytes(await connection.recv())


async def test_each_connection_has_a_handler(address: str) -> None:
    async with aiordma.serve(echo, address, 0) as server:
        assert server.port == server.sockname[1] == server.listener.port
        assert server.socknames == [server.sockname] == [(address, server.port)]
        clients = [await aiordma.connect(address, server.port) for _ in range(5)]
        assert [await ask(client, b"%d" % n) for n, client in enumerate(clients)] == [
            b"%d" % n for n in range(5)
        ]
        assert len(server.connections) == 5
        await asyncio.gather(*(client.close() for client in clients))
        await until(lambda: not server.connections, LIMIT_S)
        assert repr(server) == f"<Server at {address} port {server.port}, 0 connections>"
    assert repr(server) == "<Server closed, 0 connections>"
    with pytest.raises(OSError, match=r"."):
        await aiordma.connect(address, server.port)


async def test_awaited_it_is_a_server_too(address: str) -> None:
    server = await aiordma.serve(echo, address, 0)
    async with aiordma.connect(address, server.port) as client:
        assert await ask(client) == b"?"
    await server.stop()
    await server.stop()


async def test_a_handler_that_raises_harms_no_other_connection(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(connection: aiordma.Connection) -> None:
        async for message in connection:
            if message == b"raise":
                raise ZeroDivisionError("of the program")
            await connection.send(message)

    async with (
        aiordma.serve(handler, address, 0) as server,
        aiordma.connect(address, server.port) as good,
        aiordma.connect(address, server.port) as bad,
    ):
        await bad.send(b"raise")
        said = "the peer aborted the connection: its program raised ZeroDivisionError$"
        with pytest.raises(aiordma.ConnectionLostError, match=said):
            await bad.recv()
        assert await ask(good) == b"?"
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert ["of the program" in str(record.exc_info) for record in errors] == [True]
    assert f"the handler {handler.__qualname__} of <Connection" in errors[0].message


@pytest.mark.parametrize("aborts", [True, False], ids=["aborts", "closes"])
async def test_a_client_that_goes_is_no_error(
    address: str, caplog: pytest.LogCaptureFixture, *, aborts: bool
) -> None:
    async def handler(connection: aiordma.Connection) -> None:
        while True:
            await connection.recv()

    caplog.set_level(logging.INFO, "aiordma.listener")
    async with aiordma.serve(handler, address, 0) as server:
        client = await aiordma.connect(address, server.port)
        await until(lambda: bool(server.connections), LIMIT_S)
        if aborts:
            client.abort()
        else:
            await client.close()
        await client.wait_closed()
        await until(lambda: not server.connections, LIMIT_S)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    told = [each for each in map(logging.LogRecord.getMessage, caplog.records) if "abort" in each]
    assert [each.count("the peer aborted the connection") for each in told] == [1] * aborts


async def test_at_the_end_idle_handlers_end_and_busy_ones_answer(address: str) -> None:
    ended: list[str] = []
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def handler(connection: aiordma.Connection) -> None:
        try:
            async for message in connection:
                asked.set()
                await go_on.wait()
                await connection.send(message)
        finally:
            ended.append((connection.is_closing() and "closed") or "open")

    async with (
        aiordma.serve(handler, address, 0) as server,
        aiordma.connect(address, server.port) as idle,
        aiordma.connect(address, server.port) as busy,
    ):
        await busy.send(b"question")
        await asyncio.wait_for(asked.wait(), LIMIT_S)
        await until(lambda: len(server.connections) == 2, LIMIT_S)
        stopping = asyncio.create_task(server.stop())
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(aiordma.ConnectionEndedError):
                await idle.recv()
            assert not stopping.done()
            go_on.set()
            assert bytes(await busy.recv()) == b"question"
            with pytest.raises(aiordma.ConnectionEndedError):
                await busy.recv()
            await stopping
    assert ended == ["open", "open"], "their connections were closed by the server behind them"


async def test_what_has_arrived_is_still_received(address: str) -> None:
    begun, go_on, got = asyncio.Event(), asyncio.Event(), list[bytes]()

    async def handler(connection: aiordma.Connection) -> None:
        begun.set()
        await go_on.wait()
        async for message in connection:
            got.append(bytes(message))

    async with (
        aiordma.serve(handler, address, 0) as server,
        aiordma.connect(address, server.port) as client,
    ):
        await begun.wait()
        for number in range(3):
            await client.send(b"%d" % number)
        await client.flush()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        go_on.set()
        async with asyncio.timeout(LIMIT_S):
            await stopping
    assert got == [b"0", b"1", b"2"]


async def test_handlers_that_do_not_finish_are_canceled(address: str) -> None:
    canceled = asyncio.Event()

    async def handler(_: aiordma.Connection) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            canceled.set()
            raise

    async with (
        aiordma.serve(handler, address, 0, grace_s=0.1) as server,
        aiordma.connect(address, server.port) as client,
    ):
        await until(lambda: bool(server.connections), LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            await server.stop()
            assert canceled.is_set()
            with pytest.raises(aiordma.ConnectionLostError):
                await client.recv()


async def test_a_canceled_end_cancels_the_handlers(address: str) -> None:
    async with (
        aiordma.serve(lambda _: asyncio.Event().wait(), address, 0, grace_s=3600) as server,
        aiordma.connect(address, server.port) as client,
    ):
        await until(lambda: bool(server.connections), LIMIT_S)
        forever = asyncio.create_task(server.serve_forever(signals=False))
        await asyncio.sleep(0)
        forever.cancel()
        await asyncio.sleep(0)
        assert not forever.done()
        forever.cancel()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([forever])
            assert forever.cancelled()
            with pytest.raises(aiordma.ConnectionLostError):
                await client.recv()


async def test_wait_closed_waits_for_the_end_of_each_handler(address: str) -> None:
    server = await aiordma.serve(echo, address, 0)
    port = server.port
    waits = [asyncio.create_task(server.wait_closed()) for _ in range(2)]
    async with aiordma.connect(address, port) as client:
        assert await ask(client) == b"?"
        assert not any(wait.done() for wait in waits)  # as long as it is open
        server.close()
        assert await ask(client) == b"?"  # it ends no handler
        waits.pop().cancel()
        assert not waits[0].done()
    async with asyncio.timeout(LIMIT_S):
        await waits[0]
        await server.wait_closed()
    assert not server.connections
    async with aiordma.serve(echo, address, port) as again:
        assert again.port == port
    await again.wait_closed()


async def test_close_ends_serve_forever_and_waits_for_handlers(address: str) -> None:
    async with aiordma.serve(echo, address, 0) as server:
        forever = asyncio.create_task(server.serve_forever(signals=False))
        async with aiordma.connect(address, server.port) as client:
            assert await ask(client) == b"?"
            server.close()
            async with asyncio.timeout(LIMIT_S):
                await forever
            with pytest.raises(aiordma.ConnectionEndedError):
                await client.recv()


async def test_a_handler_that_is_no_coroutine_function_is_told(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of connections and of requests; a function that returns a coroutine is as good as one."""

    def handler(_: Any) -> None:
        return None

    wrong: Any = handler
    async with (
        aiordma.serve(wrong, address, 0) as server,
        aiordma.connect(address, server.port) as client,
    ):
        with pytest.raises(aiordma.ConnectionLostError, match="peer aborted"):
            await client.recv()
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "has to be a coroutine function (`async def`)" in str(record.exc_info)
    async with (
        aiordma.serve_requests(wrong, address, 0) as server,
        aiordma.connect(address, server.port) as client,
    ):
        with pytest.raises(aiordma.RequestError, match="has to be a coroutine function"):
            await client.request(b"?")
    async with (
        aiordma.serve(lambda connection: echo(connection), address, 0) as server,
        aiordma.connect(address, server.port) as client,
    ):
        assert await ask(client) == b"?"


@pytest.mark.parametrize(
    ("handler", "options", "error", "text"),
    [
        (None, {}, TypeError, "the handler has to be a function"),
        (echo, {"grace_s": -1}, ValueError, "grace_s -1 is negative"),
        (echo, {"grace_s": None}, TypeError, "grace_s has to be a number"),
        (echo, {"config": 1}, TypeError, "config"),
        (echo, {"backlog": 1.5}, TypeError, "backlog"),
    ],
)
async def test_bad_arguments_are_refused_at_the_call(
    address: str, handler: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        aiordma.serve(handler, address, 0, **options)


@pytest.mark.program
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_example_in_good_order(address: str, number: signal.Signals) -> None:
    """With an idle client, which gets the end; and nothing is printed."""
    # Without asyncio's debug mode, which prints how long a callback takes on a busy machine.
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    async def client() -> float:
        async with aiordma.connect(address, 18515) as connection:
            assert await ask(connection) == b"?"
            process.send_signal(number)
            begun = time.monotonic()
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(aiordma.ConnectionEndedError):
                    await connection.recv()
            return time.monotonic() - begun

    try:
        assert first_line(process) == "listening on 0.0.0.0 18515\n"
        took = asyncio.run(client())
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "", "")
    print(f"{took:.2f} s")


# Runs a program, and sends it a signal in the very call that tells its address.
TOLD = """
import builtins, runpy, signal, sys
from aiordma.cli.lines import LineWriter

def hook(owner, name, index):
    real = getattr(owner, name)

    def tell(*words, **options):
        real(*words, **options)
        if str(words[index]).startswith(("listening", "serving")):
            signal.raise_signal(NUMBER)

    setattr(owner, name, tell)

hook(builtins, "print", 0)
hook(LineWriter, "put", 1)
del sys.argv[0]
run = runpy.run_module if sys.argv[0] == "aiordma" else runpy.run_path
run(sys.argv[0], run_name="__main__", **({"alter_sys": True} if run is runpy.run_module else {}))
"""
TELLING = (
    ("server.py", "ADDRESS", "0"),
    ("rpc.py", "server", "ADDRESS", "0"),
    ("kv.py", "serve", "--host", "ADDRESS", "--port", "0"),
    ("copy_file.py", "receive", "--host", "ADDRESS", "--port", "0"),
    ("parameter_server.py", "serve", "--host", "ADDRESS", "--port", "0"),
    ("aiohttp_hello.py", "server", "ADDRESS", "0"),
    ("aiordma", "echo", "--host", "ADDRESS", "--port", "0"),
    ("aiordma", "serve", "FOLDER", "--host", "ADDRESS", "--port", "0"),
)


@pytest.mark.program
@pytest.mark.parametrize("words", TELLING, ids=lambda words: " ".join(words[:2]))
def test_a_server_that_has_told_its_address_ends_in_good_order(
    address: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    name, *rest = (
        word.replace("ADDRESS", address).replace("FOLDER", str(tmp_path)) for word in words
    )
    program = name if name == "aiordma" else str(EXAMPLE.with_name(name))
    for number in (signal.SIGINT, signal.SIGTERM):
        told = TOLD.replace("NUMBER", str(int(number)))
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", told, program, *rest],
            capture_output=True, check=False, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert len(done.stdout.splitlines()) == 1


async def test_signals_are_heeded_until_the_server_has_stopped(address: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    begun = asyncio.Event()

    async def slow(conn: aiordma.Connection) -> None:
        begun.set()
        await asyncio.sleep(3600)

    async with asyncio.timeout(LIMIT_S), aiordma.serve(slow, address, 0, signals=True) as server:

        async def signals() -> None:
            async with aiordma.connect(address, server.port) as client:
                await client.send(b"x")
                await begun.wait()
                signal.raise_signal(signal.SIGTERM)
                await until(lambda: repr(server).startswith("<Server closed"))
                assert server.connections
                signal.raise_signal(signal.SIGINT)  # the second cancels the handler
                await client.wait_closed()

        signaling = asyncio.create_task(signals())
        await server.serve_forever()
        await signaling
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert after == before


#: A program of a user, without logging, and two kinds of handlers that do not end.
SERVING = """
import asyncio, sys, aiordma

async def handle(_):
    {handle}

async def main():
    serve = getattr(aiordma, sys.argv[1])
    async with serve(handle, sys.argv[2], 0, signals=True) as server:
        print(server.port, flush=True)
        await server.serve_forever()

if sys.argv[3] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""
WAITING = SERVING.format(handle='print("waits", flush=True)\n    await asyncio.Event().wait()')


@pytest.mark.program
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("call", ["serve", "serve_requests"])
async def test_ctrl_c_while_a_handler_waits(address: str, call: str, loop: str) -> None:
    """The first tells what is waited for, without a log; the second ends it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", WAITING, call, address, loop,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            port = int(await process.stdout.readline())
            async with aiordma.connect(address, port) as client:
                asking = asyncio.ensure_future(
                    client.request(b"?") if call == "serve_requests" else client.recv()
                )
                assert await process.stdout.readline() == b"waits\n"
                process.send_signal(signal.SIGINT)
                began = time.monotonic()
                line = (await process.stderr.readline()).decode()
                # 9 s, and less on a busy machine.
                assert re.fullmatch(
                    r"the server stops, and waits up to \d(\.\d+)? s for the handlers of "
                    r"1 connection; a second Ctrl-C cancels them at once\n",
                    line,
                )
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 0
                assert time.monotonic() - began < 9, "it has waited for grace_s"
                with pytest.raises(aiordma.RdmaError):
                    await asking
                assert await process.stderr.read() == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


#: A program whose handler never lets the loop run.
BUSY = SERVING.format(handle='print("busy", flush=True)\n    while True: pass')


@pytest.mark.program
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", ["serve", "serve_requests"])
async def test_signals_end_a_handler_that_never_yields(
    address: str, call: str, number: signal.Signals, loop: str
) -> None:
    """As without a server; where Ctrl-C has stopped the handler, the server may end by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", BUSY, call, address, loop,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            port = int(await process.stdout.readline())
            async with aiordma.connect(address, port) as client:
                asking = asyncio.ensure_future(
                    client.request(b"?") if call == "serve_requests" else client.recv()
                )
                assert await process.stdout.readline() == b"busy\n"
                for _ in range(10):  # as somebody who presses Ctrl-C until it helps
                    process.send_signal(number)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), 1)
                        break
                told = await process.stderr.read()
                by_itself = b"Ctrl-C has interrupted the handler handle of <Connection" in told
                assert by_itself <= (number == signal.SIGINT and call == "serve")
                assert await process.wait() in ({0, -number} if by_itself else {-number})
                with pytest.raises(aiordma.RdmaError):
                    await asking
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


#: A program that publishes in the block, until a signal.  Its handlers wait for their peers.
PUBLISHING = """
import asyncio, signal, sys, aiordma

async def main():
    subscribers = aiordma.Broadcast()

    async def subscribe(conn):
        subscribers.add(conn)
        async for _ in conn:
            pass

    async with aiordma.serve(subscribe, sys.argv[1], 0, signals=True) as server:
        print(server.port, flush=True)
        try:
            while True:
                await subscribers.send(b"tick")
                await asyncio.sleep(0.01)
        finally:
            print("the block ends", flush=True)
            if sys.argv[3] == "stubborn":
                await asyncio.Event().wait()
    print("behind the block", flush=True)

if sys.argv[2] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.program
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["willing", "stubborn"])
async def test_a_signal_ends_a_publisher(
    address: str, kind: str, number: signal.Signals, loop: str
) -> None:
    """It waits in its block, and calls no serve_forever(); subscribers see the end.

    The last step of a stubborn block waits for ever, until a second signal, which cancels the
    handlers, too.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", PUBLISHING, address, loop, kind,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            port = int(await process.stdout.readline())
            async with aiordma.connect(address, port) as client:
                assert bytes(await client.recv()) == b"tick"
                process.send_signal(number)
                assert await process.stdout.readline() == b"the block ends\n"
                cut: Any = contextlib.nullcontext()
                if kind == "stubborn":
                    process.send_signal(number)
                    cut = pytest.raises(aiordma.ConnectionLostError, match="aborted")
                with cut:
                    async for message in client:
                        assert bytes(message) == b"tick"
            assert await process.stdout.read() == b"behind the block\n"
            assert await process.stderr.read() == b""
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("result", [b"an answer", "text", None, 5])
async def test_a_result_that_is_meant_as_an_answer_is_logged(
    address: str, result: object, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(connection: aiordma.Connection) -> object:
        (await connection.recv()).release()
        return result

    async with (
        aiordma.serve(handler, address, 0) as server,
        aiordma.connect(address, server.port) as client,
    ):
        await client.send(b"?")
        with pytest.raises(aiordma.ConnectionEndedError):
            await client.recv()
    errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    if result in {None, 5}:
        assert not errors
    else:
        (error,) = errors
        assert error.startswith(f"the handler {handler.__qualname__} of <Connection ")
        assert f"has returned a {type(result).__name__}, which is sent to nobody" in error


def test_a_call_that_is_not_awaited_warns_once_and_by_its_name(
    address: str, recwarn: pytest.WarningsRecorder
) -> None:
    async def main() -> None:
        aiordma.serve(echo, address, 0)
        aiordma.serve_requests(echo, address, 0)  # type: ignore[arg-type]
        aiordma.listen(address, 0)
        aiordma.connect(address, 1)
        server = await aiordma.serve(echo, address, 0)
        client = await aiordma.connect(address, server.port)
        client.request(b"?")  # type: ignore[unused-coroutine]
        client.request(b"?", timeout=1)  # type: ignore[unused-coroutine]
        client.request(b"?", into=bytearray(1))  # type: ignore[unused-coroutine]
        await client.close()
        await server.stop()
        gc.collect()

    asyncio.run(main())
    names = [str(each.message).split("'")[1] for each in recwarn]
    assert names == ["serve", "serve", "listen", "connect", *["Connection.request"] * 3]
