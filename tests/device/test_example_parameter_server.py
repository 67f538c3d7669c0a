"""examples/parameter_server.py: it converges, and goes on without workers that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator

import numpy as np
import pytest

import aiordma
from examples import parameter_server as ps
from tests.device.running import LIMIT_S, Program

pytestmark = [pytest.mark.device, pytest.mark.program]

PROGRAM = "parameter_server.py"


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
    training = ps.Training(200, 4.0 if how == "silent" else LIMIT_S)

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
        with contextlib.suppress(ConnectionError):
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
def server(address: str) -> Iterator[Program]:
    """Goes on for ever."""
    words = ("--workers", "2", "--rounds", "1000000", "--tolerance", "0", "--size", "100")
    with Program(PROGRAM, "serve", "--host", address, *words) as program:
        assert program.line() == f"listening on {address} 18521"
        yield program


@pytest.mark.one_loop
def test_a_killed_worker_and_ends(server: Program, address: str) -> None:
    """A killed worker leaves its place; Ctrl-C ends a worker, and then the server."""
    work = (PROGRAM, "work", "--host", address)
    with Program(*work) as killed, Program(*work) as good:
        server.until(": 2 workers")
        killed.end(signal.SIGKILL)
        server.until(": 1 workers")
        with Program(*work) as third:
            server.until(": 2 workers")
            assert third.end(signal.SIGINT) == (130, "")
        server.until(": 1 workers")
        assert server.end(signal.SIGINT) == (0, "")
        status, error = good.end()
        assert status == 1
        assert error.startswith("parameter_server: the server is gone: ")
        assert error.count("\n") == 1


@pytest.mark.one_loop
def test_a_killed_server(server: Program, address: str) -> None:
    work = (PROGRAM, "work", "--host", address)
    with Program(*work) as first, Program(*work) as second:
        server.until(": 2 workers")
        server.end(signal.SIGKILL)
        for worker in (first, second):
            status, error = worker.end()
            assert status == 1
            assert error.startswith("parameter_server: the server is gone: ")
