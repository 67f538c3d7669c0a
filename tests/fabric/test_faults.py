"""`aiordma.testing.faults` over the fabric: the tests of devices, and what it alone can do."""

from __future__ import annotations

import pytest

from tests.fabric.launching import launch_tests

LIMIT_S = 300
#: Each event loop, and another adapter with each.
RUNS = pytest.mark.parametrize(
    ("loop", "profile"), [("asyncio", "standard"), ("uvloop", "siw-6.12")]
)


def run(files: str, loop: str, profile: str) -> str:
    """Run tests over the fabric with two devices; the last line of pytest."""
    options = (f"--profile={profile}", "--devices=2")
    kind = "siw" if profile.startswith("siw") else "rxe"
    return launch_tests(options, (files, f"--loop={loop}"), device=kind, limit_s=LIMIT_S)


@pytest.mark.timeout(LIMIT_S + 30)
def test_the_tests_of_devices() -> None:
    # Soft-RoCE itself is among the devices of the device tests; iWARP is not, for these.
    assert " passed" in run("tests/device/test_faults.py", "uvloop", "siw-6.12")


@pytest.mark.timeout(LIMIT_S + 30)
@RUNS
def test_what_the_fabric_alone_can_do(loop: str, profile: str) -> None:
    assert " passed" in run("tests/fabric/faulty.py", loop, profile)
