"""A command of the uml engine in a terminal, and with input from a pipe."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import pytest

from .conftest import LIMIT, REPOSITORY, Runner, eventually, guest_of, members
from .keyboard import Screen, screen

pytestmark = pytest.mark.uml

_BASH = ("bash", "--norc", "--noprofile")
_SURROUNDINGS = {
    **os.environ, "PYTHONPATH": str(REPOSITORY / "softroce/src"), "TERM": "xterm",
    "PS1": "<$(tty)>", "LC_ALL": "C",
}  # fmt: skip


def _start(*command: str, options: tuple[str, ...] = ()) -> AbstractContextManager[Screen]:
    words = [sys.executable, "-B", "-m", "aiordma_softroce", "--engine", "uml", *options]
    return screen([*words, "--", *command], _SURROUNDINGS)


def _children(process: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _session(runner: int) -> int:
    """The guest's session; its keeper is the only child of the runner."""
    (keeper,) = _children(runner)
    return keeper


def test_a_shell() -> None:
    with _start(*_BASH) as there:
        there.until("<(/dev/pts/0)>")
        before = there.modes()
        there.type("rdma link | cat; tput colors\r")
        there.until("rxe0.*ACTIVE(?s:.*)\r\n8\r\n")
        there.type("stty size\r")
        there.until("33 77\r\n")
        there.resize(50, 120)
        there.type("stty size\r")
        there.until("50 120\r\n")
        # Quotes, so that the echo of the line is not what is waited for.
        there.type("sh -c 'echo run\"\"ning; exec sleep 1000'\r")
        there.until("running\r\n")
        there.type("\x03")  # Ctrl-C ends the job, and not the shell
        there.until("<.*>")
        there.type("echo status $?\r")
        there.until("status 130")
        there.type("sh -c 'echo read''ing; cat; echo read'\r")
        there.until("reading\r\n")
        there.type("words\r\x04")  # Ctrl-D ends the input of the job
        there.until("words\r\nwords\r\nread\r\n")
        # With `exec`: dash can lose a Ctrl-Z that comes while dash starts a command.
        there.type("sh -c 'echo run''ning; exec sleep 1000'\r")
        there.until("running\r\n")
        there.type("\x1a")  # Ctrl-Z stops the job
        there.until("Stopped")
        there.type("jobs; kill %1; wait; echo -e '\\033[31mred\\033[0m'\r")
        there.until("\x1b\\[31mred\x1b\\[0m")
        there.type("exit 7\r")
        assert there.end() == 7
        assert there.modes() != before  # those of the shell's prompt


def test_the_terminal_is_as_it_was_whatever_the_end() -> None:
    """Ctrl-], SIGTERM, the time limit, the death of the guest: each puts the modes back."""
    ends = ("escape", "term", "limit", "kill", "exit", "unknown")
    for end in ends:
        options = ("--timeout", "30") if end == "limit" else ()
        command = ["sh", "-c", "stty raw -echo; echo started; cat"]
        if end in ("exit", "unknown"):
            command = ["sh", "-c", "exit 3"] if end == "exit" else ["no-such-command"]
        with _start(*command, options=options) as there:
            before = there.before
            if end in ("exit", "unknown"):
                assert there.end() == (3 if end == "exit" else 127)
                assert there.modes() == before, end
                continue
            there.until("started")
            assert there.modes() != before
            session = _session(there.pid)
            if end == "escape":
                there.type("\x1d\x1d\x1d")
            elif end == "term":
                os.kill(there.pid, signal.SIGTERM)
            elif end == "kill":
                os.killpg(guest_of(session), signal.SIGKILL)
            expected = {"escape": 130, "term": 143, "limit": 124, "kill": 125}
            assert there.end() == expected[end], (end, there.seen)
            assert there.modes() == before, end
            assert eventually(lambda session=session: not members(session))  # type: ignore[misc]
            if end in ("kill", "limit"):
                # The runner's own lines begin at the left.
                assert b"\r\nsoftroce: " in there.seen


def test_a_window_that_changes_during_the_boot() -> None:
    """And keys that are typed then: nothing is lost, and nothing is taken for the request."""
    with _start("sh", "-c", "read word; stty size; echo got $word") as there:
        assert eventually(lambda: bool(_children(there.pid)))
        there.resize(44, 99)
        os.kill(there.pid, signal.SIGWINCH)
        there.type("early\r")
        there.until("44 99\r\ngot early")
        assert there.end() == 0


def test_virtual_time() -> None:
    with _start(
        "sh", "-c", "read word; echo got $word; sleep 3600", options=("--virtual-time",)
    ) as s:
        s.type("this\r")
        s.until("got this")
        assert s.end() == 0


def test_a_command_that_never_lets_time_pass() -> None:
    """No key reaches it: the escape is the way out."""
    spin = "while :; do :; done"
    with _start("sh", "-c", spin, options=("--virtual-time",)) as there:
        before = there.before
        # Not its output: that takes time, too.
        assert eventually(lambda: there.modes() != before)
        there.type("\x03")
        there.type("\x1d")
        there.type("x\x1d\x1d")  # not three in a row
        there.type("\x1d\x1d\x1d")
        assert there.end() == 130
        assert there.modes() == before


def test_pdb() -> None:
    program = "x = 6\nbreakpoint()\nprint('product', x * 7)\n"
    with _start(sys.executable, "-c", program) as there:
        there.until("\\(Pdb\\) ")
        there.type("p x + 1\r")
        there.until("7\r\n")
        there.type("c\r")
        there.until("product 42\r\n")
        assert there.end() == 0


def test_a_stop_and_a_background_of_the_runner() -> None:
    """SIGTSTP gives the terminal back until the runner goes on."""
    with _start("sh", "-c", "stty -echo; echo started; read word; echo got $word") as there:
        before = there.before
        there.until("started")
        raw = there.modes()
        assert raw != before
        os.kill(there.pid, signal.SIGTSTP)
        assert eventually(there.stopped)
        assert there.modes() == before
        there.resize(11, 22)
        os.kill(there.pid, signal.SIGCONT)
        assert eventually(lambda: there.modes() == raw)
        there.type("this\r")
        there.until("got this")
        assert there.end() == 0


def test_everything_arrives_at_the_terminal() -> None:
    """The last bytes, too, of a command that ends at once."""
    with _start("sh", "-c", "seq 200000; echo last") as there:
        there.until("\r\nlast\r\n")
        assert there.end() == 0
        lines = there.seen.replace(b"\r\n", b"\n").split()
        assert lines[:200000] == [b"%d" % number for number in range(1, 200001)]


def test_a_large_paste() -> None:
    with _start("sh", "-c", "stty raw -echo; echo started; head -c 300000 | md5sum") as there:
        there.until("started")
        block = "0123456789" * 30
        for _ in range(1000):
            there.type(block)
        there.until("[0-9a-f]{32}")
        assert there.end() == 0
        wanted = subprocess.run(
            ["md5sum"], input=block.encode() * 1000, capture_output=True, check=True
        )
        assert wanted.stdout.split()[0] in there.seen


def test_a_paste_into_a_program_that_reads_late(tmp_path: Path) -> None:
    """All that is between the keyboard and the program is full once, and keys arrive later, too."""
    gate, size = tmp_path / "gate", 500_000
    late = f"stty raw -echo; echo started; while [ ! -e {gate} ]; do sleep 0.1; done; "
    late += f"head -c {size} | md5sum; head -c 3 | md5sum"
    with _start("sh", "-c", late) as there:
        there.until("started")
        os.set_blocking(there.master, False)
        left = keys = memoryview(b"0123456789" * (size // 10))
        while left:
            # A second without room is no proof, but enough for a kernel that loses its source.
            _, writable, _ = select.select([], [there.master], [], LIMIT if gate.exists() else 1)
            if not writable:
                assert not gate.exists(), f"{len(left)} bytes find no room"
                gate.touch()
                continue
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(there.master, left[:4096]) :]
        gate.touch()
        there.until(hashlib.md5(keys).hexdigest())
        there.type("end")
        there.until(hashlib.md5(b"end").hexdigest())
        assert there.end() == 0


def test_options_say_otherwise() -> None:
    program = "import os, sys; print(os.isatty(0), os.isatty(1), len(sys.stdin.read()))"
    for options, told in (
        (("--no-tty",), "False False 0"),
        (("--no-interactive",), "False False 0"),
        (("-i",), "False False 5"),
    ):
        with _start(sys.executable, "-c", program, options=options) as there:
            if options == ("-i",):
                there.type("text\r\x04")
            there.until(told)
            assert there.end() == 0
    with _start("sh", "-c", "tty; stty size; cat", options=("-t", "--timeout", "30")) as there:
        there.until("/dev/pts/0\r+\n33 77")
        assert there.end() == 124


def test_errors_apart(tmp_path: Path) -> None:
    """Standard error that goes to a file is no part of the terminal."""
    words = f"{sys.executable} -m aiordma_softroce --engine uml -- "
    words += f"sh -c 'echo out; echo err >&2; test -t 1' 2> {tmp_path}/errors"
    with screen(["sh", "-c", words], _SURROUNDINGS) as there:
        there.until("out\r\n")
        assert there.end() == 0
        assert b"err\r\n" not in there.seen
    assert (tmp_path / "errors").read_bytes() == b"err\n"


def test_a_job_in_the_background_has_no_terminal() -> None:
    with screen([*_BASH, "-i"], _SURROUNDINGS) as there:
        there.until(">")
        there.type(
            f"{sys.executable} -m aiordma_softroce --engine uml -- "
            "sh -c 'test -t 0 || echo no ter''minal' & wait\r"
        )
        there.until("no terminal")
        there.type("exit 5\r")
        assert there.end() == 5


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_a_pipe(size: int, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(os.urandom(size))
    with (
        (tmp_path / "input").open("rb") as file,
        subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE) as process,
    ):
        done = _piped("cat", stdin=process.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "input").read_bytes()


def test_a_pipe_that_is_not_read_to_its_end() -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as process:
        done = _piped("head", "-n", "2", stdin=process.stdout)
        process.kill()
    assert (done.returncode, done.stdout) == (0, b"y\ny\n")


def _piped(*command: str, stdin: IO[bytes] | None) -> subprocess.CompletedProcess[bytes]:
    words = [sys.executable, "-B", "-m", "aiordma_softroce", "--engine", "uml", "-i", "--"]
    return subprocess.run(
        [*words, *command], stdin=stdin, capture_output=True, env=_SURROUNDINGS, timeout=LIMIT,
        check=False,
    )  # fmt: skip


def test_impossible_terminals_are_told(softroce: Runner) -> None:
    done = softroce("-i", "-t", "--engine", "uml", "--", "true")
    assert done.returncode == 2
    assert b"leave out --tty" in done.stderr
    done = softroce("-t", "--engine", "host", "--", "true")
    assert done.returncode == 2
    assert b"--tty without --interactive" in done.stderr
    script = f"{sys.executable} -m aiordma_softroce -i --engine uml -- true <&-"
    closed = subprocess.run(
        ["sh", "-c", script], capture_output=True, env=_SURROUNDINGS, timeout=LIMIT, check=False
    )
    assert closed.returncode == 2
    assert b"standard input is closed" in closed.stderr
