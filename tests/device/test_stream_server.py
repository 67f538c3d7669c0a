"""RdmaServer: what asyncio's Server does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import StreamConfig
from aiordma.cm.address import is_loopback
from aiordma.link.acceptor import Request
from aiordma_softroce.network import ADDRESS
from tests.device.oracle import collect, reported, until
from tests.device.streaming import Note
from tests.inside.link import acceptor_of
from tests.inside.streams import active_of, lose_end, when_confirmed
from tests.native_ends import begun

pytestmark = pytest.mark.device


def nobody(reader: Any, writer: Any) -> None:
    writer.close()


async def test_a_server_that_begins_later(address: str) -> None:
    server = await aiordma.start_server(nobody, address, 0, start_serving=False)
    assert not server.is_serving()
    assert server.port > 0
    assert server.sockets[0].getsockname() == (address, server.port)
    assert server.get_loop() is asyncio.get_running_loop()
    with pytest.raises(aiordma.ConnectionRejectedError):
        await aiordma.open_connection(address, server.port)
    await server.start_serving()
    await server.start_serving()
    assert server.is_serving()
    reader, writer = await aiordma.open_connection(address, server.port)
    assert await reader.read() == b""
    writer.close()
    server.close()
    server.close()
    assert not server.is_serving()
    assert server.sockets == ()
    await server.wait_closed()
    with pytest.raises(RuntimeError, match="closed"):
        await server.start_serving()
    with pytest.raises(RuntimeError, match="closed"):
        await server.serve_forever()


async def test_serve_forever(address: str) -> None:
    server = await aiordma.start_server(nobody, address, 0, start_serving=False)
    task = asyncio.create_task(server.serve_forever())
    await until(server.is_serving)
    with pytest.raises(RuntimeError, match="already being awaited"):
        await server.serve_forever()
    _, writer = await aiordma.open_connection(address, server.port)
    writer.close()
    await writer.wait_closed()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.is_serving()
    again = await aiordma.start_server(nobody, address, server.port)
    task = asyncio.create_task(again.serve_forever())
    await asyncio.sleep(0)
    again.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    await again.wait_closed()


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each line until the client ends."""
    while line := await reader.readline():
        writer.write(line)
    writer.close()


class BugError(Exception):
    """What a program fails with."""


@pytest.mark.parametrize("by", ["serve_forever", "the block"])
async def test_h01_an_exception_does_not_wait_for_clients(address: str, by: str) -> None:
    server = await aiordma.start_server(hello, address, 0)
    reader, writer = await aiordma.open_connection(address, server.port)
    writer.write(b"hello\n")
    assert await reader.readline() == b"hello\n"

    async def main() -> None:
        async with server:
            if by == "the block":
                raise BugError
            await server.serve_forever()

    task = await begun(main())
    if by == "serve_forever":
        task.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(BugError if by == "the block" else asyncio.CancelledError):
            await task
        assert await reader.read() == b"", "the client sees an end"
    writer.close()
    await writer.wait_closed()


async def test_h01_an_end_that_was_lost_to_ctrl_c_is_made_up_for(address: str) -> None:
    """A KeyboardInterrupt can come before the report of an end is scheduled."""
    protocols: list[Note] = []

    def make() -> Note:
        protocols.append(Note())
        return protocols[-1]

    config = StreamConfig(close_timeout_s=0.2)
    server = await aiordma.create_server(make, address, 0, config=config)
    _, client = await aiordma.create_connection(Note, address, server.port)
    await until(lambda: any(each.transport for each in protocols))
    lose_end(protocols[0].transport)
    task = await begun(server.serve_forever())
    task.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await task
        await protocols[0].ended()
        await client.ended()
    assert active_of(server) == 0


class StopError(BaseException):
    """As a KeyboardInterrupt, but it does not leave the loop."""


@pytest.mark.parametrize("second", ["before it has run", "between two steps"])
async def test_h01_a_second_ctrl_c_aborts_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """Whatever the first has lost: the long time for a close in good order is not waited for."""
    protocols: list[Note] = []

    def make() -> Note:
        protocols.append(Note())
        return protocols[-1]

    config = StreamConfig(close_timeout_s=600)
    server = await aiordma.create_server(make, address, 0, config=config)
    _, client = await aiordma.create_connection(Note, address, server.port)
    await until(lambda: any(each.transport for each in protocols))
    lose_end(protocols[0].transport)

    async def main() -> None:
        async with server:
            await server.serve_forever()

    task = await begun(main())
    real = server.close_clients

    def hit() -> None:
        monkeypatch.setattr(server, "close_clients", real)
        raise StopError

    if second == "between two steps":
        monkeypatch.setattr(server, "close_clients", hit)
    else:
        task.cancel()
    task.cancel()
    async with asyncio.timeout(20):
        with pytest.raises((asyncio.CancelledError, StopError)):
            await task
        await protocols[0].ended()
        await client.ended()
    assert active_of(server) == 0


#: Seconds for a server to end at two Ctrl-C. The second may come between any two steps of the loop,
#: and a step that is lost is made up for by the bounds: 10 s for the connections to close, 10 s
#: for the abort that follows, 5 s for bytes to arrive, and 10 s for the tasks at the loop's end.
END_S = 60


@pytest.mark.one_device
@pytest.mark.one_loop
@pytest.mark.timeout(600)
async def test_h01_a_second_ctrl_c_leaves_no_server_behind(address: str) -> None:
    """At once after the first, while clients come, talk and break off."""
    program = Path(__file__).parents[2] / "examples" / "stream_echo.py"

    async def talk(port: int) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                reader, writer = await aiordma.open_connection(address, port, timeout=5)
                try:
                    for _ in range(3):
                        writer.write(bytes(5000))
                        await reader.readexactly(5000)
                finally:
                    writer.transport.abort()

    for pause in (0, 0.01, 0.03):
        server = await asyncio.create_subprocess_exec(
            sys.executable, str(program), "server", address, "7468",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert server.stdout is not None
        tasks = []
        try:
            async with asyncio.timeout(60):  # a busy machine takes long to start a program
                assert b"listening" in await server.stdout.readline()
                reader, writer = await aiordma.open_connection(address, 7468)
                tasks = [asyncio.create_task(talk(7468)) for _ in range(3)]
                writer.write(b"stays")
                assert await reader.readexactly(5) == b"stays"
            async with asyncio.timeout(END_S):
                server.send_signal(signal.SIGINT)
                await asyncio.sleep(pause)  # not to wait for anything: where the second one hits
                with contextlib.suppress(ProcessLookupError):
                    server.send_signal(signal.SIGINT)
                await server.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
            await server.communicate()
            await asyncio.gather(*tasks)  # each ends with its connection
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_wait_closed_waits_for_the_connections(address: str) -> None:
    protocols: list[Note] = []

    def factory() -> Note:
        protocols.append(Note())
        return protocols[-1]

    server = await aiordma.create_server(factory, address, 0)
    clients = [(await aiordma.create_connection(Note, address, server.port))[1] for _ in range(3)]
    await until(lambda: len(protocols) == 3)
    server.close()
    waiting = asyncio.create_task(server.wait_closed())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await asyncio.shield(waiting)
    clients[0].transport.close()
    protocols[1].transport.write(b"last words")
    server.close_clients()
    await waiting
    assert all(protocol.gone.done() for protocol in protocols)
    for client in clients:
        assert await client.ended() is None
    assert sorted(bytes(client.data) for client in clients) == [b"", b"", b"last words"]


async def test_abort_clients(address: str) -> None:
    async with await aiordma.create_server(Note, address, 0) as server:
        _, client = await aiordma.create_connection(Note, address, server.port)
        await until(lambda: active_of(server) == 1)
        server.abort_clients()
        assert await client.ended() is None
        assert client.calls == ["made", "eof", "lost"]


async def test_a_crowd_beyond_the_backlog(address: str) -> None:
    """Clients beyond it are refused, and try again until there is room."""
    async with await aiordma.create_server(Note, address, 0, backlog=2) as server:
        results = await asyncio.gather(
            *(aiordma.create_connection(Note, address, server.port, timeout=60) for _ in range(12))
        )
        assert server.refused > 0
        for transport, _ in results:
            transport.close()
        for _, protocol in results:
            assert await protocol.ended() is None


class Begun(dict[asyncio.Task[None], Request]):
    """Handshakes under way, which tell of a new one: it may be over in less than a millisecond."""

    def __init__(self) -> None:
        self.seen = asyncio.Event()

    def __setitem__(self, task: asyncio.Task[None], request: Request) -> None:
        super().__setitem__(task, request)
        self.seen.set()


async def test_a_server_that_closes_in_the_middle_of_handshakes(address: str) -> None:
    server = await aiordma.create_server(Note, address, 0)
    handshakes = acceptor_of(server).handshakes = Begun()
    tasks = [
        asyncio.create_task(aiordma.create_connection(Note, address, server.port, timeout=5))
        for _ in range(6)
    ]
    await asyncio.wait_for(handshakes.seen.wait(), 20)
    server.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    server.abort_clients()
    for result in results:
        if isinstance(result, BaseException):
            assert isinstance(result, OSError)
        else:
            await result[1].ended()
    await server.wait_closed()


async def test_a_client_that_has_just_connected_learns_that_nobody_has_read_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end of the stream would look like the answer of a server that has nothing to say."""
    server = await aiordma.start_server(hello, address, 0)
    when_confirmed(monkeypatch, server.close)
    reader, writer = await aiordma.open_connection(address, server.port)
    writer.write(b"hello\n")
    writer.write_eof()
    async with asyncio.timeout(20):
        with pytest.raises(aiordma.ConnectionLostError):
            await reader.read()
        writer.close()
        with pytest.raises(aiordma.ConnectionLostError):
            await writer.wait_closed()
        await server.wait_closed()


async def test_a_server_that_its_factory_closes(address: str) -> None:
    """The client is served, and who waits for the end of the server waits for it, too."""

    def factory() -> Note:
        server.close()
        return note

    note = Note()
    server = await aiordma.create_server(factory, address, 0)
    waiting = await begun(server.wait_closed())
    _, client = await aiordma.create_connection(Note, address, server.port)
    client.transport.write(b"the last")
    assert await note.received(8) == b"the last"
    assert not waiting.done()
    client.transport.close()
    assert await note.ended() is None
    async with asyncio.timeout(20):
        await waiting


async def test_several_addresses(address: str) -> None:
    """Those without an RDMA device are passed over, as long as one has it."""
    host = ADDRESS if is_loopback((address, 0)) else address  # a list leaves loopback out
    async with await aiordma.create_server(Note, [host, "192.0.2.1"], 0) as server:
        assert server.socknames == [server.sockname] == [(host, server.port)]
        with pytest.warns(DeprecationWarning, match="socknames"):
            assert server.addresses == server.socknames
    async with await aiordma.create_server(Note, None, 0) as server:
        transport, protocol = await aiordma.create_connection(Note, address, server.port)
        transport.close()
        assert await protocol.ended() is None


async def test_a_client_that_comes_and_goes_while_it_is_accepted(address: str) -> None:
    async with await aiordma.create_server(Note, address, 0) as server:
        handshakes = acceptor_of(server).handshakes = Begun()
        for _ in range(10):
            handshakes.seen.clear()
            task = asyncio.create_task(aiordma.create_connection(Note, address, server.port))
            async with asyncio.timeout(10):
                await handshakes.seen.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        transport, protocol = await aiordma.create_connection(Note, address, server.port)
        transport.close()
        assert await protocol.ended() is None
        await until(lambda: not handshakes, 20)
        server.abort_clients()


async def test_h01_a_server_that_nobody_keeps_goes_on(address: str) -> None:
    """Its loop keeps it, as asyncio's keep theirs, until it is closed."""
    port = (await aiordma.create_server(Note, address, 0)).port
    collect()
    transport, protocol = await aiordma.create_connection(Note, address, port)
    collect()
    transport.close()
    assert await protocol.ended() is None
    servers = [obj for obj in gc.get_objects() if type(obj) is aiordma.RdmaServer]
    (server,) = (each for each in servers if each.sockets and each.port == port)
    kept = weakref.ref(server)
    server.close()
    await server.wait_closed()
    del server, servers

    def is_gone() -> bool:
        collect()
        return kept() is None

    await until(is_gone, 20)  # the end of the connection goes on behind that of the protocols


async def test_h01_a_listener_that_a_task_waits_for_goes_on(address: str) -> None:
    """The task has the only reference to it, and nothing of the program's has the task."""
    seen: list[bytes] = []

    async def serve(listener: aiordma.Listener) -> None:
        async with listener, await listener.accept() as connection:
            seen.append(bytes(await connection.recv()))

    async def begin() -> int:
        listener = await aiordma.listen(address, 0)
        asyncio.create_task(serve(listener))  # noqa: RUF006
        return listener.port

    port = await begin()
    await asyncio.sleep(0)
    collect()
    async with aiordma.connect(address, port) as client:
        await client.send(b"still there")
        await until(lambda: bool(seen))
    assert seen == [b"still there"]


async def test_a_callback_that_is_canceled_before_it_begins_ends_the_stream(address: str) -> None:
    """As when the loop ends at once, and without a warning."""
    loop = asyncio.get_running_loop()

    async def never_begin(_: Any, __: Any) -> None:
        pytest.fail("it has begun")

    def connected(*ends: Any) -> Any:
        before = asyncio.all_tasks()
        loop.call_soon(lambda: [task.cancel() for task in asyncio.all_tasks() - before])
        return never_begin(*ends)

    with reported() as reports:
        async with await aiordma.start_server(connected, address, 0) as server:
            async with asyncio.timeout(60):
                reader, writer = await aiordma.open_connection(address, server.port)
                assert await reader.read() == b""
                writer.close()
                await writer.wait_closed()
        collect()
    assert not reports


async def test_a_callback_that_raises_ends_the_stream(address: str) -> None:
    """On Python 3.11, too, where asyncio's own server leaves the client waiting."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))

    async def fail(reader: Any, writer: Any) -> None:
        writer.write(b"before")
        await reader.readexactly(1)
        raise ZeroDivisionError("of the program")

    async with await aiordma.start_server(fail, address, 0) as server, asyncio.timeout(60):
        reader, writer = await aiordma.open_connection(address, server.port)
        writer.write(b"?")
        assert await reader.read() == b"before"
        writer.close()
        await writer.wait_closed()
        await until(lambda: bool(told))
    loop.set_exception_handler(None)
    (context,) = told
    assert context["message"] == "Unhandled exception in client_connected_cb"
    assert isinstance(context["exception"], ZeroDivisionError)
    told.clear()
