"""The matrix of faults over the fabric: its files run there, each on the loops that it is about.

The results go to reports of their own, out of which tools/reliability_table.py makes its page.
"""

from __future__ import annotations

import pytest

from tests.fabric.launching import ROOT, launch_tests

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
        *(f"--loop={loop}", f"--junitxml={REPORTS}/matrix-{loop}.xml"),
        *(f"tests/fabric/{name}.py" for name in files),
    )
    launch_tests(["--devices=4"], words, limit_s=LIMIT_S)
