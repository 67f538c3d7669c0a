"""aiordma on a kernel that has the RDMA stack and no device: typed errors with a hint, at once."""

from __future__ import annotations

import sys

import pytest

from softroce.tests.conftest import Runner

pytestmark = pytest.mark.uml

PROGRAM = """
import asyncio, aiordma

async def main():
    print(aiordma.devices(), aiordma.is_available())
    print(aiordma.why_unavailable())
    address = ("10.80.0.1", 7471)
    for attempt in (aiordma.connect(*address, timeout=5), aiordma.listen(*address)):
        try:
            await attempt
        except aiordma.DeviceNotFoundError as exc:
            assert isinstance(exc, OSError)
            print("typed:", exc, "| hint:", exc.hint)

asyncio.run(main())
"""


def test_a_host_without_a_device(softroce: Runner) -> None:
    """The device is removed before the program starts, so it is the kernel that says no."""
    script = 'rdma link delete rxe0 && exec "$0" -c "$1"'
    done = softroce("--engine", "uml", "--", "sh", "-c", script, sys.executable, PROGRAM)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "[] False"
    assert "/sys/class/infiniband" in lines[1]
    typed = [line for line in lines if line.startswith("typed:")]
    assert len(typed) == 2
    for line in typed:
        assert line.partition("| hint:")[2].strip()
