"""What a program pays before its first byte: imports, the first listen and the first connect.

`python -m tests.bench.first ADDRESS ROUNDS` starts two programs in turn, so many times: one listens
and connects to itself by aiordma, and the other by asyncio's streams over TCP; both run on uvloop's
loop.  It prints one JSON object with the processor time of each process from its start to its end,
user and system, in seconds; and by how much that of aiordma is more, in each round.

Both have their bytecode, as the programs of an installed package do, whatever the environment says:
a round before the first one compiles it, and is not counted.

The counted clock has the ratio.  Its seconds are none of a real processor, so the seconds are those
of this machine, if it is idle, over the fabric.  They lack what the kernel and the adapter take,
which the ratio has.  A User-Mode Linux would have these, but there a system call or a page takes
many times what it takes elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

__all__ = ["PROGRAMS", "main"]

_RDMA = """
import asyncio, sys, uvloop
import aiordma

async def main(address):
    async with aiordma.listen(address, 0) as listener:
        accepting = asyncio.create_task(listener.accept())
        async with aiordma.connect(address, listener.port), await accepting:
            pass

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(sys.argv[1]))
"""
_TCP = """
import asyncio, sys, uvloop

async def main(address):
    accepted = asyncio.get_running_loop().create_future()
    take = lambda _, writer: accepted.set_result(writer)
    async with await asyncio.start_server(take, address, 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        for each in writer, await accepted:
            each.close()
            await each.wait_closed()

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(sys.argv[1]))
"""
PROGRAMS = {"RDMA": _RDMA, "TCP": _TCP}


def spent(program: str, address: str, environment: dict[str, str]) -> float:
    """Run a program, and return the seconds of processor time of its process.

    Raises:
        subprocess.CalledProcessError: It has failed.
    """
    command = (sys.executable, "-c", program, address)
    with subprocess.Popen(command, env=environment) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


def measure(address: str, rounds: int) -> dict[str, list[float]]:
    """The seconds of each program in each round, and the difference."""
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(rounds + 1):
            for name, program in PROGRAMS.items():
                seconds = spent(program, address, environment)
                if number:
                    found[name].append(seconds)
    more = [ours - theirs for ours, theirs in zip(*found.values(), strict=True)]
    return {f"{name} s": seconds for name, seconds in found.items()} | {"more s": more}


def main(words: list[str]) -> int:
    """Measure and print; returns the exit status."""
    address, rounds = words
    print(json.dumps(measure(address, int(rounds))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
