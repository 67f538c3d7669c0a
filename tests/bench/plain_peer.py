"""Programs as a user writes them, over aiordma, over TCP and over ZeroMQ.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, with OVER "rdma", "tcp" or "zmq".  Each
form is written once, for a connection that has `send`, `recv` and `async for`: over "rdma" that is
`aiordma.Connection` itself, with the settings that it has by default, over "tcp" asyncio's streams
with the length before each message, and over "zmq" a pair of sockets of `zmq.asyncio`.  Each
message is read as `bytes`.

- `one-way`, with 64 bytes a message: the client sends, the server reads, and answers after the
  last message.  The figures are microseconds a message, and messages a second.
- `callers`, with 1 to 1000 tasks on one connection: each task sends a request with a number, and
  waits for the answer with this number.  The figures are microseconds a call, and calls a second.
- `requests` is `callers` by `Connection.request`, and on the server by `handle_requests`.
- `tasked` is `callers` with a task of the server for each call, as a handler of a request has: what
  `requests` does, without its time limits, cancellation, errors and limits.
- `echo`, with the bytes of a message: each message goes there and back.  The server is that of the
  README, and the client reads the answer.  The figure is half a round trip in microseconds.
  Over "handed" both ends are tasks of the client, without a wire.
- `timeout` is `echo` with `asyncio.timeout` around each `recv` of the client, and `untimed` is
  `echo` with such a block that has nothing in it: the least that the block can cost.

The client prints one JSON object.  There is no limit of time here, because its timer would be one
more in the loop: the host has a limit.
"""

from __future__ import annotations

import asyncio
import collections
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
CALLERS = {1: 400, 16: 1600, 100: 4000, 1000: 10_000}
MESSAGES = 2000
#: Messages, or calls, before the clock runs; and of an echo.
WARM_UP, ECHO_WARM_UP = 100, 20
#: Seconds that no answer takes.
LIMIT_S = 3600.0
END = b"end"
NUMBER = struct.Struct("!Q")
LENGTH = struct.Struct("!I")
ANSWER = bytes(SMALL - NUMBER.size)
Told = dict[str, float]


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


class Queued:
    """Messages of ZeroMQ; the peer's end is not told."""

    def __init__(self) -> None:
        import zmq.asyncio  # it is there for `make bench` alone

        self.socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)

    async def send(self, buf: Any, /) -> None:
        """Send a message."""
        await self.socket.send(buf)

    async def recv(self) -> bytes:
        """The next message."""
        message: bytes = await self.socket.recv()
        return message

    def __aiter__(self) -> Queued:
        return self

    async def __anext__(self) -> bytes:
        return await self.recv()


class Handed:
    """One of two ends in a process, which hand their messages over: the least of any wire."""

    def __init__(self) -> None:
        self.peer = self
        self._messages: collections.deque[Any] = collections.deque()
        self._waiting: asyncio.Future[None] | None = None

    async def send(self, buf: Any, /) -> None:
        """Hand a message over."""
        peer = self.peer
        peer._messages.append(buf)
        if peer._waiting is not None:
            peer._waiting.set_result(None)
            peer._waiting = None

    async def recv(self) -> Any:
        """The next message."""
        if not self._messages:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._messages.popleft()

    def __aiter__(self) -> Handed:
        return self

    __anext__ = recv


Serve = Callable[[Messages], Awaitable[None]]
Use = Callable[[Messages, int], Awaitable[Told]]


def rated(seconds: float) -> Told:
    """The figures of a message or a call that takes so long."""
    return {"us": seconds * 1e6, "Mpps": 1e-6 / seconds}


# Messages one way


async def collect(conn: Messages) -> None:
    """Read messages, and answer the last."""
    async for message in conn:
        if bytes(message) == END:
            await conn.send(END)


async def deliver(conn: Messages, size: int) -> Told:
    """Send messages one after the other; the answer is part of the time."""
    data = bytes(size)
    took = 0.0
    for count in (WARM_UP, MESSAGES):
        begun = time.perf_counter()
        for _ in range(count):
            await conn.send(data)
        await conn.send(END)
        bytes(await conn.recv())
        took = time.perf_counter() - begun
    return rated(took / MESSAGES)


# Many callers


async def answer(conn: Messages) -> None:
    """Answer each request under its number."""
    async for message in conn:
        request = bytes(message)
        await conn.send(request[: NUMBER.size] + ANSWER)


async def answer_in_task(conn: Messages, request: bytes) -> None:
    """Answer a request: what a handler does."""
    await conn.send(request[: NUMBER.size] + ANSWER)


async def answer_in_tasks(conn: Messages) -> None:
    """Answer each request in a task of its own, which may end later than the next one's."""
    loop, running = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    async for message in conn:
        task = loop.create_task(answer_in_task(conn, bytes(message)))
        running.add(task)
        task.add_done_callback(running.discard)


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


async def call_often(conn: Messages, tasks: int) -> Told:
    """Call from so many tasks."""
    caller = Caller(conn)
    reader = asyncio.create_task(caller.read())
    told = await timed_calls(caller.call, tasks)
    reader.cancel()
    await asyncio.wait([reader])
    return told


async def timed_calls(
    call: Callable[[bytes], Awaitable[bytes]],
    tasks: int,
    request: bytes = bytes(SMALL - NUMBER.size),
    count: int = 0,
) -> Told:
    """The time of calls of so many tasks."""

    async def work(calls: int) -> None:
        for _ in range(calls):
            await call(request)

    took = 0.0
    calls = (count or CALLERS[tasks]) // tasks
    for each in (max(WARM_UP // tasks, 1), calls):
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(work(each))
        took = time.perf_counter() - begun
    return rated(took / (calls * tasks))


async def reply_to(request: aiordma.Request) -> bytes:
    """The handler of `requests`: read a request, and answer it."""
    bytes(request.body)
    return ANSWER


async def reply(conn: Messages) -> None:
    """Serve requests."""
    assert isinstance(conn, aiordma.Connection)
    await aiordma.handle_requests(conn, reply_to)


async def request_often(conn: Messages, tasks: int) -> Told:
    """Send requests from so many tasks."""
    assert isinstance(conn, aiordma.Connection)

    async def call(request: bytes) -> bytes:
        return bytes(await conn.request(request))

    return await timed_calls(call, tasks)


# There and back


async def echo(conn: Messages) -> None:
    """The server of the README: send each message back."""
    async for message in conn:
        await conn.send(message)


def trips(size: int) -> int:
    """How many messages of this size go there and back; perftest needs five."""
    for most, count in (4096, 400), (65_536, 60), (262_144, 30), (4 << 20, 12):
        if size <= most:
            return count
    return 5


async def exchange(conn: Messages, data: bytes, count: int) -> None:
    """Send a message and read the answer, again and again."""
    for _ in range(count):
        await conn.send(data)
        bytes(await conn.recv())


async def exchange_timed(conn: Messages, data: bytes, count: int) -> None:
    """The same; each answer has its time."""
    for _ in range(count):
        await conn.send(data)
        async with asyncio.timeout(LIMIT_S):
            bytes(await conn.recv())


async def exchange_untimed(conn: Messages, data: bytes, count: int) -> None:
    """The same; the time is for nothing."""
    for _ in range(count):
        await conn.send(data)
        async with asyncio.timeout(LIMIT_S):  # noqa: ASYNC100  it is the cost of the block
            pass
        bytes(await conn.recv())


def ask(way: Callable[[Messages, bytes, int], Awaitable[None]]) -> Use:
    """Exchange messages in this way; half a round trip."""

    async def use(conn: Messages, size: int) -> Told:
        data, count = bytes(size), trips(size)
        await way(conn, data, ECHO_WARM_UP if size <= 1 << 20 else 2)
        begun = time.perf_counter()
        await way(conn, data, count)
        return {"us": (time.perf_counter() - begun) / count / 2 * 1e6}

    return use


#: By name: the server's side and the client's.
FORMS: dict[str, tuple[Serve, Use]] = {
    "one-way": (collect, deliver),
    "callers": (answer, call_often),
    "tasked": (answer_in_tasks, call_often),
    "requests": (reply, request_often),
    "echo": (echo, ask(exchange)),
    "timeout": (echo, ask(exchange_timed)),
    "untimed": (echo, ask(exchange_untimed)),
}


async def serve(talk: Serve, address: str, port: int) -> None:
    """Serve one client of aiordma."""
    async with aiordma.listen(address, port) as listener, await listener.accept() as conn:
        await talk(conn)


async def use(talk: Use, number: int, address: str, port: int) -> None:
    """Connect with aiordma, measure, and print."""
    async with aiordma.connect(address, port) as conn:
        print(json.dumps(await talk(conn, number)))


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


async def use_tcp(talk: Use, number: int, address: str, port: int) -> None:
    """Connect with TCP, measure, and print."""
    conn = Framed(*await asyncio.open_connection(address, port))
    print(json.dumps(await talk(conn, number)))
    await conn.close()


async def serve_zmq(talk: Serve, address: str, port: int) -> None:
    """Serve one client of ZeroMQ, and go on until this process is ended."""
    conn = Queued()
    conn.socket.bind(f"tcp://{address}:{port}")
    await talk(conn)


async def use_zmq(talk: Use, number: int, address: str, port: int) -> None:
    """Connect with ZeroMQ, measure, and print."""
    conn = Queued()
    conn.socket.connect(f"tcp://{address}:{port}")
    print(json.dumps(await talk(conn, number)))


async def use_handed(talk: Use, number: int, address: str, port: int) -> None:
    """Be both ends of many callers, measure, and print; a server of TCP ends with this."""
    outside = Framed(*await asyncio.open_connection(address, port))
    here, there = Handed(), Handed()
    here.peer, there.peer = there, here
    server = asyncio.create_task(answer(there))
    print(json.dumps(await talk(here, number)))
    server.cancel()
    await outside.close()


SERVES = {"rdma": serve, "tcp": serve_tcp, "zmq": serve_zmq, "handed": serve_tcp}
USES = {"rdma": use, "tcp": use_tcp, "zmq": use_zmq, "handed": use_handed}


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, number, loop, over, address, port = words
    server, client = FORMS[form]
    to = (address, int(port))
    end = SERVES[over](server, *to) if role == "server" else USES[over](client, int(number), *to)
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
