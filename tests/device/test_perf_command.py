"""`aiordma perf` where a device is: each test, each interface, in one command and in two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma.cli.__main__ import main
from aiordma.cli.perf import server as serving
from aiordma.cli.perf import sides
from aiordma.cli.perf.client import measure
from aiordma.cli.perf.control import Control, PerfError
from aiordma.cli.perf.options import ALL_SIZES, APIS, METRICS, TESTS, Plan
from aiordma.cli.perf.server import serve
from tests.device.shared import IS_SIW, name_of_device
from tests.device.stepping import Steps, for_every_step, run_canceled

pytestmark = [pytest.mark.device, pytest.mark.slow]

LIMIT_S = 60
COMMAND = [sys.executable, "-W", "error", "-m", "aiordma", "perf"]
LAT = ("t_min", "percentile_50", "percentile_90", "percentile_99", "percentile_99.9", "t_max")


def check(document: dict[str, Any]) -> None:
    """Whether the figures can be true."""
    info = document["test_info"]
    assert info["device"] == name_of_device(IS_SIW)
    for figures in document["results"]:
        count = figures["n_iterations"]
        assert count > 0
        if info["metric"] == "lat":
            order = [figures[name] for name in LAT]
            assert order == sorted(order)
            assert 0 < figures["t_min"] <= figures["t_avg"] <= figures["t_max"] < 10e6
            assert figures["t_typical"] == figures["percentile_50"]
        else:
            assert 0 < figures["BW_average"] <= figures["BW_peak"]
            rate = count / figures["seconds"]
            assert figures["MsgRate"] * 1e6 == pytest.approx(rate, rel=0.01, abs=1e-3)
            average = rate * figures["MsgSize"] / (1 << 20)
            assert figures["BW_average"] == pytest.approx(average, rel=0.01, abs=1e-6)
        for side in ("client", "server"):
            used = figures["cpu_us_per_message"][side]
            assert used["user"] >= 0
            assert used["system"] >= 0


# Both ends in this process and on one loop: what they measure


async def measured(address: str, test: str, metric: str, **options: Any) -> list[dict[str, Any]]:
    """The figures of both ends, which are right in themselves."""
    plan = Plan.make(test, metric, timeout_s=LIMIT_S, **options)
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    facts: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def listening(_: str, number: int) -> None:
        port.set_result(number)

    server = asyncio.create_task(serve(address, 0, loop=loop, listening=listening))
    try:
        await measure(
            plan, address, await port, loop=loop, gbits=False,
            begun=facts.append, measured=rows.append,
        )  # fmt: skip
        async with asyncio.timeout(LIMIT_S):
            await server
    finally:
        server.cancel()
        await asyncio.wait([server])
        if not server.cancelled():
            server.exception()  # the client has said it
    assert facts[0]["server_loop"] == loop
    check({"test_info": {"metric": metric, **facts[0]}, "results": rows})
    for row in rows:
        assert (row["loop"], row["wait"], row["api"]) == (loop, plan.wait, plan.api)
    return rows


def refused_by_iwarp(test: str, metric: str, api: str) -> bool:
    """It has no atomics, and nothing that holds back a sender whose messages find no receive."""
    return test == "atomic" or (test == "send" and metric != "lat" and api == "native")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("test", TESTS)
async def test_each_test(address: str, test: str, metric: str, is_siw: bool) -> None:
    for api in APIS:
        options: dict[str, Any] = {"api": api, "iters": 27, "warm_up": 3}
        if metric != "lat":
            options["tx_depth"] = 16
        try:
            Plan.make(test, metric, **options)
        except ValueError:
            continue  # not an interface for this test
        if is_siw and refused_by_iwarp(test, metric, api):
            with pytest.raises(PerfError, match="siw0 is iWARP"):
                await measured(address, test, metric, **options)
            continue
        [figures] = await measured(address, test, metric, **options)
        assert figures["n_iterations"] == 27  # no multiple of the list
        size = {"lat": 2, "bw": 65536, "rate": 64}[metric]
        assert figures["MsgSize"] == (8 if test == "atomic" else size)


@pytest.mark.parametrize("wait", ["spin", "adaptive"])
@pytest.mark.parametrize("test", ["send", "read"])
async def test_each_way_to_wait(address: str, test: str, wait: str, is_siw: bool) -> None:
    few: dict[str, Any] = {"api": "native", "wait": wait, "iters": 10, "warm_up": 0}
    await measured(address, test, "lat", size=5000, **few)
    if not (is_siw and refused_by_iwarp(test, "bw", "native")):
        await measured(address, test, "bw", tx_depth=4, **few)


@pytest.mark.parametrize("api", ["native", "connection"])
async def test_several_connections(address: str, api: str, is_siw: bool) -> None:
    for test in ("send", "write"):
        if is_siw and refused_by_iwarp(test, "rate", api):
            continue
        options: dict[str, Any] = {"api": api, "qps": 4, "tx_depth": 8, "iters": 25, "warm_up": 1}
        [figures] = await measured(address, test, "rate", **options)
        assert figures["n_iterations"] == 100


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("test", "metric", "api"),
    [("send", "lat", "native"), ("read", "bw", "native"), ("stream", "bw", "protocol")],
)
async def test_all_sizes(address: str, test: str, metric: str, api: str) -> None:
    rows = await measured(address, test, metric, api=api, all_sizes=True, iters=2, warm_up=0)
    assert [figures["MsgSize"] for figures in rows] == list(ALL_SIZES)


@pytest.mark.one_device
@pytest.mark.parametrize("test", ["send", "write", "stream"])
async def test_a_duration(address: str, test: str) -> None:
    api = "connection" if test == "send" else None
    [figures] = await measured(address, test, "bw", api=api, duration_s=0.3, warm_up=3)
    assert 0.3 <= figures["seconds"] < 10
    [figures] = await measured(address, test, "lat", duration_s=0.1, warm_up=3)
    assert figures["n_iterations"] > 1


# One command


def test_one_command(address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    words = ["-n", "10", "-W", "1", "--local", address, "-U", "--json", str(path)]
    assert main(["perf", "read", "lat", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.split() for line in out.splitlines()]
    at = next(i for i, line in enumerate(lines) if line[:1] == ["#bytes"])
    assert lines[at + 1][:2] == ["2", "10"]
    assert len(lines[at + 1]) == 9
    document = json.loads(path.read_text())
    check(document)
    assert len(document["results"][0]["samples_ns"]) == 10
    words = ["-n", "10", "-t", "4", "-s", "100", "--local", address, "--loop", "uvloop"]
    assert main(["perf", "write", "bw", *words, "--report_gbits", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["test_info"]["bw_unit"] == "Gb/sec"
    assert document["test_info"]["loop"] == document["test_info"]["server_loop"] == "uvloop"


# Two commands


@contextlib.contextmanager
def server(*words: str, status: int = 0) -> Iterator[int]:
    """A server; its port.  It has to end by itself."""
    process = subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        assert line[:2] == ["listening", "on"], line
        yield int(line[-1])
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status, err
        assert (err == "") == (status == 0), err
    finally:
        process.kill()
        process.communicate()


@pytest.mark.program
def test_two_commands(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with server("--host", address, "-p", "0", "--loop", "uvloop") as port:
        words = ["perf", "write", "bw", address, "-p", str(port), "-n", "20", "-t", "8"]
        assert main([*words, "--json", "-"]) == 0
        document = json.loads(capsys.readouterr().out)
        check(document)
        info = document["test_info"]
        assert (info["loop"], info["server_loop"]) == ("asyncio", "uvloop")


def test_where_nobody_listens(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "send", "lat", address, "-p", "18599"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aiordma perf: ")


@pytest.mark.program
async def test_a_client_of_another_kind(address: str) -> None:
    with server("--host", address, "-p", "0", status=1) as port:
        async with aiordma.connect(address, port) as conn:
            await conn.send(b"good morning")
            assert "no aiordma perf" in bytes(await conn.recv()).decode()


@pytest.mark.program
async def test_a_client_that_asks_for_nonsense(address: str) -> None:
    with server("--host", address, "-p", "0", status=1) as port:
        async with aiordma.connect(address, port) as conn:
            await conn.send(json.dumps({"plan": {"test": "sell"}}).encode())
            assert "error" in json.loads(bytes(await conn.recv()))


async def figures_of(port: int, address: str, plan: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    await measure(
        plan, address, port, loop="asyncio", gbits=False,
        begun=lambda _: None, measured=rows.append,
    )  # fmt: skip
    return rows


DEEP = "[" * 50_000


def as_text(words: Any) -> bytes:
    return (words if isinstance(words, str) else json.dumps(words)).encode()


ANSWERS: list[tuple[str, str, list[Any]]] = [
    ("send", "connection", ["", "[]", "17", DEEP, "NaN", {}, {"error": ""}, {"error": 5}]),
    ("send", "connection", [{"at": at} for at in (None, 5, {}, {"port": "x"}, {"port": 0})]),
    ("send", "native", [{"at": []}, {"at": {"port": 1 << 70}}, {"at": {"port": -1}}]),
    ("stream", "streams", [{"at": {"port": 1e300}}, {"at": {"port": True}}]),
    ("stream", "protocol", [{"at": {"port": 65536}}, {"at": {"port": "18515"}}]),
    (
        "send",
        "connection",
        [{"at": {"port": 1}, "loop": 5}, {"at": {"port": 1}, "loop": "\x1b[2J"}],
    ),
]


@pytest.mark.one_device
@pytest.mark.parametrize(("test", "api", "answers"), ANSWERS)
async def test_a_server_that_says_anything(
    address: str, test: str, api: str, answers: list[Any]
) -> None:
    plan = Plan.make(test, "lat", api=api, iters=3, warm_up=0, timeout_s=LIMIT_S)
    async with aiordma.listen(address, 0) as listener:
        for answer in answers:
            asking = asyncio.create_task(figures_of(listener.port, address, plan))
            async with await listener.accept() as conn:
                (await conn.recv()).release()
                await conn.send(
                    (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                )
                with pytest.raises(PerfError, match="no aiordma perf"):
                    await asking


class Liar:
    """A side whose words about itself are another's."""

    def __init__(self, side: Any, **words: Any) -> None:
        self._side = side
        self._words = words

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    async def accept(self) -> Any:
        await self._side.accept()
        return self._words


@pytest.mark.one_device
@pytest.mark.parametrize("lent", [None, [], "x", [5], [[1, 2, 3]], ["zz"], [["1", 2]], [[1, -1]]])
@pytest.mark.parametrize(("api", "key"), [("native", "memory"), ("connection", "regions")])
async def test_a_server_that_lends_nonsense(
    address: str, monkeypatch: pytest.MonkeyPatch, api: str, key: str, lent: Any
) -> None:
    make = sides.server_side
    monkeypatch.setattr(serving, "server_side", lambda plan: Liar(make(plan), **{key: lent}))
    with pytest.raises(PerfError, match="no aiordma perf"):
        await measured(address, "read", "lat", api=api, iters=3, warm_up=0)


async def test_a_server_that_counts_wrong(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say = Control.say
    for used in ("much", -1, 1e300, None):

        async def lie(self: Control, used: Any = used, **words: Any) -> None:
            await say(self, **{**words, "user": used} if "user" in words else words)

        monkeypatch.setattr(Control, "say", lie)
        with pytest.raises(PerfError, match="no aiordma perf"):
            await measured(address, "send", "lat", iters=3, warm_up=0)


@pytest.mark.one_device
@pytest.mark.parametrize("end", ["client", "server"])
@pytest.mark.parametrize(
    ("test", "api"),
    [("send", "native"), ("read", "connection"), ("stream", "streams"), ("stream", "protocol")],
)
async def test_a_close_that_is_canceled_leaves_nothing_open(
    address: str, late: bool, test: str, api: str, end: str
) -> None:
    plan = Plan.make(test, "lat", api=api, iters=3, warm_up=0, timeout_s=LIMIT_S)

    async def scenario(steps: Steps) -> None:
        server, client = sides.server_side(plan), sides.client_side(plan, address)
        at = await server.listen(address)
        accepting = asyncio.create_task(server.accept())
        await client.connect(at)
        await client.meet(await accepting)
        await server.start(plan.sizes[0], plan.iters)
        first, other = (client, server) if end == "client" else (server, client)
        await run_canceled(first.close(), steps)
        await other.close()

    assert await for_every_step(scenario, late=late) >= 1


@pytest.mark.program
@pytest.mark.parametrize(
    "words",
    [DEEP, {"plan": {"timeout_s": 10**400}}, {"run": 3}, {"run": [], "count": 1},
     {"run": 2, "count": -1}, {"run": 2, "count": "x"}, {"run": 2, "count": 1, "ran": [1]}],
)  # fmt: skip
async def test_a_client_that_says_anything(address: str, words: Any) -> None:
    plan = Plan.make("send", "lat", iters=3, warm_up=0, timeout_s=LIMIT_S).to_wire()
    with server("--host", address, "-p", "0", status=1) as port:
        async with aiordma.connect(address, port) as conn:
            if isinstance(words, str) or "plan" in words:
                if isinstance(words, dict):
                    words = {"plan": {**plan, **words["plan"]}}
                await conn.send(as_text(words))
            else:
                await conn.send(json.dumps({"plan": plan}).encode())
                at = json.loads(bytes(await conn.recv()))["at"]
                async with aiordma.connect(address, at["port"]):
                    (await conn.recv()).release()
                    ran = words.pop("ran", None)
                    await conn.send(json.dumps(words).encode())
                    if ran is not None:
                        (await conn.recv()).release()
                        await conn.send(json.dumps({"ran": ran}).encode())
            error = json.loads(bytes(await conn.recv()))["error"]
            assert "no aiordma perf" in error or "not a test" in error


def _child(pid: int) -> int:
    """The one child of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            words = status.read_text().rpartition(")")[2].split()
            if int(words[1]) == pid:
                found.append(int(status.parent.name))
    [child] = found
    return child


@pytest.mark.program
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_its_own_server_ends_with_it(address: str, number: int) -> None:
    process = subprocess.Popen(
        [*COMMAND, "stream", "lat", "--local", address, "-D", "600"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "listening" not in next(process.stdout)  # its server does, and it is measuring
        end = os.pidfd_open(_child(process.pid))
        try:
            process.send_signal(number)
            status = process.wait(LIMIT_S)
            assert status == (130 if number == signal.SIGINT else -number)
            assert select.select([end], [], [], LIMIT_S)[0], "the server goes on"
        finally:
            os.close(end)
    finally:
        process.kill()
        process.communicate()
