"""The host engine on a machine that may or may not have a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiordma_softroce import host
from aiordma_softroce.errors import InfrastructureError
from aiordma_softroce.options import Options

from .conftest import LIMIT, REPOSITORY, eventually


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a made-up /sys/class/infiniband with one active device on the loopback card."""
    port = tmp_path / "rxe7/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "rxe7/parent").write_text("lo\n")
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    return port


def _run(*argv: str, **options: Any) -> int:
    return host.run(argv, Options(engine="host", **options))


def _python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_port_that_is_down_is_no_device(device: Path) -> None:
    assert host.has_device()
    (device / "state").write_text("1: DOWN\n")
    assert not host.has_device()


@pytest.mark.usefixtures("device")
def test_status_and_output(capfd: pytest.CaptureFixture[str]) -> None:
    told = "import os, sys; print(os.environ['AIORDMA_SOFTROCE_ENGINE'], "
    told += "os.environ['AIORDMA_SOFTROCE_DEVICE'], os.environ['AIORDMA_SOFTROCE_ADDR']); "
    assert _run(*_python(told + "sys.exit(7)")) == 7
    assert capfd.readouterr().out == "host rxe 127.0.0.1\n"
    assert _run(*_python("import os; os.kill(os.getpid(), 9)")) == 128 + 9


@pytest.mark.usefixtures("device")
def test_what_cannot_be_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run("no-such-command") == 127
    plain = tmp_path / "plain"
    plain.write_text("nothing")
    assert _run(str(plain)) == 126
    assert capfd.readouterr().err.splitlines() == [
        "softroce: no-such-command: No such file or directory",
        f"softroce: {plain}: Permission denied",
    ]


@pytest.mark.usefixtures("device")
def test_time_limit_reaches_grandchildren(capfd: pytest.CaptureFixture[str]) -> None:
    text = "import subprocess; child = subprocess.Popen(['sleep', '1000']); "
    assert _run(*_python(text + "print(child.pid, flush=True); child.wait()"), timeout=5.0) == 124
    captured = capfd.readouterr()
    assert "timed out after 5 s" in captured.err
    grandchild = int(captured.out)
    assert eventually(lambda: _has_ended(grandchild))


def _has_ended(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return True
    # Whoever has adopted it may take its time to collect it.
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_no_device_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    with pytest.raises(InfrastructureError, match=r"no RDMA device.*--engine uml"):
        _run("true")


@pytest.mark.usefixtures("device")
def test_a_device_of_another_kind_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that cannot be honored is an error."""
    assert _run("true", device="rxe") == 0
    with pytest.raises(InfrastructureError, match=r"no siw device.*--engine uml"):
        _run("true", device="siw")
    os.rename(host.DEVICES / "rxe7", host.DEVICES / "mlx5_0")
    assert _run("true") == 0
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InfrastructureError, match="run it as root, or use --engine uml"):
        _run("true", device="rxe")


@pytest.mark.usefixtures("device")
def test_a_machine_without_ip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, **_: None)
    with pytest.raises(InfrastructureError, match="package iproute2"):
        _run("true")


def test_making_a_device_needs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InfrastructureError, match="run it as root, or use --engine uml"):
        _run("true", device="rxe")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from aiordma_softroce import host\n"
        "from aiordma_softroce.options import Options\n"
        "host.DEVICES = pathlib.Path(sys.argv[1])\n"
        "words = 'trap \"echo cleaned; exit\" INT TERM; echo started; while :; do sleep 1; done'\n"
        "sys.exit(host.run(['sh', '-c', words], Options(engine='host')))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "softroce/src")},
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"started\n"
        process.send_signal(number)
        try:
            out, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert out == b"cleaned\n"
        assert process.returncode == 128 + number
