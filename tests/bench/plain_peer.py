"""Programs as a user writes them, over aiordma and over TCP.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, with OVER "rdma" or "tcp".  Each form is
written once, for a connection that has `send`, `recv` and `async for`: over "rdma" that is
`aiordma.Connection` itself, with the settings that it has by default, and over "tcp" asyncio's
streams with the length before each message.  Each message is read as `bytes`.

- `one-way`, with 64 bytes a message: the client sends, the server reads, and answers after the
  last message.  The figure is microseconds a message.
- `callers`, with 1 to 1000 tasks on one connection: each task sends a request with a number, and
  waits for the answer with this number.  The figure is microseconds a call.
- `echo`, with 64 or 65,536 bytes: each message goes there and back.  The server sends a message of
  64 bytes back as the README does, and reads a larger message before.  The figure is microseconds
  for there and back.

The client prints one JSON object.  There is no limit of time here, because its timer would be one
more in the loop: the host has a limit.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import uvloop

import aiordma

__all__ = ["main"]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
SMALL = 64
#: Calls of all tasks together, by the number of tasks.
CALLERS = {1: 400, 100: 2000, 1000: 3000}
#: Messages that go there and back, by their bytes.
ECHOES = {SMALL: 400, 65_536: 60}
MESSAGES = 2000
#: Messages, or calls, before the clock runs; and of an echo.
WARM_UP, ECHO_WARM_UP = 100, 20
END = b"end"
NUMBER = struct.Struct("!Q")
LENGTH = struct.Struct("!I")
ANSWER = bytes(SMALL - NUMBER.size)


class Messages(Protocol):
    """The methods of a connection that the forms use."""

    async def send(self, buf: Any, /) -> None:
        """Send a message."""

    async def recv(self) -> Any:
        """The next message."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """Messages until the peer closes."""


class Framed:
    """Messages over asyncio's streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, buf: Any, /) -> None:
        """Write the length and the bytes; wait when the peer is slow."""
        self._writer.writelines((LENGTH.pack(len(buf)), buf))
        await self._writer.drain()

    async def recv(self) -> bytes:
        """Read the length, and so many bytes."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)

    def __aiter__(self) -> Framed:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.recv()
        except asyncio.IncompleteReadError:
            raise StopAsyncIteration from None

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        await self._writer.wait_closed()


# Messages one way


async def collect(conn: Messages) -> None:
    """Read messages, and answer the last."""
    async for message in conn:
        if bytes(message) == END:
            await conn.send(END)


async def deliver(conn: Messages, size: int) -> float:
    """Send messages one after the other; microseconds a message, the answer included."""
    data = bytes(size)
    took = 0.0
    for count in (WARM_UP, MESSAGES):
        begun = time.perf_counter()
        for _ in range(count):
            await conn.send(data)
        await conn.send(END)
        bytes(await conn.recv())
        took = time.perf_counter() - begun
    return took / MESSAGES * 1e6


# Many callers


async def answer(conn: Messages) -> None:
    """Answer each request under its number."""
    async for message in conn:
        request = bytes(message)
        await conn.send(request[: NUMBER.size] + ANSWER)


class Caller:
    """Calls of many tasks over one connection."""

    def __init__(self, conn: Messages) -> None:
        self._conn = conn
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()

    async def call(self, request: bytes) -> bytes:
        """Send a request and wait for its answer."""
        number = next(self._numbers)
        waiting: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[number] = waiting
        await self._conn.send(NUMBER.pack(number) + request)
        return await waiting

    async def read(self) -> None:
        """Give each answer to the call that waits for it."""
        async for message in self._conn:
            reply = bytes(message)
            (number,) = NUMBER.unpack_from(reply)
            self._waiting.pop(number).set_result(reply[NUMBER.size :])


async def call_often(conn: Messages, tasks: int) -> float:
    """Call from so many tasks; microseconds a call."""
    caller = Caller(conn)
    reader = asyncio.create_task(caller.read())
    request = bytes(SMALL - NUMBER.size)

    async def work(calls: int) -> None:
        for _ in range(calls):
            await caller.call(request)

    took = 0.0
    calls = CALLERS[tasks] // tasks
    for each in (max(WARM_UP // tasks, 1), calls):
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(work(each))
        took = time.perf_counter() - begun
    reader.cancel()
    await asyncio.wait([reader])
    return took / (calls * tasks) * 1e6


# There and back


async def echo(conn: Messages) -> None:
    """The server of the README: send each message back."""
    async for message in conn:
        await conn.send(message)


async def read_and_echo(conn: Messages) -> None:
    """Read each message, and send its bytes back."""
    async for message in conn:
        data = bytes(message)
        await conn.send(data)


async def ask(conn: Messages, size: int) -> float:
    """Send a message and read the answer, again and again; microseconds for both."""
    data = bytes(size)
    begun = 0.0
    for number in range(-ECHO_WARM_UP, ECHOES[size]):
        if not number:
            begun = time.perf_counter()
        await conn.send(data)
        bytes(await conn.recv())
    return (time.perf_counter() - begun) / ECHOES[size] * 1e6


Serve = Callable[[Messages], Awaitable[None]]
Use = Callable[[Messages, int], Awaitable[float]]
#: By name: the server's side and the client's.
FORMS: dict[str, tuple[Callable[[int], Serve], Use]] = {
    "one-way": (lambda _: collect, deliver),
    "callers": (lambda _: answer, call_often),
    "echo": (lambda size: echo if size == SMALL else read_and_echo, ask),
}


async def serve(talk: Serve, address: str, port: int) -> None:
    """Serve one client of aiordma."""
    async with aiordma.listen(address, port) as listener, await listener.accept() as conn:
        await talk(conn)


async def use(talk: Use, number: int, address: str, port: int) -> float:
    """Connect with aiordma, and measure."""
    async with aiordma.connect(address, port) as conn:
        return await talk(conn, number)


async def serve_tcp(talk: Serve, address: str, port: int) -> None:
    """Serve one client of TCP."""
    done = asyncio.Event()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conn = Framed(reader, writer)
        try:
            await talk(conn)
            await conn.close()
        finally:
            done.set()

    async with await asyncio.start_server(client, address, port):
        await done.wait()


async def use_tcp(talk: Use, number: int, address: str, port: int) -> float:
    """Connect with TCP, and measure."""
    conn = Framed(*await asyncio.open_connection(address, port))
    took = await talk(conn, number)
    await conn.close()
    return took


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, number, loop, over, address, port = words
    server, client = FORMS[form]

    async def end() -> None:
        if role == "server":
            by = serve if over == "rdma" else serve_tcp
            await by(server(int(number)), address, int(port))
        else:
            connect = use if over == "rdma" else use_tcp
            print(json.dumps({"us": await connect(client, int(number), address, int(port))}))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
