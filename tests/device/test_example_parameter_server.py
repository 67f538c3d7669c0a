"""examples/parameter_server.py: it converges, and goes on without workers that are lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

import aiordma
from examples import parameter_server as ps
from tests.device.test_examples import EXAMPLES, LIMIT_S, first_line, start

pytestmark = pytest.mark.device

PROGRAM = str(EXAMPLES / "parameter_server.py")
PORT = "18521"


async def train(address: str, training: ps.Training, workers: int) -> None:
    async with aiordma.serve(training.talk, address, 0) as server:
        tasks = [asyncio.create_task(ps.work(address, server.port)) for _ in range(workers)]
        await training.wait_for_workers(workers)
        await training.train(300, 1e-3)
        await asyncio.gather(*tasks)


def error_of(training: ps.Training) -> float:
    return float(np.abs(training.parameters - ps.truth(training.size)).max())


async def test_it_converges(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    training = ps.Training(200, LIMIT_S)
    assert error_of(training) > 1
    async with asyncio.timeout(LIMIT_S):
        await train(address, training, 3)
    assert error_of(training) < 0.01
    said = capsys.readouterr().out
    assert "round 1: 3 workers" in said
    assert "late" not in said


async def test_the_average_is_of_all_workers(address: str) -> None:
    """A step goes along the mean of the gradients of the data that each worker has."""
    training = ps.Training(50, LIMIT_S)
    async with asyncio.timeout(LIMIT_S), aiordma.serve(training.talk, address, 0) as server:
        tasks = [asyncio.create_task(ps.work(address, server.port)) for _ in range(2)]
        await training.wait_for_workers(2)
        assert (await training.round(1))[0] == 2
        zeros = np.zeros(50, np.float32)
        gradients = [ps.Data(worker, 50).gradient(zeros) for worker in (1, 2)]
        assert np.allclose(training.parameters, -ps.RATE * np.mean(gradients, axis=0), atol=1e-6)
        for worker in list(training.workers):
            await worker.conn.send(ps.END)
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("how", ["silent", "aborts", "no numbers", "leaves"])
async def test_a_bad_worker_does_not_stop_the_others(
    how: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    training = ps.Training(200, 1.0 if how == "silent" else LIMIT_S)

    async def misbehave(port: int) -> None:
        conn = await aiordma.connect(address, port)
        welcome = json.loads(bytes(await conn.recv()))
        await conn.recv()
        match how:
            case "aborts":
                conn.abort()
            case "leaves":
                await conn.close()
            case "no numbers":
                slot = aiordma.RemoteRegion.from_bytes(bytes.fromhex(welcome["gradient"]))
                await conn.write(slot, np.full(200, np.nan, np.float32), imm=1)
                await conn.close()
        with pytest.raises(ConnectionError):
            while True:
                await conn.recv()
        await conn.close()

    async with asyncio.timeout(LIMIT_S), aiordma.serve(training.talk, address, 0) as server:
        bad = asyncio.create_task(misbehave(server.port))
        await training.wait_for_workers(1)
        good = [asyncio.create_task(ps.work(address, server.port)) for _ in range(2)]
        await training.wait_for_workers(3)
        await training.train(300, 1e-3)
        await asyncio.gather(bad, *good)
    assert error_of(training) < 0.01
    assert ("worker 1 is late and left out" in capsys.readouterr().out) == (how == "silent")


# Programs of their own, whatever the tests' loop.


@pytest.fixture
def server(address: str) -> Iterator[subprocess.Popen[str]]:
    """Goes on for ever."""
    words = ("--workers", "2", "--rounds", "1000000", "--tolerance", "0", "--size", "100")
    process = start(PROGRAM, "serve", "--host", address, *words)
    try:
        assert first_line(process) == f"listening on {address} {PORT}\n"
        assert first_line(process) == "waiting for 2 workers\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def await_line(process: subprocess.Popen[str], words: str) -> None:
    while words not in (line := first_line(process)):
        assert line, f"never said {words!r}"


@pytest.mark.one_loop
def test_a_killed_worker_and_ends(server: subprocess.Popen[str], address: str) -> None:
    """A killed worker leaves its place; Ctrl-C ends a worker, and then the server."""
    workers = [start(PROGRAM, "work", "--host", address) for _ in range(2)]
    try:
        await_line(server, ": 2 workers")
        workers[0].kill()
        await_line(server, ": 1 workers")
        workers.append(start(PROGRAM, "work", "--host", address))
        await_line(server, ": 2 workers")
        workers[2].send_signal(signal.SIGINT)
        out, err = workers[2].communicate(timeout=LIMIT_S)
        assert (out, err, workers[2].returncode) == ("worker 3\n", "", 130)
        await_line(server, ": 1 workers")
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=LIMIT_S)
        assert (err, server.returncode) == ("", 0)
        _, err = workers[1].communicate(timeout=LIMIT_S)
        assert workers[1].returncode == 1
        assert err.startswith("parameter_server: the server is gone: ")
        assert err.count("\n") == 1
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate(timeout=LIMIT_S)


@pytest.mark.one_loop
def test_a_killed_server(server: subprocess.Popen[str], address: str) -> None:
    workers = [start(PROGRAM, "work", "--host", address) for _ in range(2)]
    try:
        await_line(server, ": 2 workers")
        server.kill()
        for worker in workers:
            _, err = worker.communicate(timeout=LIMIT_S)
            assert worker.returncode == 1
            assert err.startswith("parameter_server: the server is gone: ")
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate(timeout=LIMIT_S)
