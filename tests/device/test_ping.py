"""`aiordma ping` and `aiordma echo`: in a pipe, in a terminal, and with peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
import aiordma.metrics
from aiordma.cli import echo as echo_module
from aiordma.cli.echo_orders import MAGIC, MOST, STREAM_ORDER, order, pattern
from aiordma.cli.ports import DEFAULT_PORT
from tests.device.commands import (
    COMMAND,
    LIMIT_S,
    Running,
    aiordma_beside,
    running,
)  # fmt: skip
from tests.device.commands import aiordma as command
from tests.device.shared import name_of_device
from tests.device.terminal import CTRL_C, plain, terminal
from tests.native_ends import beside

# Processes of their own, whatever the tests' loop: once on each device is enough.
pytestmark = [pytest.mark.device, pytest.mark.program]

NUMBER = r"\d+\.\d{3}"


@pytest.fixture
def echo(address: str) -> Iterator[Running]:
    """`aiordma echo` at the default port, which has to end well."""
    with running("echo", "--host", address) as server:
        assert server.line() == f"listening on {address} {DEFAULT_PORT}"
        yield server
        if server.process.poll() is None:
            done = server.end(signal.SIGTERM)
            assert (done.status, done.err) == (0, "")


@pytest.fixture
def device(is_siw: bool) -> str:
    return name_of_device(is_siw)


def matches(text: str, *patterns: str) -> None:
    """Each line is like its pattern."""
    lines = text.split("\n")
    assert len(lines) == len(patterns), text
    for line, pattern_ in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern_, line), (line, pattern_)


def summary(sent: int, answered: int, loss: str) -> tuple[str, ...]:
    """The patterns of the lines at the end."""
    figures = (rf"rtt min/avg/max/mdev = {NUMBER}/{NUMBER}/{NUMBER}/{NUMBER} ms",) * bool(answered)
    return (
        "", r"--- \S+ ping statistics ---",
        rf"{sent} messages sent, {answered} answered, {re.escape(loss)}% lost, time \d+ ms",
        *figures, "",
    )  # fmt: skip


# Answers


@pytest.mark.usefixtures("echo")
def test_in_a_pipe(address: str, device: str) -> None:
    done = command("ping", "-c", "3", "-i", "0.05", address)
    assert (done.status, done.err) == (0, "")
    matches(
        done.out,
        rf"PING {address} port {DEFAULT_PORT} by {device}: 56 bytes",
        *(rf"56 bytes from {address}: seq={number} time={NUMBER} ms" for number in (1, 2, 3)),
        *summary(3, 3, "0"),
    )


@pytest.mark.usefixtures("echo")
def test_in_a_terminal_with_ctrl_c(address: str, device: str) -> None:
    with terminal([*COMMAND, "ping", "-i", "0.05", address]) as screen:
        screen.until("seq=3 time=")
        screen.press(CTRL_C)
        assert screen.end() == 0
        assert "\x1b[" in screen.screen, "colors"
        text = plain(screen.screen)
        assert text.startswith(f"PING {address} port {DEFAULT_PORT} by {device}: 56 bytes\n")
        assert f"--- {address} ping statistics ---\n" in text
        counts = r"^(\d+) messages sent, (\d+) answered(?:, (\d+) not yet)?, 0% lost"
        sent = re.search(counts, text, re.M)
        assert sent
        assert int(sent[1]) == int(sent[2]) + int(sent[3] or 0)
        assert re.fullmatch(r"rtt min/avg/max/mdev = .* ms\n", text[text.index("rtt ") :])


@pytest.mark.usefixtures("echo")
def test_a_terminal_without_colors(address: str) -> None:
    with terminal([*COMMAND, "ping", "-c", "1", address], NO_COLOR="1", TERM="dumb") as screen:
        assert screen.end() == 0
        assert "\x1b" not in screen.screen
        assert "1 messages sent, 1 answered" in screen.screen


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_the_summary(address: str, number: signal.Signals) -> None:
    with running("ping", "-i", "0.05", address) as ping:
        assert ping.line().startswith("PING ")
        assert "seq=1 " in ping.line()
        done = ping.end(number)
    assert (done.status, done.err) == (0, "")
    assert "0% lost" in done.out
    assert "rtt min/avg/max/mdev" in done.out


@pytest.mark.usefixtures("echo")
def test_sizes(address: str) -> None:
    for size in (0, 1, 7, 8, 6000, 70_000, MOST):
        done = command("ping", "-q", "-c", "2", "-i", "0.01", "-s", str(size), address)
        assert (done.status, done.err) == (0, ""), size
        matches(done.out, rf"PING .*: {size} bytes", *summary(2, 2, "0"))


@pytest.mark.usefixtures("echo")
def test_for_programs(address: str, device: str) -> None:
    done = command("ping", "--json", "-c", "2", "-i", "0.01", address)
    assert (done.status, done.err) == (0, "")
    begin, first, second, end = map(json.loads, done.out.splitlines())
    assert begin == {
        "event": "begin", "host": address, "address": address, "port": DEFAULT_PORT,
        "device": device, "bytes": 56,
    }  # fmt: skip
    assert [first["seq"], second["seq"]] == [1, 2]
    times = [first["time_ms"], second["time_ms"]]
    assert end["rtt_ms"]["min"] == min(times)
    assert end["rtt_ms"]["max"] == max(times)
    assert end["rtt_ms"]["avg"] == pytest.approx(sum(times) / 2, abs=1e-5)
    assert (end["sent"], end["answered"], end["lost"], end["loss_percent"]) == (2, 2, 0, 0.0)


@pytest.mark.usefixtures("echo")
def test_a_reader_that_has_seen_enough(address: str) -> None:
    words = " ".join([*COMMAND, "ping", "-i", "0.01", address])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} | head -n 2"],
        capture_output=True, check=False, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("\n") == 2


# No answers


def test_no_program_listens(address: str) -> None:
    done = command("ping", "-c", "2", "-i", "0.05", address)
    assert (done.status, done.err) == (1, "")
    lost = rf"lost: {address} port {DEFAULT_PORT}: .*\(no program listens on that port\)"
    matches(done.out, f"seq=1 {lost}", f"seq=2 {lost}", *summary(2, 0, "100"))


def test_ctrl_c_without_an_answer(address: str) -> None:
    with running("ping", "-i", "0.05", address) as ping:
        assert ping.line().startswith("seq=1 lost: ")
        done = ping.end()
    assert (done.status, done.err) == (1, "")
    assert "100% lost" in done.out


@pytest.mark.parametrize(
    ("host", "text"),
    [("localhost", "No such device"), ("no such host", ""), ("host.invalid", "")],
)
def test_no_answer_is_possible(host: str, text: str) -> None:
    done = command("ping", host)
    assert (done.status, done.out) == (1, "")
    assert re.fullmatch(rf"aiordma ping: .*{text}.*\n", done.err), done.err


@pytest.mark.parametrize("node", ["uverbs0", "rdma_cm"])
def test_a_node_that_is_missing(address: str, node: str) -> None:
    path, aside = Path("/dev/infiniband") / node, Path("/dev/infiniband/aside")
    path.rename(aside)
    try:
        done = command("ping", address)
    finally:
        aside.rename(path)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("aiordma ping: rdma_create_event_channel: ")
    assert ("container" if node == "rdma_cm" else "can be reached") in done.err


def test_a_server_of_streams(address: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("served")
    with running("serve", str(folder), "--host", address) as server:
        server.line()
        done = command("ping", address)
    assert (done.status, done.out) == (1, "")
    assert done.err == (
        "aiordma ping: a server of streams listens there, such as `aiordma serve`, not an "
        "`aiordma echo`\n"
    )


# Servers that are no echo


@pytest.mark.parametrize("key", ["the same", "of a folder", "another", "none"])
async def test_a_server_of_requests_with_keys(
    address: str, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = secrets.token_bytes(32)
    file = tmp_path / "2026-11"
    file.write_bytes(secrets.token_bytes(32) if key == "another" else secret)
    (tmp_path / "2026-10").write_bytes(secrets.token_bytes(32))  # it was replaced
    (tmp_path / "..data").write_bytes(b"")  # as the mount of a Secret has it
    config = aiordma.ConnectionConfig(keys=aiordma.Keys({"2026-11": secret}))
    path = tmp_path if key == "of a folder" else file
    words = ("--key-file", str(path)) if key != "none" else ()
    caplog.set_level("WARNING", "aiordma")
    before = aiordma.metrics.snapshot().totals.connections_lost
    async with aiordma.serve_requests(not_asked, address, 0, config=config) as server:
        port = str(server.port)
        done = await aiordma_beside(
            "ping", "--connect", *words, "-c", "3", "-i", "0.05", "--port", port, address
        )
    if key in ("the same", "of a folder"):
        assert (done.status, done.err) == (0, "")
        matches(
            done.out,
            rf"PING {address} port {port} by \S+: connections",
            *(rf"connection to {address}: seq={number} time={NUMBER} ms" for number in (1, 2, 3)),
            *(line.replace("messages sent", "connections") for line in summary(3, 3, "0")),
        )
        assert not caplog.records
    else:
        assert (done.status, done.out) == (1, "")
        assert "--key-file names the key" in done.err
    assert aiordma.metrics.snapshot().totals.connections_lost == before


async def test_a_quiet_probe_says_why_it_failed(address: str) -> None:
    async with aiordma.serve_requests(not_asked, address, 0) as server:
        done = await aiordma_beside("ping", "-c", "1", "-q", "--port", str(server.port), address)
    assert (done.status, done.err) == (1, "")
    assert "it takes requests there" in done.out
    assert "--connect asks such a server" in done.out


async def not_asked(_: object) -> None:
    raise AssertionError


async def test_a_server_that_is_full_answers(address: str) -> None:
    limits = aiordma.ListenerLimits(max_connections=1)
    async with (
        aiordma.serve_requests(not_asked, address, 0, limits=limits) as server,
        aiordma.connect(address, server.port),
    ):
        words = ("ping", "--connect", "--json", "-c", "1", "--port", str(server.port), address)
        done = await aiordma_beside(*words)
    assert (done.status, done.err) == (0, "")
    answer, end = map(json.loads, done.out.splitlines())
    assert (answer["event"], answer["seq"], answer["full"]) == ("answer", 1, True)
    assert (end["sent"], end["answered"]) == (1, 1)


async def test_a_server_whose_loop_stands_still_does_not_answer(address: str) -> None:
    async with aiordma.serve_requests(not_asked, address, 0) as server:
        words = ("--connect", "-c", "1", "-W", "1", "--port", str(server.port), address)
        done = command("ping", *words)  # blocks the loop
    assert (done.status, done.err) == (1, "")
    assert "seq=1 lost: " in done.out


# Peers that misbehave


def test_a_server_that_stops_and_goes_on(address: str, echo: Running) -> None:
    with running("ping", "-i", "0.1", "-W", "3", address) as ping:
        assert ping.line().startswith("PING ")
        assert "seq=1 time=" in ping.line()
        echo.send(signal.SIGSTOP)
        try:
            while "lost" not in (line := ping.line()):
                pass
            assert re.fullmatch(r"seq=\d+ lost: no answer within 3 s", line)
        finally:
            echo.send(signal.SIGCONT)
        while "time=" not in (line := ping.line()):
            assert "no answer within" in line
        done = ping.end()
    assert (done.status, done.err) == (0, "")
    # An answer that came too late was not taken for that of a later message.
    assert "other bytes" not in done.out


def test_a_server_that_comes_back(address: str, echo: Running) -> None:
    with running("ping", "-i", "0.1", address) as ping:
        assert ping.line().startswith("PING ")
        assert "seq=1 time=" in ping.line()
        echo.process.kill()
        echo.process.wait(LIMIT_S)
        while "no program listens" not in ping.line():
            pass
        with running("echo", "--host", address) as again:
            assert again.line().startswith("listening on")
            while "time=" not in ping.line():
                pass
            done = ping.end()
            assert (done.status, done.err) == (0, "")
            assert again.end().status == 0


async def ping_a(handler: object, address: str, *words: str) -> tuple[int, str]:
    """Ping a server of this process; status and output."""
    async with aiordma.serve(handler, address, 0) as server:  # type: ignore[arg-type]
        done = await aiordma_beside("ping", "--port", str(server.port), "-i", "0.05", *words,
                                    address)  # fmt: skip
    assert done.err == ""
    return done.status, done.out


async def test_a_server_that_answers_something_else(address: str) -> None:
    async def other(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(bytes(message)[::-1])

    status, out = await ping_a(other, address, "-c", "2")
    assert status == 1
    assert out.count("lost: other bytes came back") == 2


async def test_a_server_that_answers_twice(address: str) -> None:
    async def twice(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)
            await connection.send(message)

    status, out = await ping_a(twice, address, "-c", "3")
    assert status == 0
    assert "seq=1 time=" in out
    assert "3 messages sent" in out


async def test_a_server_that_ends_at_once(address: str) -> None:
    async def end(connection: aiordma.Connection) -> None:
        """Nothing."""

    status, out = await ping_a(end, address, "-c", "2")
    assert status == 1
    assert out.count(" lost: ") == 2


async def test_a_server_that_never_answers(address: str) -> None:
    async def silent(connection: aiordma.Connection) -> None:
        async for _ in connection:
            pass

    status, out = await ping_a(silent, address, "-c", "2", "-W", "3")
    assert status == 1
    assert out.count("lost: no answer within 3 s") == 2


async def test_the_line_of_late_answers_is_bounded(address: str) -> None:
    connections = 0

    async def silent(connection: aiordma.Connection) -> None:
        nonlocal connections
        connections += 1
        async for _ in connection:
            pass

    status, out = await ping_a(silent, address, "-c", "2500", "-W", "1", "-i", "0.001")
    assert status == 1
    assert out.count(" lost: ") == 2500
    assert connections >= 2
    assert "the peer answers nothing" in out


# The server


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_server_ends_with_clients_there(address: str, number: signal.Signals) -> None:
    with running("echo", "--host", address, "--port", "0", "--json") as server:
        listening = json.loads(server.line())
        assert (listening["event"], listening["host"]) == ("listening", address)
        async with aiordma.connect(address, listening["port"]) as client:
            await client.send(b"12345")
            assert bytes(await client.recv()) == b"12345"
            server.send(number)
            with pytest.raises(aiordma.ConnectionEndedError):
                await client.recv()
        done = server.rest()
    assert (done.status, done.err) == (0, "")
    told = json.loads(done.out)
    assert (told["event"], told["messages"], told["bytes"]) == ("client", 1, 5)


async def test_the_server_tells_of_each_client(address: str, echo: Running) -> None:
    async with aiordma.connect(address, DEFAULT_PORT) as client:
        for data in (b"", b"123"):
            await client.send(data)
            assert bytes(await client.recv()) == data
        name, port = client.get_extra_info("sockname")[:2]
    assert echo.line() == f"client {name} {port}, 2 messages, 3 bytes"


async def test_more_clients_than_it_takes(address: str) -> None:
    with running("echo", "--host", address, "--port", "0", "--max-clients", "1") as server:
        port = int(server.line().split()[-1])
        async with aiordma.connect(address, port) as client:
            await client.send(b"x")
            await client.recv()
            with pytest.raises(aiordma.ConnectionRejectedError, match="has as many connections"):
                await aiordma.connect(address, port)
        assert server.line().startswith("client ")
        assert server.end().status == 0


@pytest.mark.usefixtures("echo")
def test_where_it_cannot_listen(address: str) -> None:
    for host, text in ((address, "another listener has this port"), ("192.0.2.1", "")):
        done = command("echo", "--host", host)
        assert (done.status, done.out) == (1, "")
        assert f"aiordma echo: cannot listen on {host} port {DEFAULT_PORT}: " in done.err
        assert text in done.err


@pytest.mark.usefixtures("echo")
async def test_orders_and_no_orders(address: str) -> None:
    async with aiordma.connect(address, DEFAULT_PORT) as client:

        async def ask(*messages: bytes) -> bytes:
            for message in messages:
                await client.send(message)
            return bytes(await client.recv())

        for garbage in (MAGIC, MAGIC + b'{"do": "dance"}', order("give", 5) + b" " * 200):
            assert await ask(garbage) == garbage
        assert json.loads(await ask(order("look", 1))) == {"error": "no memory is exposed"}
        assert await ask(order("give", 0)) == b""
        assert await ask(order("give", MOST)) == pattern()
        # An order for the next message takes any, also one that would be an order.
        assert json.loads(await ask(order("take"), order("facts")))["size"] == len(order("facts"))
        assert "region" in json.loads(await ask(order("expose")))
        assert json.loads(await ask(order("expose"))) == {"error": "memory is exposed already"}


@pytest.mark.usefixtures("echo")
async def test_memory_for_six_clients_of_a_source(address: str) -> None:
    async def expose(client: aiordma.Connection) -> dict[str, str]:
        await client.send(order("expose"))
        answer: dict[str, str] = json.loads(bytes(await client.recv()))
        return answer

    clients = [await aiordma.connect(address, DEFAULT_PORT) for _ in range(7)]
    answers = [await expose(client) for client in clients]
    assert [list(answer) for answer in answers] == [["region"]] * 6 + [["error"]]
    assert answers[6]["error"] == "memory is exposed to 6 clients already"
    await clients[0].close()
    while "error" in await expose(clients[6]):
        pass  # until the server has seen the end of the first
    for client in clients:
        await client.close()


async def send_on(client: aiordma.Connection, size: int) -> None:
    while True:
        await client.send(bytes(size))


async def test_a_client_that_reads_nothing_is_given_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo_module, "STALL_S", 0.5)
    said: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
    server = echo_module.Echo(lambda event, _, **facts: said.put_nowait((event, facts)), 8)
    async with beside(server.serve(address, 0)), asyncio.timeout(60):
        event, facts = await said.get()
        assert event == "listening"
        for size in (100, 300_000):
            async with aiordma.connect(address, facts["port"]) as client:
                with pytest.raises(aiordma.ConnectionLostError):
                    await send_on(client, size)
            assert (await said.get())[0] == "client"


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("garbage", [STREAM_ORDER.pack(b"x", 1), STREAM_ORDER.pack(b"g", MOST + 1)])
async def test_streams_that_ask_for_nonsense(address: str, garbage: bytes) -> None:
    async with aiordma.connect(address, DEFAULT_PORT) as client:
        await client.send(order("facts"))
        facts = json.loads(bytes(await client.recv()))
    reader, writer = await aiordma.open_connection(address, facts["stream_port"])
    writer.write(garbage)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
