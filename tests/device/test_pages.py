"""The pages of docs/: every block of code and every command is run as it stands there.

`tests/pages.py` tells how; `tests/unit/docs/test_blocks.py` counts the blocks that are not.
"""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from tests.device.ends import connected
from tests.device.meeting import paired
from tests.device.shared import name_of_device
from tests.device.shell import Shell
from tests.pages import Block, blocks, pages, steps

# Programs, whatever the tests' loop: once on each device is enough.
pytestmark = [pytest.mark.device, pytest.mark.program, pytest.mark.timeout(600)]

LIMIT_S = 60
ADDRESS_THERE = "10.80.0.1"
DEVICE_THERE = "rxe0"
RUN = [page for page in pages() if any(block.is_general for block in blocks(page))]


@pytest.fixture
def shell(tmp_path: Path, address: str, is_siw: bool) -> Iterator[Shell]:
    device = name_of_device(is_siw)
    shell = Shell(tmp_path, {ADDRESS_THERE: address, DEVICE_THERE: device})
    yield shell
    shell.kill()


async def run(block: Block, shell: Shell, scope: dict[str, Any]) -> None:
    """Run one block."""
    if block.kind == "console":
        assert not block.around, "a console block has no code around it"
        todo = steps(block.text)
        # A block without output is about the commands: each has to succeed.
        any_output = not any(step.lines for step in todo)
        for step in todo:
            await asyncio.to_thread(shell.run, step, any_output=any_output)
        await asyncio.to_thread(shell.end)
    elif block.name:
        path = shell.folder / block.name
        if block.name.startswith("examples/"):
            assert path.read_text() == block.text, f"{block.name} is another text"
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(shell.here(block.text))
    else:
        code = compile(
            shell.here(block.program), block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        async with asyncio.timeout(LIMIT_S):
            if (coroutine := eval(code, scope)) is not None:
                await coroutine


@pytest.mark.parametrize("page", RUN)
async def test_the_page_tells_what_happens(
    page: str, shell: Shell, address: str, is_siw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shell.folder)
    monkeypatch.syspath_prepend(shell.folder)  # a block imports the files of the page
    known = set(sys.modules)
    # What the code of a note may use.
    scope: dict[str, Any] = {
        "aiordma": aiordma, "asyncio": asyncio, "pytest": pytest, "HOST": address,
        "pair": lambda config=None: paired(address, config), "connected": connected,
    }  # fmt: skip
    for block in blocks(page):
        if not block.is_general or (is_siw and not block.is_for_iwarp):
            continue
        try:
            await run(block, shell, scope)
        except BaseException as exc:
            exc.add_note(f"in the block at {block.where}")
            raise
    scope.clear()
    for name in [name for name in sys.modules if name not in known]:
        if str(shell.folder) in (getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]  # another page may have a file of this name


def test_each_program_is_on_a_page() -> None:
    commands = " ".join(
        block.text for page in RUN for block in blocks(page) if block.kind == "console"
    )
    for name in ("stream_echo", "tls_echo", "aiohttp_hello", "httpx_get", "switched"):
        assert f"python examples/{name}.py" in commands
    for name in ("cp", "perf", "serve"):
        assert f"aiordma {name}" in commands


def test_the_doctor_says_how_many_connections_fit() -> None:
    """The commands of memlock.md, in a shell with the usual limit and without the capability."""
    name = "test_the_doctor_says_how_many_connections_fit"
    (block,) = (
        block for block in blocks("memlock.md") if block.other_test and block.other_test[1] == name
    )
    # root gives its programs every capability, but for those that the bounding set lacks.
    drop = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for step in steps(block.text):
        done = subprocess.run(
            ["prlimit", "--memlock=8388608", *drop, "bash", "-c", step.command],
            env={**os.environ, "PATH": path},
            capture_output=True, check=False, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert (done.stdout.splitlines(), done.stderr) == (step.lines, "")


def test_a_client_without_a_route_tries_again(tmp_path: Path) -> None:
    """The program of timeouts.md, where the connection is not refused: there is no way to it."""
    (block,) = (block for block in blocks("timeouts.md") if block.name == "squares.py")
    (tmp_path / block.name).write_text(block.text)
    client = subprocess.Popen(
        [sys.executable, block.name, "192.0.2.1"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert client.stdout is not None
        for pause in ("0.1", "0.2"):
            line = client.stdout.readline()
            assert "ENETUNREACH" in line
            assert line.endswith(f"again in {pause} s\n")
    finally:
        client.kill()
        client.communicate()


def test_a_subscriber_that_cannot_be_added_is_told_why(tmp_path: Path, address: str) -> None:
    """The programs of fan-out.md, with a subscriber that has forgotten its `recv_depth`."""
    files = {block.name: block.text for block in blocks("fan-out.md") if block.name}
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("recv_depth=1", ""))
    publisher = subprocess.Popen(
        [sys.executable, "publisher.py", address],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert publisher.stdout is not None
        assert publisher.stdout.readline().startswith("listening on")
        done = subprocess.run(
            [sys.executable, "subscriber.py", address],
            cwd=tmp_path, capture_output=True, check=False, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    finally:
        publisher.kill()
        publisher.communicate()
    assert done.returncode == 1
    assert "with ConnectionConfig(recv_depth=1)" in done.stderr.splitlines()[-1]
