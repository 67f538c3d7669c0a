"""What a stream leaves behind on a wire with delay: the adapter delivers what it was given."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

import aiordma
from tests.device.netem import netem
from tests.device.oracle import Connecting, collect
from tests.device.streaming import LIMIT_S

pytestmark = [pytest.mark.device, pytest.mark.two_hosts]

OTHER = os.environ.get("AIORDMA_SOFTROCE_ADDR2", "")
SIZE = 50_000
PEERS = 100


@pytest.fixture
def late_wire() -> Iterator[None]:
    """Every packet takes 5 ms."""
    with netem("delay", "5ms"):
        yield


class Listening:
    """A server that reads each of its clients to the end."""

    def __init__(self) -> None:
        self.got: list[bytes | BaseException] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.got.append(await reader.read())
        except OSError as exc:
            self.got.append(exc)
        finally:
            writer.close()

    async def all_of(self, count: int) -> list[bytes | BaseException]:
        async with asyncio.timeout(LIMIT_S):
            while len(self.got) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self.got


def told(got: list[bytes | BaseException]) -> dict[object, int]:
    kinds = [len(item) if isinstance(item, bytes) else repr(item) for item in got]
    return {kind: kinds.count(kind) for kind in kinds}


async def told_by(
    address: str, client: Callable[[asyncio.StreamWriter], Awaitable[None]]
) -> dict[object, int]:
    """What the server has read of `PEERS` connections, each used by `client`."""
    server = Listening()
    async with await aiordma.start_server(server, address, 0) as listening:
        for _ in range(PEERS):
            _, writer = await aiordma.open_connection(
                address, listening.port, local_addr=(OTHER, 0)
            )
            await client(writer)
        return told(await server.all_of(PEERS))


async def test_h02_what_drain_has_handed_over_arrives_after_abort(
    address: str, late_wire: None
) -> None:
    """write, drain, abort: every peer gets every byte, then the end of the stream."""

    async def client(writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * SIZE)
        await writer.drain()
        writer.transport.abort()
        await writer.wait_closed()

    assert await told_by(address, client) == {SIZE: PEERS}


async def test_h02_a_client_that_aborts_at_once_has_been_there(
    address: str, late_wire: None
) -> None:
    """The handler is called for each of them, as with TCP."""

    async def client(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    assert await told_by(address, client) == {0: PEERS}


class Told(Exception):
    """What a program ends by."""


def end_by_return() -> None:
    """Nothing: `main` returns."""


def end_by_exception() -> None:
    raise Told


def end_by_exit() -> None:
    raise SystemExit(3)


def end_by_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "end",
    [end_by_return, end_by_exception, end_by_exit, end_by_interrupt],
    ids=["return", "exception", "exit", "interrupt"],
)
async def test_h02_a_program_that_ends_has_said_what_it_said(
    address: str, late_wire: None, end: Callable[[], None]
) -> None:
    """asyncio.run returns when what was written has arrived, whether it was closed or not."""
    server = Listening()
    factory, connects = type(asyncio.get_running_loop()), Connecting()
    ways = ("closes", "aborts", "leaves it open")
    made: list[weakref.ref[asyncio.WriteTransport]] = []

    async def program(port: int, way: str) -> None:
        _, writer = await aiordma.open_connection(address, port, local_addr=(OTHER, 0))
        made.append(weakref.ref(writer.transport))
        writer.write(b"x" * SIZE)
        if way == "closes":
            writer.close()
        elif way == "aborts":
            writer.transport.abort()
        end()

    def run(port: int, way: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # that one was not closed
            with (
                asyncio.Runner(loop_factory=factory) as runner,
                # Not the exception itself: its frames would keep the stream.
                contextlib.suppress(Told, SystemExit, KeyboardInterrupt),
            ):
                runner.run(program(port, way))
            connects.let_go()
            # Here, where nobody hears of it; a thread of the library may have it a moment longer.
            deadline = time.monotonic() + LIMIT_S
            while made[-1]() is not None:
                assert time.monotonic() < deadline, "somebody keeps the stream"
                collect()

    async with await aiordma.start_server(server, address, 0) as listening:
        gc.disable()  # or this thread may collect what the program still has
        try:
            for count, way in enumerate(ways, 1):
                await asyncio.to_thread(run, listening.port, way)
                assert told(await server.all_of(count)) == {SIZE: count}, way
        finally:
            gc.enable()
