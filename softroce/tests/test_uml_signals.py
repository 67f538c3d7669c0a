"""Signals to the runner, and its sudden death."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from aiordma_softroce import cache

from .conftest import Runner, eventually, guest_of, members, session_of

pytestmark = pytest.mark.uml

_CLEANS_UP = "trap 'echo cleaned; exit 0' INT TERM HUP; echo started; while :; do sleep 0.1; done"
_IGNORES = "trap '' INT TERM; echo started; while :; do sleep 1; done"


def _start(softroce: Runner, script: str, *options: str) -> subprocess.Popen[bytes]:
    process = softroce.start("--engine", "uml", *options, "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_may_clean_up(softroce: Runner, number: signal.Signals) -> None:
    process = _start(softroce, _CLEANS_UP)
    session = session_of(process)
    # In a session of its own: a keyboard's Ctrl-C reaches the runner alone.
    assert os.getsid(process.pid) != session
    assert members(session)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert out == b"cleaned\n"
    assert process.returncode == 128 + number
    assert eventually(lambda: not members(session))


@pytest.mark.parametrize("size", [3000, 100_000])
def test_a_large_environment_leaves_the_way_open(softroce: Runner, size: int) -> None:
    """It is sent before, over the same device, and is more than the device holds."""
    process = softroce.start(
        "--engine", "uml", "--", "sh", "-c", _CLEANS_UP, environment={"LARGE": "x" * size}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out == b"cleaned\n"


def test_in_virtual_time_too(softroce: Runner) -> None:
    process = _start(softroce, "echo started; sleep infinity", "--virtual-time")
    session = session_of(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert eventually(lambda: not members(session))


def test_the_second_signal_kills(softroce: Runner) -> None:
    process = _start(softroce, "trap 'echo not yet' INT; echo started; while :; do sleep 1; done")
    assert process.stdout is not None
    session = session_of(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"not yet\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    # Not after the five seconds that one signal leaves.
    assert time.monotonic() - begin < 4
    assert process.returncode == 130
    assert eventually(lambda: not members(session))


def test_a_command_that_ignores_it_is_killed_after_a_while(softroce: Runner) -> None:
    process = _start(softroce, _IGNORES)
    session = session_of(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert eventually(lambda: not members(session))


def test_a_signal_before_the_command_runs(softroce: Runner) -> None:
    outputs: list[bytes] = []
    # On a busy machine the boot may be over before the signal is sent.
    while not outputs or (outputs[-1] and len(outputs) < 5):
        script = "echo ran; sleep 1000"
        process = softroce.start("--engine", "uml", "-v", "--", "sh", "-c", script)
        assert process.stderr is not None
        # The log of the kernel has begun.
        assert process.stderr.read(1)
        session = session_of(process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        outputs.append(out)
        assert process.returncode == 143
        assert eventually(lambda session=session: not members(session))  # type: ignore[misc]
    assert outputs[-1] == b"", outputs


def test_nothing_outlives_a_killed_runner(softroce: Runner) -> None:
    process = _start(softroce, "echo started; sleep 1000 & sleep 1000 & wait")
    session = session_of(process)
    assert len(members(session)) > 3
    process.kill()
    process.wait(timeout=30)
    assert eventually(lambda: not members(session))


def test_a_killed_guest_is_no_verdict_of_the_command(softroce: Runner) -> None:
    process = _start(softroce, "echo started; sleep 1000")
    os.killpg(guest_of(session_of(process)), signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 125
    assert b"the guest ended before the command did" in err


def test_the_kernel_is_the_cached_one(softroce: Runner) -> None:
    process = _start(softroce, "echo started; sleep 1000")
    program = os.readlink(f"/proc/{guest_of(session_of(process))}/exe")
    assert program.startswith(f"{cache.root()}/uml-")
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
