"""The demo, run as a user runs it: two processes, a file, a verdict."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.shared import name_of_device
from tests.fabric.launching import outside

# Programs of their own, on the loop that they are told.
pytestmark = [pytest.mark.device, pytest.mark.program]

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
LIMIT_S = 100


def run_demo(*words: str, loop: str) -> subprocess.CompletedProcess[str]:
    """Run the demo on the given loop, warnings being errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(DEMO), f"--loop={loop}", *words],
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_S,
    )


def servers_left() -> list[str]:
    """Command lines of the demo's servers that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended in between
            continue
        if "demo_server.py" in line:
            found.append(line)
    return found


@pytest.mark.smoke
def test_the_report_has_every_line(loop_name: str, is_siw: bool) -> None:
    done = run_demo("--size=70K", "--pings=20", loop=loop_name)
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        r"sending over RDMA .* 100 % .*",
        r"sending over TCP .* 100 % .*",
        rf"device +{name_of_device(is_siw)} .*",
        r"port +1",
        r"GID +\S+:\S+ \(index \d+, (RoCE v[12]|iWARP)\)",
        r"link layer +Ethernet",
        r"engine +(uml|qemu|host)",
        rf"event loop +{loop_name}",
        r"bytes +71680 .*",
        r"pings +20 of 64 bytes",
        r" +RDMA +TCP",
        r"round trip, p50 +\d+\.\d us +\d+\.\d us *",
        r"round trip, p99 +\d+\.\d us +\d+\.\d us *",
        r"throughput +\d+\.\d MiB/s +\d+\.\d MiB/s *",
        r"sha256 match: [0-9a-f]{64} arrived over RDMA",
        r"sha256 match: [0-9a-f]{64} arrived over TCP",
    ):
        assert re.search(f"^{line}$", done.stdout, re.MULTILINE), line + "\n" + done.stdout


def test_an_address_that_only_the_device_has(loop_name: str) -> None:
    """As over the fabric: there is no TCP to measure, and the demo says so."""
    words = ["--address=10.81.0.1", "--size=1", "--pings=1", f"--loop={loop_name}"]
    done = subprocess.run(
        [
            sys.executable, "-m", "aiordma_fabric", "--addresses=10.81.0.1", "--",
            sys.executable, "-W", "error", str(DEMO), *words,
        ],
        env=outside(), capture_output=True, check=False, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "TCP was not measured: no interface of this machine has 10.81.0.1.\n" in done.stdout
    assert "over TCP" not in done.stdout


def test_the_gid_belongs_to_the_address(loop_name: str, address: str) -> None:
    done = run_demo("--size=1", "--pings=1", loop=loop_name)
    assert f"::ffff:{address} (" in done.stdout


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, (2 << 20) + 3])
def test_a_file_of_the_user(loop_name: str, tmp_path: Path, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:size])
    done = run_demo(f"--file={path}", "--pings=1", loop=loop_name)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"sha256 match: {hashlib.sha256(data[:size]).hexdigest()} arrived" in done.stdout
    assert re.search(rf"^bytes +{size} ", done.stdout, re.MULTILINE)
    assert re.search(rf"^file +{path}$", done.stdout, re.MULTILINE)


def test_damage_is_found(loop_name: str) -> None:
    done = run_demo("--size=3M", "--pings=1", "--corrupt", loop=loop_name)
    assert done.returncode == 1
    assert "sha256 MISMATCH" in done.stdout
    assert "sha256 match" not in done.stdout


def test_the_time_limit_ends_both_processes(loop_name: str) -> None:
    done = run_demo("--size=200G", "--timeout=3", loop=loop_name)
    assert done.returncode == 1
    assert "demo: timeout, not done within 3.0 s" in done.stderr
    assert "sha256" not in done.stdout
    assert servers_left() == []


def test_a_server_that_does_not_start(loop_name: str) -> None:
    done = run_demo("--address=192.0.2.1", loop=loop_name)
    assert done.returncode == 1
    assert "demo server: [Errno 99] 192.0.2.1 port 0: rdma_bind_addr" in done.stderr
    assert "demo: the server did not start, exit status 1" in done.stderr


@pytest.mark.parametrize(
    "words", [["--size=1x"], ["--size=-1"], ["--pings=0"], ["--timeout=0"], ["--file=/etc"]]
)
def test_wrong_words(loop_name: str, words: list[str]) -> None:
    done = run_demo(*words, loop=loop_name)
    assert done.returncode == 2
    assert "demo.py: error: " in done.stderr


def test_the_address_is_found_without_help(
    monkeypatch: pytest.MonkeyPatch, loop_name: str, address: str
) -> None:
    monkeypatch.delenv("AIORDMA_SOFTROCE_ADDR")
    monkeypatch.delenv("AIORDMA_SOFTROCE_ENGINE", raising=False)
    done = run_demo("--size=1", "--pings=1", loop=loop_name)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("^engine +host$", done.stdout, re.MULTILINE)
