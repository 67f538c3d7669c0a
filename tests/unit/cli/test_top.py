"""`aiordma top`: in a pipe, on a terminal, and of processes that show nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiordma.cli import top
from aiordma.cli.__main__ import main
from aiordma.metrics import serving

from ..metrics.seen import seen

pytestmark = pytest.mark.slow

LIMIT_S = 60
TOP = [sys.executable, "-m", "aiordma", "top"]


class Process:
    """A process whose counters move on with each snapshot, in this process."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        monkeypatch.setattr(serving, "snapshot", self.next)
        self.service = serving.serve(path)
        self.path = str(path)

    def next(self) -> Any:
        self.asked += 1
        first, *others = seen().connections
        first = dataclasses.replace(
            first, bytes_sent=first.bytes_sent + 5000 * self.asked,
            messages_sent=first.messages_sent + 10 * self.asked,
        )  # fmt: skip
        return seen(time=1010.0 + self.asked, connections=(first, *others))


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made = Process(tmp_path / "metrics.sock", monkeypatch)
    yield made
    made.service.close()


def piped(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *words], capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, **environment},
    )  # fmt: skip


def columns(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


def test_in_a_pipe_it_prints_one_table(process: Process) -> None:
    run = piped(process.path)
    assert (run.returncode, run.stderr) == (0, "")
    summary, header, *rows = run.stdout.splitlines()
    assert summary.startswith(
        "process 4242: 2 connections, 1 streams, 1 datagram endpoints; 100 messages sent"
    )
    assert summary.endswith("rates since each was opened")
    assert columns(header) == list(top.HEADER)
    # The busiest first: 2,000,000 bytes and 15,000 in 11 seconds; 5,000 in two; 1,000 in 11.
    assert [columns(row) for row in rows] == [
        ["5", "messages", "192.0.2.7 18515", "rxe0", "open", "11s", "1.4k", "182k", "4", "3",
         "65.5k"],
        ["7", "stream", "fe80::1%eth0 9", "rxe0", "open", "2s", "2.5k", "0", "-", "0", "4.1k"],
        ["8", "datagrams", "on 192.0.2.1 7007", "rxe0", "open", "11s", "36", "55", "9", "5",
         "8.2k"],
        ["9", "messages", "-", "rxe0", "connecting", "-", "0", "0", "0", "0", "0"],
    ]  # fmt: skip
    assert process.asked == 1


def test_further_tables_have_the_rates_since_the_last(process: Process) -> None:
    run = piped(process.path, "-n", "3", "--interval", "0.1")
    tables = run.stdout.split("\n\n")
    assert len(tables) == process.asked == 3
    for table in tables[1:]:
        row = columns(table.splitlines()[2])
        assert (row[0], row[6], row[7], row[8]) == ("5", "5.0k", "0", "10")


def test_json_is_a_line_for_each_snapshot(process: Process) -> None:
    run = piped(process.path, "--json", "-n", "2", "--interval", "0.1")
    first, second = map(json.loads, run.stdout.splitlines())
    assert first["totals"]["messages_sent"] == 100
    assert second["connections"][0]["bytes_sent"] - first["connections"][0]["bytes_sent"] == 5000


def test_it_ends_with_the_process(process: Process) -> None:
    def end() -> None:
        while process.asked < 2:
            time.sleep(0.01)
        process.service.close()

    thread = threading.Thread(target=end)
    thread.start()
    run = piped(process.path, "-n", "1000", "--interval", "0.1")
    thread.join(LIMIT_S)
    assert run.returncode == 0
    assert "aiordma top: " in run.stderr
    assert run.stdout.count("NUMBER") >= 2


def test_peers_write_no_escape_sequences(
    process: Process, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rude = dataclasses.replace(seen().connections[0], device="\x1b[2Jrxe\n0", state="\u202eopen")
    monkeypatch.setattr(serving, "snapshot", lambda: seen(connections=(rude,)))
    assert main(["top", process.path]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 5
    assert all(char == "\n" or char.isprintable() for char in out)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Terminal:
    """`aiordma top` on a terminal of its own."""

    def __init__(self, *words: str, rows: int = 24) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (rows, 120))
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        # A shell starts programs in the background with a SIGINT that is ignored, for good.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [*TOP, *words], stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True,
        )  # fmt: skip
        signal.signal(signal.SIGINT, before)
        os.close(slave)
        self.text = ""

    def read(self) -> bool:
        """Read what there is; False at the end."""
        if not select.select([self.master], [], [], 0.05)[0]:
            return True
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # EIO: the other side was closed
            return False
        self.text += data.decode()
        return bool(data)

    def shows(self, text: str, times: int = 1) -> None:
        until(lambda: self.read() and self.text.count(text) >= times)

    def ended(self) -> int:
        until(lambda: not self.read())
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT_S)
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*words: str, **options: Any) -> Terminal:
        made.append(Terminal(*words, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_on_a_terminal_it_refreshes_until_ctrl_c(
    process: Process, terminal: Callable[..., Terminal]
) -> None:
    shown = terminal(process.path, "--interval", "0.1")
    shown.shows("NUMBER", 3)
    assert "\x1b[" in shown.text, "the table is drawn in place"
    assert "192.0.2.7 18515" in shown.text
    os.killpg(shown.process.pid, signal.SIGINT)
    assert shown.ended() == 0
    assert "Traceback" not in shown.text
    assert shown.text.count("\x1b[?25h") == 1, "the cursor is back"


def test_a_terminal_that_is_low_shows_the_busiest(
    monkeypatch: pytest.MonkeyPatch, process: Process, terminal: Callable[..., Terminal]
) -> None:
    first = seen().connections[0]
    many = tuple(
        dataclasses.replace(first, number=100 + i, bytes_sent=10**6 * i) for i in range(50)
    )
    monkeypatch.setattr(
        serving, "snapshot", lambda: seen(connections=many, streams=(), datagrams=())
    )
    shown = terminal(process.path, "-n", "1", rows=10)
    assert shown.ended() == 0
    assert " 149 " in " " + shown.text.replace("\r\n", " ")
    assert "... and 44 more" in shown.text
    assert " 101  " not in shown.text


# What gives no snapshot


#: A snapshot of a process that has nothing open.
_NONE = (
    b"""{"pid": 1, "time": 1.0, "totals": {}, "connections": [], "streams": [], "datagrams": []}"""
)


@pytest.mark.parametrize(
    "kind",
    [
        "nothing",
        "file",
        "folder",
        "left",
        "garbage",
        "other",
        "deep",
        "rows",
        "row",
        "nan",
        "infinity",
        "much",
        "words",
        "time",
    ],
)
def test_what_gives_no_snapshot(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    answers = {
        "garbage": b"\x80\x00{", "other": b'{"totals": 5}', "deep": b"[" * 100_000,
        "rows": _NONE.replace(b'"connections": []', b'"connections": [7]'),
        "row": _NONE.replace(b'"datagrams": []', b'"datagrams": [{}]'),
        "nan": _NONE.replace(b"1.0", b"NaN"),
        "infinity": _NONE.replace(b"1.0", b"1e999"),
        "much": _NONE.replace(b"{}", b'{"refused": 1' + b"0" * 400 + b"}"),
        "words": _NONE.replace(b"}", b', "unlisted_streams": "all"}'),
        "time": _NONE.replace(b"1.0", b"1e300"),
    }  # fmt: skip
    listening: socket.socket | None = None
    thread: threading.Thread | None = None
    if kind == "file":
        path.write_bytes(_NONE.replace(b'"pid": 1', b'"pid": -1'))
    elif kind == "folder":
        path.mkdir()
    elif kind == "left":
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    elif kind in answers:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            assert listening is not None
            client, _ = listening.accept()
            with client:
                client.sendall(answers[kind])

        thread = threading.Thread(target=answer)
        thread.start()
    assert main(["top", str(path)]) == 1
    if listening is not None and thread is not None:
        thread.join(LIMIT_S)
        listening.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aiordma top: ")
    assert err.count("\n") == 1


def test_a_socket_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "LIMIT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "x"))
        listening.listen()
        assert main(["top", str(tmp_path / "x")]) == 1
    assert "no answer" in capsys.readouterr().err


def test_a_reader_waits_behind_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as stack:
        listening.bind(str(tmp_path / "x"))
        listening.listen(0)
        first = stack.enter_context(socket.socket(socket.AF_UNIX))
        first.connect(str(tmp_path / "x"))
        line_is_full = stack.enter_context(socket.socket(socket.AF_UNIX))
        line_is_full.setblocking(False)
        with pytest.raises(BlockingIOError):
            line_is_full.connect(str(tmp_path / "x"))

        def serve_all() -> None:
            for answer in (b"", _NONE):
                client, _ = listening.accept()
                with client:
                    client.sendall(answer)

        thread = threading.Thread(target=serve_all)
        thread.start()
        assert main(["top", str(tmp_path / "x")]) == 0
        thread.join(LIMIT_S)
    assert capsys.readouterr().out.startswith("process 1: ")


def test_a_process_is_found_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for words in ([], [str(os.getpid())]):
        run = piped(*words)
        assert run.returncode == 1
        assert "`import aiordma.metrics` and call `aiordma.metrics.serve()`" in run.stderr
        assert run.stderr.count("\n") == 1  # no usage: it is no mistake of typing
    with serving.serve():
        for words in ([], [str(os.getpid())]):
            run = piped(*words)
            assert (run.returncode, run.stderr) == (0, "")
            assert run.stdout.startswith(f"process {os.getpid()}: ")
    run = piped(str(2**22 + 1))
    assert (run.returncode, run.stderr) == (1, f"aiordma top: there is no process {2**22 + 1}\n")


_DUMPING = """
import sys
from aiordma import metrics
print(metrics.dump_on_signal(path=sys.argv[1]), flush=True)
sys.stdin.readline()
"""


def test_the_dump_of_a_process_is_asked_for_by_its_signal(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    with subprocess.Popen(
        [sys.executable, "-c", _DUMPING, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == f"{path}\n"
        old = json.loads(path.read_text())
        run = piped(str(path), "--json", "-n", "2", "--interval", "0.1")
        assert run.stderr == ""
        times = [json.loads(line)["time"] for line in run.stdout.splitlines()]
        assert old["time"] < times[0] < times[1]
        kept = path.read_text()
        process.communicate("\n", timeout=LIMIT_S)
    # The file of a process that is gone: no other process gets its signal.
    path.write_text(kept)
    run = piped(str(path))
    assert (run.returncode, "has ended" in run.stderr) == (1, True)
    path.write_text(kept.replace(f'"pid": {process.pid}', f'"pid": {os.getpid()}'))
    run = piped(str(path))  # this process would end by SIGUSR1
    assert (run.returncode, "has ended" in run.stderr) == (1, True)


def test_the_dump_of_another_user_has_no_process_signaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its owner writes any number and any signal into it."""
    path = tmp_path / "dump.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        dump = {"signal": 9, "began": serving.start_of(process.pid)}
        path.write_text(
            json.dumps({
                "pid": process.pid, "time": 1.0, "totals": {}, "connections": [], "streams": [],
                "datagrams": [], "dump": dump,
            })
        )  # fmt: skip
        fstat = os.fstat

        def of_another(descriptor: int) -> os.stat_result:
            found = list(fstat(descriptor))
            found[stat.ST_UID] += 1
            return os.stat_result(found)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", of_another)
            assert main(["top", str(path)]) == 1
        assert "does not belong to the owner of the file" in capsys.readouterr().err
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0  # and not by the signal


def test_a_process_is_not_looked_for_in_the_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "aiordma"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / f"{os.getpid()}.json").write_text("{}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["top", str(os.getpid())]) == 1
    assert "shows nothing" in capsys.readouterr().err
    folder.chmod(0o700)
    assert main(["top", str(os.getpid())]) == 1
    assert "gives no snapshot" in capsys.readouterr().err


def test_a_dump_that_has_become_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.touch()
    source = top.DumpSource(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(top.NoSnapshotError, match="not a file"):
        source.take()
