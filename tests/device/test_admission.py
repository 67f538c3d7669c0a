"""Limits that a server can live with: who gets in while others hold places, and what they pin."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trustme

import aiordma
from aiordma import ListenerLimits, StreamConfig
from aiordma.endpoint.config import DEFAULTS, plan_of
from aiordma.memory.governor import FIRST
from aiordma.verbs import QueuePair
from tests.device.flood import flooding, pinned_bytes
from tests.device.meeting import meet
from tests.device.oracle import until
from tests.device.streaming import Note
from tests.inside.link import acceptor_of, limit_half_open, limit_tls
from tests.inside.streams import tls_places_of

pytestmark = pytest.mark.device

NAME = "stream.example"
SMALL = StreamConfig(receive_buffer_size=4096, send_buffer_size=4096)


async def echo(connection: aiordma.Connection) -> None:
    async with connection:
        async for message in connection:
            with message:
                await connection.send(bytes(message))


@contextlib.asynccontextmanager
async def echoing(listener: aiordma.Listener) -> AsyncIterator[None]:
    """A program that accepts and answers."""
    tasks: set[asyncio.Task[None]] = set()

    async def accept() -> None:
        async for connection in listener:
            tasks.add(asyncio.create_task(echo(connection)))

    accepting = asyncio.create_task(accept())
    try:
        yield
    finally:
        listener.close()
        await accepting
        for task in tasks:
            task.cancel()
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            assert done is None or isinstance(done, (asyncio.CancelledError, OSError)), done


async def ask(
    address: str, port: int, *, hold: asyncio.Event | None = None, **options: Any
) -> BaseException | None:
    """Connect, have a message sent back, close when `hold` is set; what went wrong."""
    try:
        async with aiordma.connect(address, port, **options) as connection:
            await connection.send(b"in?")
            with await connection.recv() as message:
                assert bytes(message) == b"in?"
            if hold is not None:
                await hold.wait()
    except OSError as exc:
        return exc
    return None


@pytest.mark.virtual_time
async def test_g02_newcomers_get_in_while_one_source_holds_sixty(address: str) -> None:
    """At 42 connects a second, from the newcomers' own address, with default settings."""
    async with aiordma.listen(address, 0) as listener, echoing(listener):
        async with flooding(address, listener.port, clients=60, rate=42) as flood:
            await until(lambda: acceptor_of(listener).places.open >= 32)
            errors = []
            for _ in range(10):
                errors += await asyncio.gather(*(ask(address, listener.port) for _ in range(2)))
        failed = [error for error in errors if error is not None]
        assert len(failed) <= len(errors) // 10, failed
        assert listener.dropped >= flood.dropped > 0


async def test_g02_newcomers_get_in_beside_half_open_clients(address: str) -> None:
    """The same on a small scale, which machines with other things to do manage, too."""
    limits = ListenerLimits(max_half_open=5)
    async with aiordma.listen(address, 0, limits=limits) as listener, echoing(listener):
        async with flooding(address, listener.port, clients=8, rate=10) as flood:
            await until(lambda: acceptor_of(listener).places.waiting > 1, 30)
            for _ in range(3):
                assert await ask(address, listener.port, timeout=30) is None
        assert listener.dropped >= flood.dropped > 0
        await until(lambda: not acceptor_of(listener).places.open, 20)


@pytest.mark.kernel  # counts what is pinned: the fabric pins nothing
async def test_g02_g09_half_open_clients_pin_no_more_than_their_budget(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they send, and for no longer than a handshake may take."""
    each = plan_of(DEFAULTS).pinned
    limit_half_open(monkeypatch, size=4 * each, pressed_s=0.2)
    limits = ListenerLimits(handshake_timeout_s=1)
    async with (
        aiordma.listen(address, 0, limits=limits) as listener,
        echoing(listener),
        aiordma.connect(address, listener.port) as bystander,
    ):
        before = pinned_bytes()
        async with flooding(address, listener.port, clients=12, rate=20) as flood:
            await until(lambda: flood.dropped >= 12, 60)
            await bystander.send(b"x" * 5000)
            with await bystander.recv() as message:
                assert bytes(message) == b"x" * 5000
        assert each <= flood.peak - before <= 4 * each
        print(f"{(flood.peak - before) / flood.sent:.0f} bytes pinned for each byte sent")
        await until(lambda: not acceptor_of(listener).places.open, 10)
        await until(lambda: pinned_bytes() == before, 10)
        assert acceptor_of(listener).ledger.connections == 1
        await bystander.close()
    assert listener.dropped >= 12


async def test_g09_a_source_has_no_more_connections_than_its_limit(address: str) -> None:
    limits = ListenerLimits(max_connections_per_source=3)
    async with aiordma.listen(address, 0, limits=limits) as listener, echoing(listener):
        async with contextlib.AsyncExitStack() as held:
            for _ in range(3):
                await held.enter_async_context(aiordma.connect(address, listener.port))
            with pytest.raises(aiordma.ConnectionRejectedError, match="many connections") as caught:
                await aiordma.connect(address, listener.port)
            assert not caught.value.try_again
            assert listener.refused == 1
        await until(lambda: not acceptor_of(listener).ledger.connections)
        assert await ask(address, listener.port) is None


async def test_g09_a_program_that_answers_itself_has_the_same_limits(address: str) -> None:
    limits = ListenerLimits(max_connections=1)
    async with aiordma.listen(address, 0, limits=limits) as listener:
        requests = listener.requests()
        tries = [asyncio.create_task(ask(address, listener.port)) for _ in range(2)]
        first, second = await anext(requests), await anext(requests)
        serving = asyncio.create_task(echo(await first.accept()))
        with pytest.raises(OSError, match="max_connections") as caught:
            await second.accept()
        assert caught.value.args[1].startswith("no more connections")
        errors = await asyncio.gather(*tries)
        assert [type(error) for error in errors].count(aiordma.ConnectionRejectedError) == 1
        await serving


# -- streams


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(NAME).configure_cert(server)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client)
    return server, client


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


async def ask_securely(address: str, port: int, context: ssl.SSLContext) -> None:
    reader, writer = await aiordma.open_connection(
        address, port, ssl=context, server_hostname=NAME, config=SMALL
    )
    writer.write(b"in?")
    assert await reader.readexactly(3) == b"in?"
    writer.close()
    await writer.wait_closed()


async def silent(address: str, port: int) -> Any:
    """A client that connects, and never begins with TLS."""
    return (await aiordma.create_connection(Note, address, port, config=SMALL, timeout=60))[1]


@pytest.mark.one_loop
@pytest.mark.parametrize("places", [None, 8], ids=["places", "pressure"])
async def test_g02_newcomers_get_in_while_silent_tls_clients_hang(
    address: str,
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    places: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if places is not None:
        limit_tls(monkeypatch, most_of_one=places, pressed_s=0.5)
    count = 100 if places is None else 24
    async with await aiordma.create_server(
        Echo, address, 0, ssl=contexts[0], config=SMALL
    ) as server:
        hanging = await asyncio.gather(*(silent(address, server.port) for _ in range(count)))
        for _ in range(5):
            await ask_securely(address, server.port, contexts[1])
        if places is None:
            assert not server.dropped
        else:
            assert server.dropped >= count - places
        for note in hanging:
            note.transport.abort()
        for note in hanging:
            await note.ended()
        server.close_clients()
        await until(lambda: not acceptor_of(server).ledger.connections, 20)
        await until(lambda: not (acceptor_of(server).places.open or tls_places_of(server).open), 20)


@pytest.mark.one_loop
async def test_g02_start_tls_of_a_server_is_a_handshake_with_a_place(
    address: str,
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that ask for TLS in the middle, and then hang, hold places for a moment only."""
    limit_tls(monkeypatch, most_of_one=2, pressed_s=0.3)
    ended: list[BaseException] = []

    async def serve(reader: Any, writer: Any) -> None:
        try:
            assert await reader.readline() == b"STARTTLS\n"
            writer.write(b"go\n")
            await writer.start_tls(contexts[0])
            writer.write(await reader.readexactly(3))
        except OSError as exc:
            ended.append(exc)
        writer.close()

    async def ask(name: str | None) -> Any:
        reader, writer = await aiordma.open_connection(address, server.port, config=SMALL)
        writer.write(b"STARTTLS\n")
        assert await reader.readline() == b"go\n"
        if name is not None:
            await writer.start_tls(contexts[1], server_hostname=name)
            writer.write(b"in?")
            assert await reader.readexactly(3) == b"in?"
            writer.close()
            await writer.wait_closed()
        return writer

    async with await aiordma.start_server(serve, address, 0, config=SMALL) as server:
        hanging = [await ask(None) for _ in range(4)]
        await until(lambda: server.dropped == 2, 20)
        await until(lambda: len(ended) == 2, 20)
        await ask(NAME)
        for writer in hanging:
            writer.transport.abort()
        await until(lambda: len(ended) == 4, 20)
        await until(lambda: not (tls_places_of(server).open or tls_places_of(server).waiting), 20)
    assert all(isinstance(error, ConnectionError) for error in ended), ended


async def test_g02_half_open_streams_do_not_lock_others_out(
    address: str,
    is_siw: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests of rsockets whose clients never confirm; software iWARP confirms for them.

    The place of one that is dropped is free at once: to wait for its answer kept newcomers out.
    """
    caplog.set_level("DEBUG", "aiordma.stream")
    limit_half_open(monkeypatch, pressed_s=0.5)
    limits = ListenerLimits(max_half_open=4)
    before = pinned_bytes()
    async with await aiordma.create_server(Echo, address, 0, config=SMALL, limits=limits) as server:
        async with flooding(address, server.port, clients=6, rate=10, streams=True) as flood:
            held = (
                (lambda: flood.met >= 6)
                if is_siw
                else (lambda: acceptor_of(server).places.waiting > 1)
            )
            await until(held, 30)
            for _ in range(3):
                note = await silent(address, server.port)
                note.transport.close()
                assert await note.ended() is None
        assert is_siw or server.dropped > 0
        assert is_siw or "has not answered the disconnection" not in caplog.text
        server.abort_clients()
        await until(lambda: not acceptor_of(server).ledger.connections, 20)
        await until(lambda: not acceptor_of(server).places.open, 20)
        await until(lambda: pinned_bytes() == before, 20)


@pytest.mark.parametrize("streams", [False, True], ids=["messages", "streams"])
async def test_g02_a_client_counts_until_its_memory_is_deregistered(
    address: str, monkeypatch: pytest.MonkeyPatch, *, streams: bool
) -> None:
    """Also where a thread destroys the queue pair while the loop still closes the connection."""
    close, ends = QueuePair.close, list[tuple[int, int]]()

    def close_and_wait(self: QueuePair) -> None:
        before, gone = FIRST.pinned, threading.Event()
        self._when_gone(gone.set)
        close(self)
        assert gone.wait(60)
        ends.append((ledger.connections, before - FIRST.pinned))

    async with contextlib.AsyncExitStack() as stack:
        if streams:
            server = await stack.enter_async_context(
                await aiordma.create_server(Echo, address, 0, config=SMALL)
            )
            ledger = acceptor_of(server).ledger
            await silent(address, server.port)
            end = server.abort_clients
        else:
            listener = await stack.enter_async_context(aiordma.listen(address, 0))
            ledger = acceptor_of(listener).ledger
            client, accepted = await meet(listener, address)
            stack.push_async_callback(client.wait_closed)
            end = accepted.abort
        await until(lambda: ledger.connections == 1)
        monkeypatch.setattr(QueuePair, "close", close_and_wait)
        end()
        await until(lambda: any(not clients for clients, _ in ends))
        freed = next(freed for clients, freed in ends if not clients)
        assert freed > 0


@pytest.mark.parametrize(
    "limits",
    [
        ListenerLimits(max_connections=3),  # of which a source has three quarters
        ListenerLimits(max_connections_per_source=2),
    ],
)
async def test_g09_clients_that_come_together_pass_no_limit(
    address: str, limits: ListenerLimits
) -> None:
    """All of them find room when they arrive, before the first is counted."""
    async with await aiordma.create_server(Echo, address, 0, config=SMALL, limits=limits) as server:
        came = await asyncio.gather(
            *(silent(address, server.port) for _ in range(12)), return_exceptions=True
        )
        notes = [each for each in came if isinstance(each, Note)]
        assert len(notes) == acceptor_of(server).ledger.connections == 2
        assert server.refused == 10
        for each in came:
            if not isinstance(each, Note):
                assert isinstance(each, aiordma.ConnectionRejectedError)
                assert "as many connections" in str(each)
        for note in notes:
            note.transport.close()
            await note.ended()


# -- a process that is short of descriptors


KNOCK = """
import asyncio, sys, aiordma
async def main():
    try:
        await aiordma.open_connection(sys.argv[1], int(sys.argv[2]))
    except aiordma.ConnectionRejectedError:
        print("met", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for _ in range(10_000):
        try:
            async with aiordma.connect(sys.argv[1], int(sys.argv[2])) as connection:
                await connection.send(b"in?")
                (await connection.recv()).release()
                print("in", flush=True)
                return
        except aiordma.ConnectionRejectedError as exc:
            print("refused" if "resources" in str(exc) else exc, flush=True)
        await asyncio.sleep(0.2)
asyncio.run(main())
"""


@pytest.mark.kernel
async def test_g11_a_listener_without_descriptors_neither_spins_nor_goes_deaf(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients are refused, each for itself, for as long as it lasts; and let in afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = asyncio.get_running_loop()
    async with aiordma.listen(address, 0) as listener, echoing(listener):
        arguments = ("-c", KNOCK, address, str(listener.port))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with running(arguments, **pipes) as (process,):
            assert process.stdin is not None
            assert process.stdout is not None
            # A process of the fabric needs a descriptor for one that it has not met: it meets this
            # one as a client of streams, for which nothing is made.
            assert await asyncio.to_thread(process.stdout.readline) == "met\n"
            spare = os.dup(0)
            os.close(spare)
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
            try:
                process.stdin.write("\n")
                process.stdin.flush()
                await until(lambda: caplog.text.count("refused") >= 1, 30)
                begin, used = loop.time(), time.process_time()
                await asyncio.sleep(1.5)
                assert time.process_time() - used < 0.5 * (loop.time() - begin)
                await until(lambda: caplog.text.count("refused") >= 2, 30)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            lines = await asyncio.to_thread(process.stdout.read)
    *refused, last = lines.split()
    assert last == "in"
    assert len(refused) > 1
    assert set(refused) == {"refused"}
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 1 <= len(told) <= 2 + math.log2(len(refused)), told


# -- many at once


@contextlib.contextmanager
def running(*programs: Sequence[str], **options: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """Python programs beside the test."""
    started: list[subprocess.Popen[str]] = []
    try:
        started.extend(
            subprocess.Popen([sys.executable, *arguments], text=True, **options)
            for arguments in programs
        )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def busy_server(address: str, loop: str) -> Iterator[tuple[int, int]]:
    """Its ports, for messages and for streams."""
    program = str(Path(__file__).with_name("busy_server.py"))
    with running((program, address, loop), stdout=subprocess.PIPE) as (process,):
        assert process.stdout is not None
        word, *ports = process.stdout.readline().split()
        assert word == "ready"
        messages, streams = map(int, ports)
        yield messages, streams


async def ask_a_stream(address: str, port: int) -> BaseException | None:
    """As `ask`."""
    try:
        reader, writer = await aiordma.open_connection(address, port)
        writer.write(b"in?")
        assert await reader.readexactly(3) == b"in?"
        writer.close()
        await writer.wait_closed()
    except OSError as exc:
        return exc
    return None


@pytest.mark.one_loop
@pytest.mark.parametrize("streams", [False, True], ids=["messages", "streams"])
async def test_c01_connects_in_one_gather(
    address: str, is_uvloop: bool, is_siw: bool, streams: bool
) -> None:
    """All of default settings, while other programs of the machine are busy."""
    # On software iWARP no queue of a process may begin at page 144 (docs/surprises.md); that takes
    # the queues of more connections than these.
    count = 8 if is_siw else 200
    loop = asyncio.get_running_loop()
    loop.set_debug(False)  # which would be most of the load
    attempt = ask_a_stream if streams else ask
    with (
        busy_server(address, "uvloop" if is_uvloop else "asyncio") as ports,
        running(*[("-c", "while True: pass")] * 2),
    ):
        begin = loop.time()
        errors = await asyncio.gather(*(attempt(address, ports[streams]) for _ in range(count)))
        print(f"{count} connects: {loop.time() - begin:.1f} s")
    assert not any(errors), [error for error in errors if error is not None]
