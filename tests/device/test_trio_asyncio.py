"""aiordma on trio_asyncio, in a process of its own: its import changes asyncio for all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

LIMIT_S = 300.0


def test_on_trio(address: str) -> None:
    file = Path(__file__).with_name("on_trio.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(file)],
        cwd=file.parents[2], capture_output=True, check=False, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
