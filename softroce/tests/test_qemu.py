"""A command on the distribution's kernel; few boots, each for several checks."""

from __future__ import annotations

import hashlib
import random
import signal
import sys
from pathlib import Path

import pytest

from . import networks
from .conftest import Runner, eventually, members, session_of
from .programs import rping

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.timeout(500)]

QEMU = ("--engine", "qemu")


def test_counted(softroce: Runner, tmp_path: Path) -> None:
    """A latency program runs, a second run of it repeats its figure, and the output is exact."""
    size = 3_000_000
    noise = tmp_path / "noise.py"
    noise.write_text(
        f"import random, sys; sys.stdout.buffer.write(random.Random(1).randbytes({size}))"
    )
    # The address is that of the connection over which the two ends meet. It is asked for when
    # somebody listens on the port, 18515, on which the connection of the first run may still wait.
    measure = (
        "command -v ib_send_lat >/dev/null || exit 127; "  # or the next line would wait for ever
        "ib_send_lat -e -n 300 -s 64 -F -d rxe0 >/dev/null & "
        "until grep -q ':4853 [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.1; done; "
        "ib_send_lat -e -n 300 -s 64 -F -d rxe0 10.80.0.1 | grep '^ *64 ' >&2 || exit 9; wait; "
    )
    # A processor without those is charged for no copy by the byte.
    strings = "grep -cwE 'erms|fsrm' /proc/cpuinfo >&2"
    script = f"nproc >&2; {strings}; echo $AIORDMA_SOFTROCE_ENGINE >&2; {measure}{measure}"
    script += f"{sys.executable} {noise}; exit 7"
    done = softroce(*QEMU, "--counted", "--", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    cpus, fast_strings, engine, *figures = done.stderr.decode().splitlines()
    assert (cpus, fast_strings, engine) == ("1", "0", "qemu")
    # Column 5 is the typical time in microseconds.
    first, second = (float(figure.split()[4]) for figure in figures)
    assert first == pytest.approx(second, rel=0.05)
    assert 10 < first < 1000
    assert len(done.stdout) == size
    expected = random.Random(1).randbytes(size)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(expected).digest()


def test_two_hosts_with_loss(softroce: Runner, tmp_path: Path) -> None:
    script = (
        "cat /sys/class/net/veth0/statistics/tx_packets; nproc; "
        f"({rping('10.80.0.2', 20)}) >&2 || exit 9; "
        "cat /sys/class/net/veth0/statistics/tx_packets; "
        "tc qdisc show dev veth1; echo here > 'left behind'; kill -SEGV $$"
    )
    done = softroce(*QEMU, "--net", "netem loss 2%", "--", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode == 128 + 11, done.stderr
    before, cpus, after, discipline = done.stdout.splitlines()
    assert cpus == b"2"
    assert int(after) - int(before) > 40
    assert b"netem" in discipline
    assert b"loss 2%" in discipline
    assert done.stderr.count(b"ping data: rdma-ping-") == 20
    assert (tmp_path / "left behind").read_text() == "here\n"


def test_a_network_of_modules(softroce: Runner, tmp_path: Path) -> None:
    """A bond, a bridge and more cards: the kernel loads what is asked for."""
    networks.write(tmp_path)
    networks.check(softroce, "bond.sh", tmp_path, *QEMU)


def test_ctrl_c(softroce: Runner) -> None:
    script = "trap 'echo cleaned; exit 0' INT; echo started; while :; do sleep 0.1; done"
    process = softroce.start(*QEMU, "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    session = session_of(process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"cleaned\n")
    assert eventually(lambda: not members(session))


def test_a_killed_runner_takes_the_guest_along(softroce: Runner) -> None:
    process = softroce.start(*QEMU, "-v", "--", "true")
    assert process.stderr is not None
    # The log of the kernel has begun.
    while b"Linux version" not in process.stderr.readline():
        assert process.poll() is None
    session = session_of(process)
    process.kill()
    process.wait(timeout=60)
    assert eventually(lambda: not members(session))


def test_not_found(softroce: Runner) -> None:
    """The statuses of the runner's own are the same as with the other engine."""
    done = softroce(*QEMU, "--memory", "1G", "--cpus", "1", "--", "no-such-command")
    assert done.returncode == 127
    assert done.stdout == b""
    assert done.stderr.startswith(b"softroce: no-such-command: ")


def test_iwarp_on_a_kernel_without_it(softroce: Runner) -> None:
    """Its module is compiled on first use."""
    script = f"ls /sys/class/infiniband; {rping('10.80.0.1', 5)}"
    done = softroce(*QEMU, "--device", "siw", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(b"ping data: rdma-ping-") == 5
    assert done.stdout.startswith(b"siw0\n")
