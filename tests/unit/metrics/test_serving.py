"""The socket and the dump that `aiordma top` reads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from aiordma import metrics
from aiordma.metrics import serving
from aiordma.metrics.snapshot import ConnectionMetrics
from tests.forks import fork_quietly
from tests.inside.metrics import descriptor_of, set_lock_s

LIMIT_S = 30


def connected(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(LIMIT_S)
    made.connect(str(path))
    return made


def asked(path: Path) -> Any:
    with connected(path) as reader:
        return json.loads(b"".join(iter(lambda: reader.recv(1 << 16), b"")))


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user for sockets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_each_connect_gets_a_snapshot_and_the_end(runtime: Path) -> None:
    with metrics.serve() as service:
        assert service.path == runtime / "aiordma" / f"{os.getpid()}.sock"
        assert stat.S_IMODE(service.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(service.path.parent.stat().st_mode) == 0o700
        for _ in range(3):
            seen = asked(service.path)
            assert seen["pid"] == os.getpid()
            assert seen["totals"]["messages_sent"] >= 0
        assert "open" in repr(service)
    assert not service.path.exists()
    assert "closed" in repr(service)
    service.close()
    with metrics.serve() as again:
        assert asked(again.path)["pid"] == os.getpid()


def test_a_socket_that_a_process_has_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with metrics.serve(path):
        assert asked(path)["pid"] == os.getpid()
        with pytest.raises(OSError, match="serves") as caught:
            metrics.serve(path)
        assert caught.value.errno == errno.EADDRINUSE
        assert asked(path)["pid"] == os.getpid()


@pytest.mark.parametrize("step", ["the socket does not listen yet", "the dead is to be removed"])
def test_two_that_begin_at_once_do_not_remove_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "one.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    outcomes: list[serving.Service | OSError] = []

    def begin() -> None:
        try:
            outcomes.append(metrics.serve(path))
        except OSError as exc:
            outcomes.append(exc)

    owner, name = (os, "chmod") if step.startswith("the socket") else (Path, "unlink")
    real = getattr(owner, name)
    second = threading.Thread(target=begin)

    def hooked(where: Path, *more: int) -> None:
        monkeypatch.setattr(owner, name, real)
        second.start()
        second.join(0.2)  # it is done, if nothing holds it back
        real(where, *more)

    monkeypatch.setattr(owner, name, hooked)
    begin()
    second.join(LIMIT_S)
    (service,) = (each for each in outcomes if isinstance(each, serving.Service))
    (error,) = (each for each in outcomes if isinstance(each, OSError))
    assert error.errno == errno.EADDRINUSE
    with service:
        assert asked(path)["pid"] == os.getpid()


def test_a_folder_that_stays_locked_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_lock_s(monkeypatch, 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="locked the folder") as caught:
            metrics.serve(tmp_path / "x.sock")
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        os.close(descriptor)
    with metrics.serve(tmp_path / "x.sock") as service:
        assert asked(service.path)["pid"] == os.getpid()


def test_what_is_no_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("dear diary")
    with pytest.raises(FileExistsError):
        metrics.serve(path)
    assert path.read_text() == "dear diary"
    with pytest.raises(TypeError):
        metrics.serve(7)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="too long"):
        metrics.serve(tmp_path / ("x" * 200))
    with pytest.raises(FileNotFoundError):
        metrics.serve(tmp_path / "none" / "x.sock")


def test_a_folder_that_others_may_write_to_is_refused(runtime: Path) -> None:
    (runtime / "aiordma").mkdir()
    (runtime / "aiordma").chmod(0o777)
    with pytest.raises(PermissionError, match="only this user"):
        metrics.serve()
    (runtime / "aiordma").rmdir()
    (runtime / "elsewhere").mkdir()
    (runtime / "aiordma").symlink_to(runtime / "elsewhere")
    with pytest.raises(OSError, match=r"only this user|exists"):
        metrics.serve()


def test_what_killed_processes_have_left_is_removed(runtime: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, timeout=60
    )
    (runtime / "aiordma").mkdir(mode=0o700)
    left = runtime / "aiordma" / f"{int(run.stdout)}.sock"
    other = runtime / "aiordma" / "notes"
    left.touch()
    other.touch()
    with metrics.serve():
        assert not left.exists()
        assert other.exists()


def test_rude_readers_cost_the_next_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that read nothing, that leave at once, and that send."""
    monkeypatch.setattr(serving, "SEND_S", 0.2)
    monkeypatch.setattr(serving, "as_json", lambda: b"{}" + b" " * (8 << 20))
    path = tmp_path / "metrics.sock"
    with metrics.serve(path) as service, contextlib.ExitStack() as rude:
        for _ in range(3):
            rude.enter_context(connected(path))  # never reads
        connected(path).close()
        rude.enter_context(connected(path)).sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        begun = time.monotonic()
        assert asked(path) == {}
        assert time.monotonic() - begun < LIMIT_S
        begun = time.monotonic()
        service.close()
        assert time.monotonic() - begun < 4


def test_a_snapshot_that_fails_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.sock"

    def fails() -> bytes:
        raise ZeroDivisionError

    with metrics.serve(path):
        with monkeypatch.context() as patch:
            patch.setattr(serving, "as_json", fails)
            with connected(path) as reader:
                assert reader.recv(1) == b""
        assert asked(path)["pid"] == os.getpid()
    assert "no snapshot" in caplog.text


def test_a_forked_child_leaves_the_socket_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    with metrics.serve(path) as service:
        child = fork_quietly()
        if child == 0:  # pragma: no cover
            service.close()
            os._exit(0 if path.exists() and descriptor_of(service) == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert asked(path)["pid"] == os.getpid()


def test_a_reader_gets_the_end_although_a_child_was_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child has the connection to the reader, too, and would keep it open."""
    path = tmp_path / "metrics.sock"
    children: list[int] = []
    end_of_child, keep = os.pipe()

    def forks() -> bytes:
        children.append(fork_quietly())
        if children[-1] == 0:  # pragma: no cover
            os.close(keep)
            os.read(end_of_child, 1)
            os._exit(0)
        return b"{}"

    monkeypatch.setattr(serving, "as_json", forks)
    try:
        with metrics.serve(path), connected(path) as reader:
            reader.settimeout(5)
            assert reader.recv(16) == b"{}"
            assert reader.recv(16) == b""
    finally:
        os.close(keep)
        os.close(end_of_child)
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_end_keeps_the_socket_of_another(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    first = metrics.serve(path)
    path.unlink()  # as a cleaner of /tmp does
    with metrics.serve(path):
        first.close()
        assert asked(path)["pid"] == os.getpid()
    assert not path.exists()


def test_no_socket_is_made_in_a_folder_of_another_user(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `sudo -E` has it: that user could put something else in the place of the folder."""
    if os.geteuid() == 0:
        os.chown(runtime, 65_534, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 65_533)
    other = runtime / "tmp"
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(other))
    with pytest.raises(OSError, match=r"no folder|alone"):
        metrics.serve()
    assert list(runtime.iterdir()) == []


def test_many_connections_are_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ConnectionMetrics(1, "open", "rxe0", 17)
    empty = metrics.snapshot()
    many = metrics.Snapshot(
        1.0, 2, empty.totals, empty.connect_s, empty.accept_s, empty.request_s, empty.reply_s,
        connections=(one,) * 25,
    )  # fmt: skip
    monkeypatch.setattr(serving, "snapshot", lambda: many)
    monkeypatch.setattr(serving, "LISTED", 10)
    seen = json.loads(serving.as_json())
    assert (len(seen["connections"]), seen["unlisted_connections"]) == (10, 15)


# A dump on a signal

_PROGRAM = """
import asyncio, signal, sys
from aiordma import metrics

async def main():
    print(metrics.dump_on_signal(signal.SIGUSR2, sys.argv[2]), flush=True)
    await asyncio.to_thread(sys.stdin.readline)

if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_signal_replaces_the_dump(loop: str, tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, loop, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == f"{path}\n"
        first = json.loads(path.read_text())
        assert first["pid"] == process.pid
        assert first["dump"] == {
            "signal": int(signal.SIGUSR2), "began": serving.start_of(process.pid),
        }  # fmt: skip
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for _ in range(3):
            before = json.loads(path.read_text())["time"]
            process.send_signal(signal.SIGUSR2)
            while json.loads(path.read_text())["time"] == before:
                assert time.time() - before < LIMIT_S
                time.sleep(0.01)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(LIMIT_S) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_dump_that_cannot_be_is_refused_at_the_call(tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with pytest.raises(ValueError, match="cannot be handled"):
            metrics.dump_on_signal(number, tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        metrics.dump_on_signal(signal.SIGUSR1, tmp_path / "none" / "x")
    with pytest.raises(ValueError, match="not a valid"):
        metrics.dump_on_signal(999, tmp_path / "x")  # type: ignore[arg-type]
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            metrics.dump_on_signal(signal.SIGUSR1, tmp_path / "x")
        except ValueError as exc:
            caught.append(exc)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(LIMIT_S)
    assert "main thread" in str(caught[0])
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert list(tmp_path.iterdir()) == []


def test_the_start_of_a_process() -> None:
    assert serving.start_of(os.getpid()).isdecimal()
    assert serving.start_of(2**22 + 1) == ""
