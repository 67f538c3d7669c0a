"""A test that does not end at its limit ends the run, and says where it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]
LIMIT = 100.0

# Python cannot run its handler of SIGALRM: as where a call of C does not return.
_STUCK = """
import signal, threading, time
import pytest

def test_stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(1000)
"""
_SLOW = """
import time

def test_slow():
    time.sleep(1000)

def test_next():
    pass
"""


def run(tmp_path: Path, text: str, grace: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_it.py").write_text(text)
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider",
        "-c", str(REPOSITORY / "pyproject.toml"), "--rootdir", str(tmp_path), "--timeout=1",
        "test_it.py",
    ]  # fmt: skip
    variables = {"PYTHONPATH": str(REPOSITORY), "AIORDMA_TEST_GRACE_S": grace}
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip


def test_one_that_no_signal_reaches_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, _STUCK, "1")
    assert done.returncode == 1
    assert "test_stuck" in done.stderr, done
    assert "test_it.py" in done.stderr


@pytest.mark.parametrize("limit", ["", "@pytest.mark.timeout(1)\n"])
def test_one_that_a_signal_reaches_fails_alone(tmp_path: Path, limit: str) -> None:
    text = _SLOW.replace("def test_slow", f"{limit}def test_slow").replace(
        "import time", "import time\nimport pytest"
    )
    done = run(tmp_path, text, "30")
    assert "1 failed, 1 passed" in done.stdout, done
