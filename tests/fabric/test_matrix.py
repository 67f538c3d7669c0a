"""The matrix of faults over the fabric: its files run there, each on the loops that it is about.

The results go to reports of their own, out of which tools/reliability_table.py makes its page.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fabric.launching import launched, outside

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "build/test"
LIMIT_S = 180


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    ("loop", "files"),
    [
        # What a loop sees of the wire is looked for on both; peers and the adapter on one each.
        ("asyncio", ["matrix_wire", "matrix_device"]),
        ("uvloop", ["matrix_wire", "matrix_peers"]),
    ],
)
def test_the_matrix(loop: str, files: list[str]) -> None:
    REPORTS.mkdir(parents=True, exist_ok=True)
    words = (
        *("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", f"--rootdir={ROOT}"),
        *(f"--loop={loop}", f"--junitxml={REPORTS}/matrix-{loop}.xml"),
        *(f"tests/fabric/{name}.py" for name in files),
    )
    done = subprocess.run(
        launched("--devices=4", "--", sys.executable, *words),
        env=outside(
            AIORDMA_SOFTROCE_ADDR="127.0.0.1",
            AIORDMA_SOFTROCE_DEVICE="rxe",
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
