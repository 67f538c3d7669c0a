"""A project outside of the repository, with the wheel in an environment of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from softroce.tests.building import BUILD_S, call_tool, surroundings
from softroce.tests.conftest import LIMIT, REPOSITORY
from softroce.tests.keyboard import screen
from tests.guests.building import build_wheels

pytestmark = [pytest.mark.uml, pytest.mark.timeout(600)]

_PROJECT = """
[project]
name = "my-project"
version = "1"

[tool.pytest.ini_options]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
rdma_leak_check = true
filterwarnings = ["error"]
"""

_LIBRARY = """
async def ask(connection, question):
    await connection.send(question)
    return bytes(await connection.recv())


def never():
    return 1
"""

_TESTS = """
import os

import aiordma
import mine
import pytest


async def test_messages(rdma_pair):
    client, server = rdma_pair
    await server.send(b"answer")
    assert await mine.ask(client, b"question") == b"answer"


async def test_streams(rdma_stream_pair):
    (_, writer), (reader, _) = rdma_stream_pair
    writer.write(b"line" + bytes((10,)))
    assert await reader.readline() == b"line" + bytes((10,))


@pytest.mark.rdma
def test_the_device(rdma_device, rdma_address, tmp_path):
    assert rdma_device.name == os.environ["AIORDMA_SOFTROCE_DEVICE"] + "0"
    assert rdma_address == "10.80.0.1"
    assert not list(tmp_path.iterdir())


async def test_a_server(rdma_address):
    async with aiordma.listen(rdma_address, 0) as listener:
        async with aiordma.connect(rdma_address, listener.port) as client:
            async with await listener.accept() as server:
                await client.send(b"x")
                assert bytes(await server.recv()) == b"x"
"""

_LEAKING = """
import aiordma

kept = []


async def test_before(rdma_pair):
    pass


async def test_leaks(rdma_address):
    kept.append(await aiordma.listen(rdma_address, 0))
    kept.append(await aiordma.connect(rdma_address, kept[0].port))


async def test_after(rdma_pair):
    await rdma_pair[0].send(b"x")
    assert bytes(await rdma_pair[1].recv()) == b"x"
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with both distributions out of a folder of wheels."""
    folder = tmp_path_factory.mktemp("environment")
    wheel, softroce = build_wheels(folder)
    call_tool(sys.executable, "-m", "venv", folder / "venv", cwd=folder, seconds=BUILD_S)
    wanted = (f"{wheel}[pytest]", softroce, "pytest-cov", "pytest-xdist")
    python = folder / "venv/bin/python"
    call_tool(python, "-m", "pip", "install", "-q", *wanted, cwd=folder, seconds=BUILD_S)
    return folder / "venv/bin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in a folder that knows nothing of the repository."""
    folder = tmp_path / "my project"
    (folder / "tests").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "mine.py").write_text(_LIBRARY)
    (folder / "tests/test_mine.py").write_text(_TESTS)
    return folder


@pytest.fixture
def run(environment: Path, project: Path) -> Iterator[Run]:
    """Runs `python -m pytest` in the project."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [environment / "python", "-m", "pytest", *words],
            cwd=project,
            env=surroundings(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3 * LIMIT,
            check=False,
        )

    yield call
    assert not list(project.glob("core*"))


def _cases(report: Path) -> dict[str, set[str]]:
    """The names of the tests, with the kinds of their faults."""
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found.setdefault(case.attrib["name"], set()).update(child.tag for child in case)
    return found


def test_one_command(run: Run, project: Path) -> None:
    done = run("--softroce", "--junitxml=report.xml", "--cov=mine", "--cov-report=term")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert "rdma: rxe at 10.80.0.1 (softroce, engine uml)" in done.stdout
    said = [line for line in done.stderr.splitlines() if line.startswith("softroce: ")]
    assert len(said) == 1
    assert "this session runs where an RDMA device is" in said[0]
    tests = _cases(project / "report.xml")
    assert sorted(tests) == ["test_a_server", "test_messages", "test_streams", "test_the_device"]
    assert not any(tests.values())
    # Of the run in the guest: one function of two has run.
    assert re.search(r"mine\.py +5 +1 +80%", done.stdout), done.stdout


def test_a_test_that_leaks_fails_alone(run: Run, project: Path) -> None:
    (project / "tests/test_leaking.py").write_text(_LEAKING)
    done = run("--softroce=uml", "--junitxml=report.xml", "-o", "rdma_leak_settle=1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ERROR at teardown of test_leaks" in done.stdout
    assert re.search(r"queue pair \d+ of rxe0", done.stdout)
    assert re.search(r"still open: <Listener 10\.80\.0\.1 port \d+", done.stdout)
    faulty = {name for name, faults in _cases(project / "report.xml").items() if faults}
    assert faulty == {"test_leaks"}
    assert "7 passed, 1 error" in done.stdout


def test_options_and_devices(run: Run) -> None:
    words = ("--softroce-args=--memory 800M", "-k", "device or streams", "-q")
    done = run("--softroce=uml", "--softroce-device=siw", *words, "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 2 deselected" in done.stdout
    done = run("--softroce=uml", "-k", "nothing")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    done = run("--softroce=host")
    assert done.returncode == 125
    assert "no RDMA device with an active port" in done.stderr


def test_with_xdist(run: Run, project: Path) -> None:
    """The workers run in the guest, too, and each sees its own leaks alone."""
    (project / "tests/test_leaking.py").write_text(_LEAKING)
    words = ("--junitxml=report.xml", "-o", "rdma_leak_settle=1")
    done = run("--softroce=uml", "-n", "2", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "7 passed, 1 error" in done.stdout
    faulty = {name for name, faults in _cases(project / "report.xml").items() if faults}
    assert faulty == {"test_leaks"}


def test_pdb_in_a_terminal(environment: Path, project: Path) -> None:
    (project / "tests/test_wrong.py").write_text(
        "async def test_wrong(rdma_pair):\n    value = 41\n    assert value == 42\n"
    )
    words = [str(environment / "pytest"), "--softroce", "--pdb", "tests/test_wrong.py"]
    with screen(words, {**surroundings(), "TERM": "xterm"}, directory=project) as there:
        there.until("\\(Pdb\\) ")
        there.type("p value + 1000\r")
        there.until("1041\r\n")
        there.type("q\r")
        there.until("1 failed")
        assert there.end() == 2  # as pytest has it: interrupted
        assert b"\x1b[31m" in there.seen  # colors


def test_the_page(run: Run, project: Path) -> None:
    """The project of docs/pytest.md, as it stands there."""
    text = (REPOSITORY / "docs/pytest.md").read_text()
    (settings,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tests,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (project / "pyproject.toml").write_text(settings)
    (project / "tests/test_mine.py").unlink()
    (project / "tests/test_echo.py").write_text(tests)
    done = run("--softroce")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_without_a_device(run: Run) -> None:
    done = run("-rs")
    assert done.returncode == 0
    assert "4 skipped" in done.stdout
    done = run("--rdma-required")
    assert done.returncode == 1
    assert "RDMA is required here" in done.stdout
