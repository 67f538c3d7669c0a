"""A command of the qemu engine in a terminal, and with input from a pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .conftest import LIMIT, REPOSITORY
from .keyboard import screen

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(500)]

_SURROUNDINGS = {**os.environ, "PYTHONPATH": str(REPOSITORY / "softroce/src"), "TERM": "xterm"}
_WORDS = [sys.executable, "-B", "-m", "aiordma_softroce", "--engine", "qemu"]


def test_a_terminal() -> None:
    script = (
        "tty; stty size; read x; echo $x$x; trap 'echo interrupted; exit 4' INT; echo r''eady; "
    )
    script += "while :; do sleep 1; done"
    with screen([*_WORDS, "--", "bash", "-c", script], _SURROUNDINGS, limit_s=300) as there:
        before = there.before
        there.until("/dev/pts/0\r\n33 77\r\n")
        there.type("ab\r")
        there.until("abab\r\n")
        there.until("ready")
        there.type("\x03")
        there.until("interrupted")
        assert there.end() == 4
        assert there.modes() == before


def test_a_pipe() -> None:
    block = os.urandom(200_000)
    done = subprocess.run(
        [*_WORDS, "-i", "--", "cat"], input=block, capture_output=True, env=_SURROUNDINGS,
        timeout=4 * LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == block
