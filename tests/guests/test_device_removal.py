"""The device is taken away, or its card goes down in mid-use: each in a guest of its own.

The programs are in removal.py.  A stock kernel, where the connection manager is a module that is
loaded last, tells the users of a device that is removed.  Where it is built in, the kernel waits
for them first, and tells nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from softroce.tests.conftest import Runner

PROGRAM = str(Path(__file__).with_name("removal.py"))
# What is removed is gone once its users are.
GONE = 'until [ -z "$(rdma link)" ]; do sleep 0.05; done; echo gone'


def outcomes(softroce: Runner, scenario: str, *options: str, after: str = "true") -> list[str]:
    script = f'"$0" "$1" {scenario} && {after}'
    done = softroce(*options, "--", "sh", "-c", script, sys.executable, PROGRAM)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


@pytest.mark.qemu
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_device_that_is_taken_away(softroce: Runner) -> None:
    """Everything that waits raises what names the removal, and all can be closed, in time."""
    lines = outcomes(softroce, "taken", "--engine", "qemu", after=GONE)
    assert sorted(lines) == sorted([
        "client.recv: DeviceRemovedError",
        "listener.accept: DeviceRemovedError",
        "listener: DeviceRemovedError",
        "requests: DeviceRemovedError",
        "client.events: ['DEVICE_REMOVAL']",
        "native receive: FlushedError from DeviceRemovedError",
        "native events: 2",  # ESTABLISHED and DEVICE_REMOVAL, and the end with the channel
        "closed in time: True",
        "connect: DeviceNotFoundError",
        "listen: DeviceNotFoundError",
        "gone",
    ])  # fmt: skip


@pytest.mark.uml
@pytest.mark.parametrize("device", ["rxe", "siw"])
def test_a_device_that_waits_for_its_users(softroce: Runner, device: str) -> None:
    """Nothing is told, everything goes on, and the removal ends with the program."""
    lines = outcomes(softroce, "kept", "--engine", "uml", "--device", device, after=GONE)
    assert lines == [
        "events: TimeoutError from CancelledError",
        "b'still here'",
        "b'and more'",
        "delete is over: False",
        "gone",
    ]


@pytest.mark.uml
def test_soft_roce_tells_no_reason_while_its_card_is_down(softroce: Runner) -> None:
    """The connection of the message ends, and its error says that the port is down."""
    assert outcomes(softroce, "down", "--engine", "uml", "--device", "rxe") == [
        "flush: ConnectionLostError",
        "[Errno 104] the adapter ended the connection and gave no reason (port 1 of rxe0 is DOWN)",
    ]


@pytest.mark.uml
def test_software_iwarp_goes_on_while_its_card_is_down(softroce: Runner) -> None:
    """To itself, as TCP does."""
    assert outcomes(softroce, "down", "--engine", "uml", "--device", "siw") == ["flush: None"]
