"""A program may end at any moment: no task is destroyed while pending, nothing warns or leaks.

Each run is a program of its own, under `asyncio.Runner`, which is what `asyncio.run` is:
connections and streams in every state, and an end at a moment that the seed chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

import pytest

import aiordma
from aiordma.loop.workers import reaper
from tests.device.oracle import Connecting, adapter_objects, collect, rdma_descriptors
from tests.inside.loop import all_done, default_pool

pytestmark = pytest.mark.device

#: For each of four ways to end, on each loop: 200 in all.
MOMENTS = {"rxe": 16, "siw": 9}
#: Seconds; the program has come to a steady state before.
LATEST_S = 0.06
LARGE = 400_000
CONNECT_S = 20


class Failed(Exception):
    """What a task of the program fails with."""


Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Program:
    """Connections in every state, each the work of a task of its own."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.address = address
        self.rng = rng

    async def run(self, spawn: Spawn, at_the_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with aiordma.listen(self.address, 0) as listener:
            # Not with `async with`, which waits for the clients.
            server = await aiordma.start_server(self.echo_stream, self.address, 0)
            try:
                self.port = listener.port
                self.stream_port = server.sockets[0].getsockname()[1]
                spawn(self.accept(listener, spawn))
                work = [
                    self.idle, self.chat, self.large, self.visit, self.stream, self.visit_stream,
                ]  # fmt: skip
                self.rng.shuffle(work)
                for function in work:
                    spawn(self.quiet(function()))
                await asyncio.sleep(self.rng.uniform(0, LATEST_S))
                await at_the_end()
            finally:
                server.close()

    async def quiet(self, work: Coroutine[Any, Any, None]) -> None:
        """Once the listener is closed, a client is refused or cut off."""
        with contextlib.suppress(OSError, EOFError):
            await work

    async def accept(self, listener: aiordma.Listener, spawn: Spawn) -> None:
        async for connection in listener:
            spawn(self.echo(connection))

    async def echo(self, connection: aiordma.Connection) -> None:
        with contextlib.suppress(ConnectionError):
            async with connection:
                async for message in connection:
                    await connection.send(bytes(message)[:20] if len(message) > 64 else message)

    async def idle(self) -> None:
        async with aiordma.connect(self.address, self.port, timeout=CONNECT_S) as connection:
            await connection.recv()

    async def chat(self) -> None:
        async with aiordma.connect(self.address, self.port, timeout=CONNECT_S) as connection:
            while True:
                await connection.send(b"x")
                await connection.recv()

    async def large(self) -> None:
        async with aiordma.connect(self.address, self.port, timeout=CONNECT_S) as connection:
            while True:
                await connection.send(bytes(LARGE))
                (await connection.recv()).release()

    async def visit(self) -> None:
        """Connecting, greeting, closing, by turns."""
        while True:
            async with aiordma.connect(self.address, self.port, timeout=CONNECT_S) as connection:
                await connection.send(b"x")

    async def echo_stream(self, reader: Any, writer: Any) -> None:
        try:
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass  # asyncio's StreamReaderProtocol takes a canceled handler for a failed one
        finally:
            writer.close()

    async def stream(self) -> None:
        reader, writer = await aiordma.open_connection(self.address, self.stream_port)
        try:
            while True:
                writer.write(bytes(5000))
                await writer.drain()
                await reader.readexactly(5000)
        finally:
            writer.close()

    async def visit_stream(self) -> None:
        while True:
            reader, writer = await aiordma.open_connection(self.address, self.stream_port)
            try:
                writer.write(b"x")
                await reader.readexactly(1)
            finally:
                writer.close()


async def by_return(program: Program) -> None:
    tasks: set[asyncio.Task[None]] = set()
    await program.run(lambda work: tasks.add(asyncio.create_task(work)), _nothing)


async def by_exception(program: Program) -> None:
    tasks: set[asyncio.Task[None]] = set()
    await program.run(lambda work: tasks.add(asyncio.create_task(work)), _fail)


async def by_interrupt(program: Program) -> None:
    tasks: set[asyncio.Task[None]] = set()
    await program.run(lambda work: tasks.add(asyncio.create_task(work)), _interrupt)


async def by_task_group(program: Program) -> None:
    async with asyncio.TaskGroup() as group:
        await program.run(group.create_task, _fail_in(group))


async def _nothing() -> None:
    """Main returns."""


async def _fail() -> None:
    raise Failed


async def _interrupt() -> None:
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
    await asyncio.sleep(60)


def _fail_in(group: asyncio.TaskGroup) -> Callable[[], Coroutine[Any, Any, None]]:
    async def fail() -> None:
        group.create_task(_fail())
        await asyncio.sleep(60)

    return fail


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Warnings, what is logged as one, and what nobody could raise."""
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(self.format(record))

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        seen.append(f"{category.__name__}: {message}")

    handler = Handler(logging.WARNING)
    logging.getLogger().addHandler(handler)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: seen.append(repr(unraisable))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield seen
    finally:
        sys.unraisablehook = hook
        logging.getLogger().removeHandler(handler)


#: Each with what leaves `asyncio.run`; made anew each time, because it keeps what was raised.
ENDS: dict[Any, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    by_return: contextlib.nullcontext,
    by_exception: lambda: pytest.raises(Failed),
    by_interrupt: lambda: pytest.raises(KeyboardInterrupt),
    by_task_group: lambda: pytest.raises(ExceptionGroup),
}


def _run(
    new_loop: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a02_a_program_ends_at_any_moment(
    address: str, is_siw: bool, new_loop: Callable[[], asyncio.AbstractEventLoop], end: Any
) -> None:
    seed = time.time_ns() % 1_000_000
    print("seed", seed)
    objects, descriptors = adapter_objects(), rdma_descriptors()
    for number in range(MOMENTS["siw" if is_siw else "rxe"]):
        rng = random.Random(seed + number)
        connects = Connecting()
        with watched() as seen:
            with ENDS[end]():
                _run(new_loop, end(Program(address, rng)))
            connects.let_go()
            collect()
            for _ in range(2):
                assert all_done(default_pool(), 20)
                assert all_done(reaper, 20)
        assert not seen, (seed + number, seen)
        assert adapter_objects() == objects, seed + number
        assert rdma_descriptors() == descriptors, seed + number


async def _serve(address: str, ports: dict[str, int], ready: threading.Event) -> None:
    """Answer in upper case until the peers are gone: a client by a stream, one by messages."""
    gone = [asyncio.Event(), asyncio.Event()]

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.upper())
        writer.close()
        gone[0].set()

    async def messages(connection: aiordma.Connection) -> None:
        try:
            async for message in connection:
                await connection.send(bytes(message).upper())
        finally:  # a block that a generator leaves at its end is left by an exception
            gone[1].set()

    async with (
        await aiordma.start_server(stream, address, 0) as streams,
        aiordma.serve(messages, address, 0) as server,
    ):
        ports |= {"streams": streams.sockets[0].getsockname()[1], "messages": server.port}
        ready.set()
        for each in gone:
            await each.wait()


def test_generators_of_a_program_that_ends_may_still_ask(
    address: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The loop closes them when all tasks have ended, and the peers still hear and answer."""
    said: list[bytes] = []
    ports: dict[str, int] = {}
    ready = threading.Event()

    async def by_stream() -> AsyncGenerator[bytes, None]:
        reader, writer = await aiordma.open_connection(address, ports["streams"])
        try:
            while True:
                writer.write(b"next\n")
                yield await reader.readline()
        finally:
            writer.write(b"quit\n")
            said.append(await reader.readline())
            writer.close()
            await writer.wait_closed()

    async def by_messages() -> AsyncGenerator[bytes, None]:
        async with aiordma.connect(address, ports["messages"]) as connection:
            try:
                while True:
                    await connection.send(b"next")
                    yield bytes(await connection.recv())
            finally:
                await connection.send(b"quit")
                said.append(bytes(await connection.recv()))

    async def use() -> None:
        for generator in kept:
            async for _ in generator:
                break
        raise Failed

    main = _serve(address, ports, ready)
    server = threading.Thread(target=_run, args=(new_loop, main), daemon=True)
    server.start()
    assert ready.wait(20)
    kept = [by_stream(), by_messages()]  # they outlive the tasks
    with pytest.raises(Failed):
        _run(new_loop, use())
    assert sorted(said) == [b"QUIT", b"QUIT\n"]
    server.join(20)
    assert not server.is_alive()
