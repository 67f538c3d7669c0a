"""Programs over the fabric: the first one of the README, and how long it takes."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fabric.launching import LIMIT_S, launch, launched, outside
from tests.pages import steps

README = Path(__file__).parents[2] / "README.md"
_ROUNDS = 5
_MOST_S = 0.3


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The first program of the README."""
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    path = tmp_path / "echo.py"
    path.write_text(found[1])
    return str(path)


def test_the_program_of_the_readme(program: str) -> None:
    done = launch("--", sys.executable, "-W", "error", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'hello'\n", "")


def test_the_two_programs_of_the_readme() -> None:
    """Its command, word for word, in the checkout."""
    [step] = [
        each
        for block in re.findall(r"^```console\n(.*?)^```$", README.read_text(), re.M | re.S)
        for each in steps(block)
        if "examples/server.py" in each.command
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", step.command],
        cwd=README.parent, env={**outside(), "PATH": path}, capture_output=True, check=False,
        text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, step.lines, "")


def test_it_takes_little_more_than_its_imports(program: str) -> None:
    """The shortest of some runs each, in processor time: other programs take the rest.

    That it waits for nothing shows in the time on the clock, which has to be within a second.
    """

    def seconds(*words: str) -> tuple[float, float]:
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, env=outside(), check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return busy, time.monotonic() - begun

    imports, runs = [], []
    for _ in range(_ROUNDS):
        imports.append(seconds(sys.executable, "-c", "import asyncio, aiordma"))
        runs.append(seconds(*launched("--", sys.executable, program)))
    more, longer = (
        min(run[kind] for run in runs) - min(only[kind] for only in imports) for kind in (0, 1)
    )
    assert more <= _MOST_S, (runs, imports)
    assert longer <= 1, (runs, imports)


_SERVER = """
import asyncio, os, aiordma

async def echo(conn):
    async for message in conn:
        await conn.send(message)

async def main():
    async with aiordma.serve(echo, os.environ["AIORDMA_FABRIC_ADDR"], 0) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
_CLIENT = """
import asyncio, os, sys, aiordma

async def main():
    async with aiordma.connect(os.environ["AIORDMA_FABRIC_ADDR"], int(sys.argv[1])) as conn:
        for size in (1, 4096, 3 << 20):
            await conn.send(bytes(size))
            assert bytes(await conn.recv()) == bytes(size)

asyncio.run(main())
"""
_BOTH = """
import subprocess, sys
server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
try:
    port = server.stdout.readline().strip()
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[2], port]).returncode)
finally:
    server.kill()
"""


def test_between_two_processes_of_a_run() -> None:
    done = launch("--", sys.executable, "-c", _BOTH, _SERVER, _CLIENT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_sees_no_other() -> None:
    """The same address and port in two runs at a time are two places."""
    script = (
        "import asyncio, aiordma, sys\n"
        "async def main():\n"
        "    async with aiordma.listen('10.80.0.1', 18515):\n"
        "        print('ready', flush=True)\n"
        "        sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    words = launched("--", sys.executable, "-c", script)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(words, env=outside(), **options) as one,  # type: ignore[call-overload]
        subprocess.Popen(words, env=outside(), **options) as two,  # type: ignore[call-overload]
    ):
        assert [each.stdout.readline() for each in (one, two)] == ["ready\n"] * 2
        assert [each.communicate("", timeout=LIMIT_S)[0] for each in (one, two)] == [""] * 2
    assert (one.returncode, two.returncode) == (0, 0)


def test_why_rdma_cannot_be_used() -> None:
    code = "import aiordma; print(aiordma.why_unavailable())"
    assert launch("--", sys.executable, "-c", code).stdout == "None\n"
    without = launch("--devices=0", "--", sys.executable, "-c", code).stdout
    assert without.startswith("no RDMA device: ")
