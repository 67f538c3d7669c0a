"""docs/softroce-projects.md: tests of a C, a Rust and a Go project, and programs of rdma-core."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from softroce.tests.conftest import REPOSITORY, Runner
from softroce.tests.programs import LISTENING, RACED
from tests.pages import blocks, steps

pytestmark = [pytest.mark.uml, pytest.mark.timeout(600)]

PAGE = "softroce-projects.md"
TEXT = (REPOSITORY / "docs" / PAGE).read_text()
_FILE = re.compile(r"`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| [^|]+ \|$", re.MULTILINE)
_LIMIT_S = 300.0
#: Software iWARP refuses a server that speaks first and too soon, as those of ucmatose and rstream
#: may: then both are run again.
_TOO_SOON = r"RDMA_CM_EVENT_CONNECT_ERROR, error: -22\|rconnect: Invalid argument"
_ATTEMPTS = 20


def _run(section: str, test: str, folder: Path) -> str:
    """Make the files of a section of the page, run the commands of a test, return their output.

    Standard error is kept apart: the runner copies the two as they come, so that a line of the one
    may come in the middle of a line of the other.
    """
    text = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, section
    for name, body in _FILE.findall(text):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body)
    todo = [step.command for block in blocks(PAGE) if (block.other_test or ("", ""))[1] == test
            for step in steps(block.text)]  # fmt: skip
    assert todo
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(todo)],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/softroce/src",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def test_c(tmp_path: Path) -> None:
    said = _run("C with CMake and CTest", "test_c", tmp_path)
    assert said.count("100% tests passed, 0 tests failed out of 1") == 2


def test_a_failure_of_ctest_is_one_of_the_runner(softroce: Runner, tmp_path: Path) -> None:
    (tmp_path / "CTestTestfile.cmake").write_text("add_test(fails false)\n")
    done = softroce("--engine", "uml", "--", "ctest", "--test-dir", str(tmp_path))
    assert done.returncode == 8
    assert b"1 tests failed out of 1" in done.stdout


def test_rust(tmp_path: Path) -> None:
    _need("cargo")
    said = _run("Rust with Cargo", "test_rust", tmp_path)
    assert said.count("test a_megabyte ... ok") == 2
    assert said.count("test a_short_message ... ok") == 2


def test_go(tmp_path: Path) -> None:
    _need("go")
    said = _run("Go", "test_go", tmp_path)
    assert len(re.findall(r"^ok  ", said, re.MULTILINE)) == 3


def test_a_script(tmp_path: Path) -> None:
    said = _run("Programs of rdma-core and perftest", "test_a_script", tmp_path)
    assert said.count("100 iters in") == 2


def _script(pairs: list[tuple[str, str]]) -> str:
    """Run each server with its client, and print the statuses and the client's command."""
    lines = ["A=$AIORDMA_SOFTROCE_ADDR"]
    for server, client in pairs:
        # A server listens on a TCP port for the exchange by hand, or with the connection manager.
        by_hand = "grep -q ' 0A ' /proc/net/tcp /proc/net/tcp6"
        until = LISTENING.replace("grep -q LISTEN", f"grep -q LISTEN || {by_hand}")
        lines += [
            f"for try in $(seq {_ATTEMPTS}); do",
            f"{server} > server.txt 2>&1 & server=$!; {until}",
            f"timeout 60 {client} > client.txt 2>&1; status=$?",
            "timeout 20 tail --pid=$server -s 0.05 -f /dev/null || kill $server",
            "wait $server; end=$?",
            f"grep -q '{_TOO_SOON}' client.txt || break",
            "done",
            # An rping that sees its own end has 255: see programs.rping.
            f"test $end = 255 && grep -q '{RACED}' server.txt && end=0",
            f"test $status = 255 && grep -q '{RACED}' client.txt && status=0",
            f'echo "$end $status {client.split()[0]}"',
            "test $status = 0 || cat client.txt server.txt",
        ]
    return "\n".join(lines)


@pytest.mark.parametrize("device", ["rxe", "siw"])
def test_programs(device: str, tmp_path: Path, softroce: Runner) -> None:
    pairs = _ROW.findall(TEXT)
    assert len(pairs) >= 14
    if device == "siw":
        pairs = [pair for pair in pairs if pair[0].startswith(("rdma_server", "rstream", "ucm"))]
    process = softroce.start(
        "--engine", "uml", "--device", device, "--", "sh", "-c", _script(pairs), cwd=tmp_path
    )
    out, err = process.communicate(timeout=_LIMIT_S)
    assert out.decode().splitlines() == [f"0 0 {client.split()[0]}" for _, client in pairs], err
