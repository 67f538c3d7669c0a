"""Waits by event and by polling, beside ib_send_lat: python -m tests.bench.waiting [ROUNDS] [CPUS].

The echo of `plain_peer`, 64 bytes, at both ends with the same `wait`.  With two processors the
clock is that of the wall, because a clock that counts instructions counts those of both processors
one after the other.  So figures are medians over rounds that take turns, and only their ratios
within one run mean anything.  With one processor the clock counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import aiordma
from tests.bench.guest import FIRST_PORT, MARK, load, run
from tests.bench.jobs import LOOPS, WAITS, Job, perftest
from tests.bench.parse import PARSERS
from tests.bench.plain_peer import LOOPS as MAKERS
from tests.bench.plain_peer import SMALL, echo, exchange

_TRIPS, _WARM_UP = 300, 50
#: By the number of processors: the default, and a bound of which the emulated machine, which is
#: slow, needs a fraction for an answer.
_SPINS_US = {1: (50,), 2: (2000,)}


async def _serve(config: aiordma.ConnectionConfig, address: str, port: int) -> None:
    listening = aiordma.listen(address, port, config=config)
    async with listening as listener, await listener.accept() as conn:
        await echo(conn)


async def _use(config: aiordma.ConnectionConfig, address: str, port: int) -> None:
    async with aiordma.connect(address, port, config=config) as conn:
        await exchange(conn, bytes(SMALL), _WARM_UP)
        begun, used = time.perf_counter(), time.process_time()
        await exchange(conn, bytes(SMALL), _TRIPS)
        took, used = time.perf_counter() - begun, time.process_time() - used
    each = 1e6 / _TRIPS / 2
    print(json.dumps({"us": took * each, "cpu us": used * each}))


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, wait, spin_us, loop, address, port = words
    config = aiordma.ConnectionConfig(wait=wait, spin_us=int(spin_us))
    end = (_serve if role == "server" else _use)(config, address, int(port))
    with asyncio.Runner(loop_factory=MAKERS[loop]) as runner:
        runner.run(end)
    return 0


def jobs(cpus: int) -> list[Job]:
    """The programs; on one processor those of perftest that poll would starve each other."""
    found = [perftest("ib_send_lat", "-e", "-s", "64", "-n", str(_TRIPS), name="ib_send_lat -e")]
    if cpus > 1:
        found.append(perftest("ib_send_lat", "-s", "64", "-n", str(_TRIPS), name="ib_send_lat"))
    for loop in LOOPS:
        for wait in WAITS:
            for spin_us in _SPINS_US[cpus] if wait == "spin" else _SPINS_US[cpus][-1:]:
                client, server = (
                    ("python:tests.bench.waiting", role, wait, str(spin_us), loop, "{address}",
                     "{port}")
                    for role in ("client", "server")
                )  # fmt: skip
                name = f"{wait} {spin_us} us" if wait == "spin" else wait
                found.append(Job(f"echo, {name}, {loop}", "numbers", client, server))
    return found


def measure(rounds: int, cpus: int) -> None:
    """In the guest: run all jobs in turn, and print what they have found."""
    todo = jobs(cpus)
    modules = load([job.plan() for job in todo])
    results: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for place, job in enumerate(todo):
            told = run(job.plan(), FIRST_PORT + number * len(todo) + place, modules)
            if told["error"]:
                print(job.name, told, flush=True)
                continue
            for name, values in PARSERS[job.parse](told["client"]).items():
                results.setdefault(job.name, {}).setdefault(name, []).extend(values)
    print(MARK + json.dumps(results), flush=True)


def report(results: dict[str, dict[str, list[float]]]) -> None:
    """Print the table."""
    base = median(results.get("ib_send_lat", results["ib_send_lat -e"])["us"])
    for name, figures in results.items():
        times = figures["us"]
        low, _, high = quantiles(times, n=4) if len(times) > 1 else times * 3
        used = f"{median(figures['cpu us']):.1f}" if "cpu us" in figures else ""
        middle = median(times)
        print(f"| {name} | {middle:.1f} | {low:.0f} to {high:.0f} | {middle / base:.2f} | {used} |")


def begin(rounds: int = 9, cpus: int = 2) -> None:
    """Run `measure` in a guest."""
    engine = ("--counted",) if cpus == 1 else ("--cpus", str(cpus))
    inside = (sys.executable, "-m", "tests.bench.waiting", "inside", str(rounds), str(cpus))
    with tempfile.TemporaryFile("w+") as out:
        subprocess.run(
            (sys.executable, "-m", "aiordma_softroce", "--engine", "qemu", *engine,
             "--timeout", "3000", "--", *inside),
            cwd=Path(__file__).resolve().parents[2], stdout=out, check=True, env=os.environ,
        )  # fmt: skip
        out.seek(0)
        for line in out:
            if line.startswith(MARK):
                report(json.loads(line.removeprefix(MARK)))
            else:
                print(line, end="")


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        measure(int(sys.argv[2]), int(sys.argv[3]))
    else:
        begin(*map(int, sys.argv[1:]))
