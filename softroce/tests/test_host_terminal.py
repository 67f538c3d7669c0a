"""A command of the host engine that has the terminal of the runner, on a made-up device."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import REPOSITORY, eventually
from .keyboard import Screen, screen

_PROGRAM = """
import sys
from pathlib import Path
from aiordma_softroce import cli, host

host.DEVICES = Path(sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Screen]:
    """A shell whose function `run` is the host engine."""
    port = tmp_path / "rxe7/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "rxe7/parent").write_text("lo\n")
    (tmp_path / "program.py").write_text(_PROGRAM)
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "softroce/src"),
        "PS1": "<>",
        "TERM": "dumb",
    }
    with screen(["bash", "--norc", "--noprofile", "-i"], surroundings) as there:
        there.until("<>")
        there.type(
            f'run() {{ {sys.executable} {tmp_path}/program.py {tmp_path} --engine host "$@"; }}\r'
        )
        there.until("<>")
        yield there


def test_keys_reach_the_command(shell: Screen) -> None:
    shell.type(
        "run -- sh -c 'echo a''ddress $AIORDMA_SOFTROCE_ADDR; stty size; read x; echo $x$x'\r"
    )
    shell.until("address 127.0.0.1\r\n33 77\r\n")
    shell.type("ab\r")
    shell.until("abab")
    # With `exec`: dash can lose a Ctrl-C that comes while dash starts a command.
    shell.type("run -- sh -c 'echo run''ning; exec sleep 1000'\r")
    shell.until("running")
    shell.type("\x03")
    shell.until("<>")
    shell.type("echo status $?; exit\r")
    shell.until("status 130")
    assert shell.end() == 0


def test_a_stop_and_back(shell: Screen) -> None:
    shell.type("run -- sh -c 'echo run''ning; read x; echo $x$x; stty -echo; exit 6'\r")
    shell.until("running")
    shell.type("\x1a")
    shell.until("Stopped")
    shell.type("echo sh''ell\r")
    shell.until("shell")
    shell.type("fg\r")
    shell.until("run --|program.py")
    shell.type("cd\r")
    shell.until("cdcd")
    shell.until("<>")
    shell.type("echo st''atus $?\r")
    shell.until("status 6")
    shell.type("stty -a | grep -o '.echo '; exit\r")
    shell.until(" echo ")
    shell.end()


def test_the_time_limit(shell: Screen) -> None:
    shell.type("run --timeout 1 -- sh -c 'stty raw -echo; cat'\r")
    shell.until("softroce: timed out after 1 s")
    shell.until("<>")
    shell.type("stty -a | grep -o '.icanon'; exit\r")
    shell.until(" icanon")
    shell.end()


def test_a_signal_to_the_runner(shell: Screen) -> None:
    shell.type("run -- sh -c 'echo from $PPID; sleep 1000'\r")
    runner = int(shell.until("from (\\d+)")[1])
    os.kill(runner, signal.SIGTERM)
    shell.until("<>")
    shell.type("echo st''atus $?; exit\r")
    shell.until("status 143")
    shell.end()
    assert eventually(lambda: not Path(f"/proc/{runner}").exists())
