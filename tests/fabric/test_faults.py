"""`aiordma.testing.faults` over the fabric: the tests of devices, and what it alone can do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabric.launching import launched, outside

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
#: Each event loop, and another adapter with each.
RUNS = pytest.mark.parametrize(
    ("loop", "profile"), [("asyncio", "standard"), ("uvloop", "siw-6.12")]
)


def run(files: str, loop: str, profile: str) -> str:
    """Run tests over the fabric with two devices; the last line of pytest."""
    words = (
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", files, f"--loop={loop}"),
        *("-W", "error", f"--rootdir={ROOT}"),
    )
    kind = "siw" if profile.startswith("siw") else "rxe"
    done = subprocess.run(
        launched(f"--profile={profile}", "--devices=2", "--", sys.executable, *words),
        env=outside(
            AIORDMA_SOFTROCE_ADDR="127.0.0.1",
            AIORDMA_SOFTROCE_DEVICE=kind,
            PYTHONPATH=os.environ.get("PYTHONPATH", ""),
        ),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]
    return done.stdout.splitlines()[-1]


@pytest.mark.timeout(LIMIT_S + 30)
def test_the_tests_of_devices() -> None:
    # Soft-RoCE itself is among the devices of the device tests; iWARP is not, for these.
    assert " passed" in run("tests/device/test_faults.py", "uvloop", "siw-6.12")


@pytest.mark.timeout(LIMIT_S + 30)
@RUNS
def test_what_the_fabric_alone_can_do(loop: str, profile: str) -> None:
    assert " passed" in run("tests/fabric/faulty.py", loop, profile)
