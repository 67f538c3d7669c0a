"""`aiordma doctor PEER`: the way there, and the step at which it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma.cli import doctor
from aiordma.cli.echo import Echo, Orders
from aiordma.cli.echo_orders import parse_order
from aiordma.cli.ports import DEFAULT_PORT
from tests.device.commands import COMMAND, Done, aiordma_beside, running
from tests.device.commands import aiordma as command
from tests.device.shared import name_of_device
from tests.device.terminal import plain, terminal

pytestmark = [pytest.mark.device, pytest.mark.program]

STEPS = ("messages there", "messages back", "reads", "writes", "streams there", "streams back")
# Long enough to connect on a busy machine, short enough to wait for.
SHORT = ("--timeout", "4")


def checks(done: Done) -> dict[str, dict[str, str]]:
    """The checks of the peer, by name."""
    assert done.err == ""
    told = json.loads(done.out)
    assert told["ok"] is (done.status == 0)
    found = {check["name"]: check for check in told["checks"]}
    assert list(found)[: len(doctor.CHECKS)] == list(doctor.CHECKS)
    return {name: check for name, check in found.items() if name not in doctor.CHECKS}


def test_all_is_well(address: str, is_siw: bool) -> None:
    device = name_of_device(is_siw)
    with running("echo", "--host", address) as echo:
        echo.line()
        done = command("doctor", address)
        assert (done.status, done.err) == (0, "")
        *_, peer, first, second, third, fourth, fifth, sixth, verdict = done.out.splitlines()
        assert peer.startswith(
            f"OK    peer                {address} port {DEFAULT_PORT} by {device}"
        )
        lines = (first, second, third, fourth, fifth, sixth)
        assert lines == tuple(f"OK    {name:20}1 B to 1 MiB" for name in STEPS)
        assert verdict == f"RDMA with {address} can be used: 0 failed, 0 warnings"
        found = checks(command("doctor", "--json", address))
        assert list(found) == ["peer", *STEPS]
        assert {check["status"] for check in found.values()} == {"OK"}
        with terminal([*COMMAND, "doctor", address]) as screen:
            assert screen.end() == 0
            assert "\x1b[32mOK" in screen.screen
            assert plain(screen.screen).splitlines()[-1] == verdict
        assert echo.end().status == 0


def test_no_program_listens(address: str) -> None:
    done = command("doctor", "--json", address)
    assert done.status == 1
    found = checks(done)
    assert list(found) == ["peer"]
    assert "no program listens on that port" in found["peer"]["seen"]
    assert found["peer"]["advice"] == "start `aiordma echo` there, or name its port by --port"


def test_a_name_that_does_not_resolve() -> None:
    done = command("doctor", "--json", "host.invalid")
    assert done.status == 1
    assert list(checks(done)) == ["peer"]


def test_a_host_that_does_not_answer(address: str) -> None:
    other = address.rpartition(".")[0] + ".99"
    found = checks(command("doctor", "--json", *SHORT, other))
    assert found["peer"]["status"] == "FAIL"
    assert "within 4.0 s" in found["peer"]["seen"]


def test_with_serve(address: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("served")
    with running("serve", str(folder), "--host", address) as server:
        server.line()
        done = command("doctor", "--json", address)
        assert "too long" in server.line()
        assert server.end().status == 0
    assert done.status == 0
    found = checks(done)
    assert {name: check["status"] for name, check in found.items()} == {
        "peer": "OK", "request": "OK", "more": "SKIP"
    }  # fmt: skip
    assert all(name in found["more"]["seen"] for name in STEPS)


Handler = Callable[[aiordma.Connection], Awaitable[None]]


async def examine(handler: Handler, address: str) -> dict[str, dict[str, str]]:
    """Examine a server of this process."""
    async with aiordma.serve(handler, address, 0) as server:
        words = ("doctor", "--json", *SHORT, "--port", str(server.port), address)
        return checks(await aiordma_beside(*words))


async def test_with_a_server_that_only_sends_back(address: str) -> None:
    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    found = await examine(echo, address)
    assert (found["peer"]["status"], found["there and back"]["status"]) == ("OK", "OK")
    assert found["more"]["status"] == "SKIP"


async def test_with_a_server_that_says_nothing(address: str) -> None:
    async def silent(connection: aiordma.Connection) -> None:
        async for _ in connection:
            pass

    found = await examine(silent, address)
    assert list(found) == ["peer"]
    assert "connected to" in found["peer"]["seen"]
    assert "nothing came back within 4 s" in found["peer"]["seen"]


@pytest.mark.parametrize("answer", [b"", b"\x1b[31mred\n", b"[1]", b'{"aio": 1}', b"x" * 100_000])
async def test_with_a_server_that_says_something_else(address: str, answer: bytes) -> None:
    async def strange(connection: aiordma.Connection) -> None:
        async for _ in connection:
            await connection.send(answer)

    found = await examine(strange, address)
    assert list(found) == ["peer", "more"]
    assert found["peer"]["status"] == "WARN"
    assert "no `aiordma echo`" in found["peer"]["seen"]
    assert len(found["peer"]["seen"]) < 400


async def test_with_a_server_that_ends_each_connection(address: str) -> None:
    async def end(connection: aiordma.Connection) -> None:
        """Nothing."""

    found = await examine(end, address)
    assert list(found) == ["peer"]
    assert found["peer"]["status"] == "FAIL"


async def test_with_a_server_of_requests(address: str) -> None:
    async def answer(request: aiordma.Request) -> bytes:
        return bytes(request.body)

    async with aiordma.serve_requests(answer, address, 0) as server:
        words = ("doctor", "--json", *SHORT, "--port", str(server.port), address)
        found = checks(await aiordma_beside(*words))
    assert found["peer"]["status"] == "WARN"
    assert "it takes requests there" in found["peer"]["seen"]
    assert "`aiordma echo`" in found["peer"]["advice"]
    assert found["more"]["status"] == "SKIP"


@pytest.mark.parametrize("key", ["none", "another", "the same"])
async def test_with_a_server_with_keys(address: str, key: str, tmp_path: Path) -> None:
    config = aiordma.ConnectionConfig(keys=aiordma.Keys({"a": b"x" * 32}))
    file = tmp_path / "a"
    file.write_bytes((b"x" if key == "the same" else b"y") * 32)
    option = () if key == "none" else ("--key-file", str(file))

    async def echo(connection: aiordma.Connection) -> None:
        assert key == "the same", "without it a client comes in"
        async for message in connection:
            await connection.send(message)

    async with aiordma.serve(echo, address, 0, config=config) as server:
        words = ("doctor", "--json", *SHORT, *option, "--port", str(server.port), address)
        found = checks(await aiordma_beside(*words))
    peer = found["peer"]
    if key == "none":
        assert (peer["status"], list(found)) == ("WARN", ["peer", "more"])
        assert "a server with keys" in peer["seen"]
        assert "--key-file" in peer["advice"]
    elif key == "another":
        assert (peer["status"], list(found)) == ("FAIL", ["peer"])
        assert "no such key" in peer["seen"]
        assert "--key-file" in peer["advice"]
    else:
        assert (peer["status"], found["there and back"]["status"]) == ("OK", "OK")


class Breaking(Orders):
    """Carries out orders but for one, with which something else is done."""

    word = ""
    at = 0
    fault: Callable[[Orders, Any], Awaitable[None]]

    def __init__(self, connection: aiordma.Connection, *rest: Any) -> None:
        super().__init__(connection, *rest)
        self.connection = connection

    async def obey(self, order: tuple[str, int] | None, message: Any) -> None:
        word, size = order or ("take", len(message))
        if word == self.word and size >= self.at:
            self.takes = False
            await type(self).fault(self, size)
        else:
            await super().obey(order, message)


async def examine_breaking(
    address: str, word: str, at: int, fault: Callable[[Any, int], Awaitable[None]]
) -> dict[str, dict[str, str]]:
    """Examine an echo that has a fault from a size on."""
    kind = type("Kind", (Breaking,), {"word": word, "at": at, "fault": fault})
    echo = Echo(lambda *_, **__: None, 8)

    async def handler(connection: aiordma.Connection) -> None:
        async with contextlib.AsyncExitStack() as leases:
            orders = kind(connection, echo, leases)
            async for message in connection:
                found = None if orders.takes else parse_order(message)
                assert orders.takes or found
                await orders.obey(found, message)

    return await examine(handler, address)


async def abort(orders: Breaking, _: int) -> None:
    orders.connection.abort()


async def hang(orders: Breaking, _: int) -> None:
    await asyncio.Event().wait()


async def change(orders: Breaking, size: int) -> None:
    await orders.connection.send(bytes(size))


async def lie(orders: Breaking, size: int) -> None:
    await orders.connection.send(json.dumps({"size": size, "crc32": 0}).encode())


async def babble(orders: Breaking, _: int) -> None:
    await orders.connection.send(b'{"region": "00"}')


@pytest.mark.parametrize(
    ("word", "at", "fault", "step", "words"),
    [
        ("take", 4096, abort, "messages there", "4 KiB: the connection is lost"),
        ("take", 4096, hang, "messages there", "4 KiB: nothing came back within 4 s; up to 1 KiB"),
        ("take", 64, lie, "messages there", "64 B: the peer got other bytes"),
        ("give", 1 << 20, change, "messages back", "1 MiB: other bytes came"),
        ("give", 1, hang, "messages back", "1 B: nothing came back within 4 s; no size passed"),
        ("expose", 0, babble, "reads", "the peer named its memory wrongly"),
        ("look", 16384, lie, "writes", "16 KiB: the peer got other bytes"),
    ],
)
async def test_the_step_that_breaks(
    address: str, word: str, at: int, fault: Any, step: str, words: str
) -> None:
    found = await examine_breaking(address, word, at, fault)
    assert found["peer"]["status"] == "OK"
    assert found[step]["status"] == "FAIL"
    assert words.split(": ")[0] in found[step]["seen"]
    if fault is not abort:
        assert words in found[step]["seen"]
    others = {name: check["status"] for name, check in found.items() if name != step}
    # This echo has no streams, and a fault of `expose` is one of two steps.
    bad = {"streams there", "streams back"} | ({"writes"} if word == "expose" else set())
    assert {name for name, status in others.items() if status == "FAIL"} == bad
    assert ("ping -M do" in found[step]["advice"]) is (fault is hang and at == 4096 and is_roce())


def is_roce() -> bool:
    return not aiordma.devices()[0].transport.name.startswith("IWARP")
