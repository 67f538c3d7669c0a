"""Connections seen from outside: their log, their metrics, their facts and their repr."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import pty
import re
import signal
import socket
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionConfig, metrics
from aiordma.metrics.snapshot import Totals
from tests.device.meeting import Pair, meet, part
from tests.device.oracle import until
from tests.device.streaming import noted, stream_pair
from tests.device.test_two_processes import peer
from tests.inside.streams import port_of

pytestmark = pytest.mark.device

LIMIT_S = 30
LARGE = 400_000
_NUMBERED = re.compile(r"#(\d+) (.*)")


class Lives:
    """The lines of the log about connections and streams, by number."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.DEBUG, "aiordma")

    @property
    def records(self) -> list[logging.LogRecord]:
        return [each for each in self._caplog.records if _NUMBERED.match(each.getMessage())]

    def of(self, number: int) -> list[str]:
        found = [_NUMBERED.fullmatch(each.getMessage()) for each in self.records]
        return [match[2] for match in found if match is not None and int(match[1]) == number]

    def numbers(self) -> list[int]:
        found = [getattr(each, "connection", None) for each in self.records]
        return list(dict.fromkeys(each for each in found if each is not None))


@pytest.fixture
def lives(caplog: pytest.LogCaptureFixture) -> Lives:
    return Lives(caplog)


def in_order(lines: list[str], *beginnings: str) -> None:
    """Each beginning has a line, in this order; the last line is the last one of these."""
    rest = iter(lines)
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in rest), (beginning, lines)
    assert lines[-1].startswith(beginnings[-1]), lines


def number_of(end: Any) -> int:
    number = end.get_extra_info("number")
    assert isinstance(number, int)
    return number


def gained(before: Totals, after: Totals) -> dict[str, int]:
    names = Totals.__dataclass_fields__
    return {name: getattr(after, name) - getattr(before, name) for name in names}


async def test_the_log_tells_the_life_of_each_connection_with_a_number(
    address: str, lives: Lives, caplog: pytest.LogCaptureFixture, is_siw: bool
) -> None:
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        port = listener.port
        client, server = await meet(listener, address)
        ours, theirs = number_of(client), number_of(server)
        here, there = client.get_extra_info("qpn"), server.get_extra_info("qpn")
        for _ in range(100):
            await client.send(b"x" * 64)
            (await server.recv()).release()
        await asyncio.gather(*(client.send(b"x" * 64) for _ in range(60)))
        for _ in range(60):
            (await server.recv()).release()
        await client.send(b"x" * LARGE)
        (await server.recv()).release()
        await client.close()
        await server.close()
    assert ours != theirs
    # The first is at the end as the last is; the numbers of the queue pairs are those of both ends.
    in_order(
        lives.of(ours), "connects to", f"is open with {address} port {port}: queue pair {here}",
        "has its first large message to send", "ends: the connection is closed",
        f"is closed: 161 messages of {160 * 64 + LARGE} bytes sent, 0 of 0 received",
    )  # fmt: skip
    in_order(
        lives.of(theirs), "accepts", "is open with", "has ",
        "has its first large message to receive", "the peer has closed", "ends: ",
        "is closed: 0 messages",
    )  # fmt: skip
    assert any(re.fullmatch(r"has \d+ slots to receive", line) for line in lives.of(theirs))
    assert any(re.fullmatch(r"has \d+ slots to send", line) for line in lives.of(ours))
    known = "unknown" if is_siw else str(there)
    assert lives.of(ours)[1].endswith(f"there {known}")
    # Fields for structured logs are in each line.
    for record in lives.records:
        number, qpn = vars(record)["connection"], vars(record)["qpn"]
        assert (number, qpn) in ((ours, here), (theirs, there))
        assert record.name in ("aiordma.connection", "aiordma.memory")
        assert record.levelno == logging.DEBUG
    peers = {vars(each)["peer"] for each in lives.records if vars(each)["connection"] == ours}
    assert f"{address}:{port}" in peers
    assert [each.getMessage() for each in caplog.records if each.name == "aiordma.listener"] == [
        f"listening on {address}:{port}", f"no longer listening on {address}:{port}",
    ]  # fmt: skip


async def test_the_log_of_a_stream(address: str, lives: Lives) -> None:
    async with asyncio.timeout(LIMIT_S), stream_pair(address) as ((_, writer), (reader, other)):
        ours, theirs = number_of(writer), number_of(other)
        writer.write(b"x" * 1000)
        assert await reader.readexactly(1000)
        writer.close()
        assert not await reader.read()
        other.close()
    await until(lambda: "is closed" in lives.of(theirs)[-1] and "is closed" in lives.of(ours)[-1])
    in_order(
        lives.of(ours), "connects to", "is open with", "ends: in good order",
        "is closed: 1000 bytes sent, 0 received",
    )  # fmt: skip
    in_order(
        lives.of(theirs), "accepts", "is open with", "ends: in good order",
        "is closed: 0 bytes sent, 1000 received",
    )  # fmt: skip
    assert {each.name for each in lives.records} <= {"aiordma.stream", "aiordma.memory"}


async def test_what_all_listeners_may_pin(address: str) -> None:
    """The least that one of them allows, as that is where it refuses clients."""

    def budget() -> tuple[int, int | None]:
        (found,) = (each for each in metrics.snapshot().budgets if each.name == "listeners")
        return found.used, found.total

    assert budget()[1] is None
    limits = [aiordma.ListenerLimits(max_process_pinned_bytes=each << 30) for each in (2, 1)]
    async with (
        aiordma.serve(lambda each: each.wait_closed(), address, 0, limits=limits[0]) as server,
        aiordma.listen(address, 0, limits=limits[1]),
        aiordma.connect(address, server.port),
    ):
        used, total = budget()
        assert used > 0
        assert total == 1 << 30


async def test_a_refusal_is_logged_and_counted(
    address: str, lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    before = metrics.snapshot()
    async with aiordma.listen(address, 0, config=ConnectionConfig(raw=False)) as listener:
        with pytest.raises(aiordma.ConnectionRejectedError):
            await aiordma.connect(address, listener.port, config=ConnectionConfig(raw=True))
        assert listener.refused == 1
        (seen,) = metrics.snapshot().listeners
        assert (seen.refused, seen.kind, seen.state) == (1, "messages", "listening")
        assert seen.addresses == ((address, listener.port),)
    (number,) = lives.numbers()
    await until(lambda: "is closed" in lives.of(number)[-1], LIMIT_S)
    in_order(lives.of(number), "connects to", "ends: connection rejected", "is closed")
    (refusal,) = [each for each in caplog.records if each.getMessage().startswith("refused")]
    assert (refusal.levelno, refusal.name) == (logging.INFO, "aiordma.listener")
    assert vars(refusal)["reason"] == "NOT_AIORDMA"
    assert str(vars(refusal)["peer"]).startswith(f"{address}:")
    change = gained(before.totals, metrics.snapshot().totals)
    assert (change["refused"], change["connects_failed"], change["connects"]) == (1, 1, 0)
    assert metrics.snapshot().connect_s.failed == before.connect_s.failed + 1


async def test_the_death_of_the_peer_is_logged_and_counted(
    address: str, lives: Lives, loop_name: str
) -> None:
    before = metrics.snapshot().totals
    async with asyncio.timeout(3 * LIMIT_S), peer("echo", address, loop_name) as (port, process):
        connection = await aiordma.connect(address, port)
        number = number_of(connection)
        await connection.send(b"?")
        (await connection.recv()).release()
        os.kill(process, signal.SIGKILL)
        with pytest.raises(aiordma.ConnectionLostError):
            await connection.recv()
        cause = "cause=ConnectionLostError: "
        assert cause in repr(connection)
        await connection.close()
        assert f"<Connection #{number} closed peer=" in repr(connection)
        assert cause in repr(connection)
    in_order(lives.of(number), "connects to", "is open with", "ends: ", "is closed: 1 messages")
    (end,) = [line for line in lives.of(number) if line.startswith("ends: ")]
    assert "disconnected without a word" in end or "no answer" in end or "reset" in end.lower()
    assert gained(before, metrics.snapshot().totals)["connections_lost"] == 1


class Raising(logging.Handler):
    """A handler of a program that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def handle(self, record: logging.LogRecord) -> bool:
        self.count += 1
        raise ZeroDivisionError(record.getMessage())


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Iterator[Raising]:
    logger, handler = logging.getLogger("aiordma"), Raising()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_a_log_handler_that_raises_breaks_no_connection(
    address: str, raising: Raising
) -> None:
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        with pytest.raises(aiordma.ConnectionRejectedError):
            await aiordma.connect(address, listener.port, config=ConnectionConfig(raw=True))
        client, server = await meet(listener, address)
        await client.send(b"x" * LARGE)
        assert len(await server.recv()) == LARGE
        server.abort()
        with pytest.raises(aiordma.ConnectionLostError):
            await client.recv()
        await part(client, server)
    async with stream_pair(address) as ((_, writer), (reader, _)):
        writer.write(b"line\n")
        assert await reader.readline() == b"line\n"
    assert raising.count > 10


async def test_the_numbers_are_right_and_closing_keeps_the_totals(pair: Pair) -> None:
    client, server = pair
    before = metrics.snapshot()
    for size in (1, 1000, LARGE):
        await client.send(bytes(size))
        (await server.recv()).release()
    await client.flush()
    await client.send(b"not taken")
    seen: metrics.Snapshot = before

    def has_come() -> bool:
        nonlocal seen
        seen = metrics.snapshot()
        return {each.number: each for each in seen.connections}[
            number_of(server)
        ].waiting_to_be_received == 1

    await until(has_come, LIMIT_S)
    found = {each.number: each for each in seen.connections}
    ours, theirs = found[number_of(client)], found[number_of(server)]
    total = 1 + 1000 + LARGE
    assert (ours.messages_sent, ours.bytes_sent) == (4, total + 9)
    assert (theirs.messages_received, theirs.bytes_received) == (3, total)
    assert ours.state == theirs.state == "open"
    assert ours.qpn == client.get_extra_info("qpn")
    assert ours.peername == client.get_extra_info("peername")
    assert theirs.pinned_bytes > 0
    assert theirs.receive_slots > 3
    assert ours.cause is None
    assert ours.opened_at is not None
    assert before.time - 60 < ours.opened_at <= seen.time
    assert bytes(await server.recv()) == b"not taken"
    await part(client, server)
    del ours, theirs, found
    after = metrics.snapshot()
    assert not after.connections
    change = gained(before.totals, after.totals)
    assert (change["messages_sent"], change["bytes_sent"]) == (4, total + 9)
    assert (change["messages_received"], change["bytes_received"]) == (4, total + 9)
    assert change["connections_lost"] == 0
    json.dumps(seen.to_dict())


async def test_messages_that_are_received_after_the_end_are_counted(address: str) -> None:
    before = metrics.snapshot().totals
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        for _ in range(5):
            await client.send(b"12345678")
        await client.close()
        await server.wait_closed()
        middle = metrics.snapshot().totals
        received = [bytes(message) async for message in server]
        await server.close()
    assert received == [b"12345678"] * 5
    assert gained(before, middle)["messages_received"] == 0
    change = gained(before, metrics.snapshot().totals)
    assert (change["messages_received"], change["bytes_received"]) == (5, 40)
    del client, server
    gc.collect()
    assert gained(before, metrics.snapshot().totals) == change


async def test_streams_and_one_sided_operations_are_counted(address: str, pair: Pair) -> None:
    before = metrics.snapshot()
    async with stream_pair(address) as ((_, writer), (reader, _)):
        writer.write(bytes(300_000))
        assert len(await reader.readexactly(300_000)) == 300_000
        seen = {each.number: each for each in metrics.snapshot().streams}
        ours = seen[number_of(writer)]
        assert (ours.bytes_sent, ours.bytes_received, ours.state) == (300_000, 0, "open")
        assert len(seen) == 2
        assert sum(each.bytes_received for each in seen.values()) == 300_000
        assert all(each.pinned_bytes > 0 for each in seen.values())
    client, server = pair
    memory = bytearray(4096)
    async with server.expose(memory, read=True, write=True) as region:
        await client.write(region, bytes(1024))
        await client.read(region, bytearray(4096))
    change = gained(before.totals, metrics.snapshot().totals)
    assert (change["stream_bytes_sent"], change["stream_bytes_received"]) == (300_000, 300_000)
    assert (change["bytes_read"], change["bytes_written"]) == (4096, 1024)
    assert (change["connects"], change["accepts"]) == (1, 1)
    assert metrics.snapshot().connect_s.count == before.connect_s.count + 1
    assert metrics.snapshot().connect_s.total_s > before.connect_s.total_s


@pytest.mark.slow
async def test_a_stream_that_breaks_is_counted_and_tells_its_cause(address: str) -> None:
    before = metrics.snapshot().totals
    async with noted(address) as both:
        both.client.transport.write(b"x")
        await both.server.received(1)
        port_of(both.server.transport).to_error()  # as if its process had ended
        await both.client.ended()
        await both.server.ended()
        assert "cause=" in repr(both.client.transport) + repr(both.server.transport)
    assert gained(before, metrics.snapshot().totals)["streams_lost"] >= 1


async def test_facts_have_both_queue_pairs_and_the_index_of_the_gid(
    pair: Pair, address: str, is_siw: bool
) -> None:
    async with stream_pair(address) as ((_, writer), (_, other)):
        for ours, theirs in (pair, (writer, other)):
            for here, there in ((ours, theirs), (theirs, ours)):
                peer_qpn = here.get_extra_info("peer_qpn")
                assert peer_qpn == (None if is_siw else there.get_extra_info("qpn"))
                index = here.get_extra_info("gid_index")
                if is_siw:
                    assert index is None
                    continue
                (device,) = aiordma.devices()
                with device.open() as context:
                    entry = context.query_gid(here.get_extra_info("port"), index)
                assert entry.gid == here.get_extra_info("gid")
    client, _ = pair
    await client.close()
    assert client.get_extra_info("peer_qpn", 7) == (
        None if is_siw else client.get_extra_info("peer_qpn")
    )
    assert client.get_extra_info("nothing", 7) == 7


async def test_reprs_tell_the_state_and_no_key(pair: Pair) -> None:
    client, server = pair
    number = number_of(client)
    peer_ = client.get_extra_info("peername")
    device = client.get_extra_info("device")
    assert repr(client) == f"<Connection #{number} open peer={peer_} device={device}>"
    lease = server.expose(bytearray(64), read=True)
    there = number_of(server)
    assert repr(lease) == f"<Lease new, read, #{there}>"
    async with lease as region:
        assert repr(lease) == f"<Lease open, 64 bytes, read, #{there}>"
        for secret in (region.rkey, region.addr):
            assert str(secret) not in repr(lease) + repr(region) + repr(server)
    assert repr(lease) == f"<Lease closed, read, #{there}>"
    await client.close()
    assert repr(client) == f"<Connection #{number} closed peer={peer_} device={device}>"
    await until(lambda: "closed" in repr(server), LIMIT_S)
    assert "cause" not in repr(server)


async def test_loops_of_several_threads_are_in_a_snapshot_of_any(
    address: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    before = metrics.snapshot().totals
    rounds, threads, ready, go_on = 200, 3, threading.Semaphore(0), threading.Event()
    errors: list[BaseException] = []

    async def talk() -> None:
        async with aiordma.listen(address, 0) as listener:
            client, server = await meet(listener, address)
            for _ in range(rounds):
                await client.send(b"12345678")
                (await server.recv()).release()
            ready.release()
            while not go_on.is_set():
                await client.send(b"")
                (await server.recv()).release()
            await part(client, server)

    def thread() -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(talk())
        except BaseException as exc:
            errors.append(exc)
            ready.release()

    running = [threading.Thread(target=thread) for _ in range(threads)]
    for each in running:
        each.start()
    for _ in running:
        assert await asyncio.to_thread(ready.acquire, True, LIMIT_S)
    last, seen = before, metrics.snapshot()
    for _ in range(200):
        seen = metrics.snapshot()
        change = gained(last, seen.totals)
        assert min(change.values()) >= 0, change
        last = seen.totals
    assert not errors
    assert len(seen.connections) == 2 * threads
    assert sum(each.name == "growth" for each in seen.budgets) == threads
    go_on.set()
    for each in running:
        await asyncio.to_thread(each.join, LIMIT_S)
        assert not each.is_alive()
    assert not errors
    assert gained(before, metrics.snapshot().totals)["bytes_sent"] == threads * rounds * 8


async def test_a_socket_shows_the_connections_while_the_loop_stands_still(
    pair: Pair, tmp_path: Path
) -> None:
    client, server = pair
    await client.send(b"123")
    path = tmp_path / "metrics.sock"
    with metrics.serve(path):

        def ask() -> Any:  # in the loop's thread, which meanwhile does nothing else
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as reader:
                reader.settimeout(LIMIT_S)
                reader.connect(str(path))
                return json.loads(b"".join(iter(lambda: reader.recv(1 << 16), b"")))

        seen = ask()
    found = {each["number"]: each for each in seen["connections"]}
    ours, theirs = found[number_of(client)], found[number_of(server)]
    assert ours["bytes_sent"] == 3
    assert ours["peername"] == theirs["sockname"]
    assert theirs["peername"] == list(client.get_extra_info("sockname"))
    assert not path.exists()


@pytest.mark.one_loop
async def test_top_shows_them_in_a_pipe_and_on_a_terminal(
    pair: Pair, address: str, tmp_path: Path
) -> None:
    client, server = pair
    path = str(tmp_path / "metrics.sock")
    command = [sys.executable, "-m", "aiordma", "top", path]
    async with asyncio.timeout(4 * LIMIT_S), stream_pair(address) as ((_, writer), _):
        for _ in range(3):
            await client.send(bytes(1000))
            (await server.recv()).release()
        with metrics.serve(path):
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
            out, err = await process.communicate()
            assert (process.returncode, err) == (0, b"")
            lines = out.decode().splitlines()
            assert "2 connections, 2 streams, 0 datagram endpoints; " in lines[0]
            numbers = {number_of(client), number_of(server), number_of(writer)}
            assert numbers < {int(line.split()[0]) for line in lines[2:]}
            assert f"{address} {client.get_extra_info('peername')[1]}" in out.decode()

            master, slave = pty.openpty()
            termios.tcsetwinsize(slave, (24, 120))
            environment = {**os.environ, "TERM": "xterm"}
            process = await asyncio.create_subprocess_exec(
                *command,
                "--interval",
                "0.1",
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=environment,
            )
            os.close(slave)
            text = b""
            while text.count(b"NUMBER") < 3:
                text += await asyncio.to_thread(os.read, master, 1 << 16)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
            os.close(master)
            assert str(number_of(client)).encode() in text


async def test_requests_and_replies_are_counted_timed_and_traced(address: str) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    ended: list[type[BaseException] | None] = []

    class Tracer:
        def begin(self, operation: str, attributes: Any) -> str:
            told.append((operation, dict(attributes)))
            return operation

        def end(self, begun: str, error: BaseException | None) -> None:
            if begun in {"request", "reply"}:
                ended.append(None if error is None else type(error))

    async def handler(request: aiordma.Request) -> bytes:
        if request.body == b"fail":
            raise KeyError("k")
        return b"done"

    before = metrics.snapshot()
    tracer = Tracer()
    metrics.add_tracer(tracer)
    try:
        async with (
            aiordma.serve_requests(handler, address, 0) as server,
            aiordma.connect(address, server.port) as client,
        ):
            assert await client.request(b"good", timeout=LIMIT_S) == b"done"
            with pytest.raises(aiordma.RequestError):
                await client.request(b"fail", timeout=LIMIT_S)
            await until(lambda: len(ended) == 4, LIMIT_S)
    finally:
        metrics.remove_tracer(tracer)
    peers = {kind: facts["network.peer.address"] for kind, facts in told if kind != "connect"}
    assert peers == dict.fromkeys(("accept", "request", "reply"), address)
    assert sorted(map(str, ended)) == sorted(map(str, [None, None, KeyError, aiordma.RequestError]))
    after = metrics.snapshot()
    for name in ("request_s", "reply_s"):
        was, now = getattr(before, name), getattr(after, name)
        assert (now.count - was.count, now.failed - was.failed) == (1, 1)
        assert now.total_s > was.total_s
