"""`aiordma cp` and `aiordma serve`: files go both ways, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest

from aiordma.cli.__main__ import main
from aiordma.cli.ports import DEFAULT_PORT
from tests.device.commands import running
from tests.device.shared import name_of_device
from tests.device.terminal import CTRL_C, plain, terminal

# Processes of their own, whatever the tests' loop: once on each device is enough.
pytestmark = [pytest.mark.device, pytest.mark.program]

LIMIT_S = 60
LARGE = 64 << 20
COMMAND = (sys.executable, "-W", "error", "-m", "aiordma")


class Copy(Protocol):
    """Runs `aiordma cp`; gives status, output and errors."""

    def __call__(self, *words: str) -> tuple[int, str, str]: ...


@pytest.fixture
def cp(capsys: pytest.CaptureFixture[str]) -> Copy:
    """In this process, which saves a second for each."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["cp", *words])
        return status, *capsys.readouterr()

    return run


class Server:
    """`aiordma serve` of a folder."""

    def __init__(self, folder: Path, address: str, *options: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [*COMMAND, "serve", str(folder), "--host", address, "--port", "0", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        listening = self.line()
        assert listening["event"] == "listening"
        self.at = f"{listening['host']}:{listening['port']}"

    def line(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        assert ready, "the server says nothing"
        text = self.process.stdout.readline()
        assert text, self.process.communicate(timeout=LIMIT_S)
        said: dict[str, Any] = json.loads(text)
        return said

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it, and look whether it ended well."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=LIMIT_S)
        assert (self.process.returncode, err) == (0, "")


@contextlib.contextmanager
def serving(folder: Path, address: str, *options: str) -> Iterator[Server]:
    folder.mkdir(exist_ok=True)
    server = Server(folder, address, *options)
    try:
        yield server
        if server.process.poll() is None:
            server.end()
    finally:
        server.process.kill()
        server.process.communicate(timeout=LIMIT_S)


def make(path: Path, size: int) -> str:
    """A file of chance bytes, and its SHA-256."""
    data = Random(size).randbytes(size)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def same(one: Path, other: Path) -> bool:
    return filecmp.cmp(one, other, shallow=False)


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_there_and_back(address: str, tmp_path: Path, cp: Copy) -> None:
    want = make(tmp_path / "there", LARGE)
    with serving(tmp_path / "served", address, "--writable") as server:
        status, out, err = cp("--json", str(tmp_path / "there"), f"{server.at}/file")
        assert (status, err) == (0, "")
        told = json.loads(out)
        assert (told["ok"], told["bytes"], told["sha256"]) == (True, LARGE, want)
        assert (told["backend"], told["device"]) == ("rdma", name_of_device(is_siw=False))
        assert same(tmp_path / "there", server.folder / "file")
        said = server.line()
        assert (said["event"], said["name"], said["sha256"]) == ("put", "file", want)

        status, out, err = cp(f"{server.at}/file", str(tmp_path / "back"))
        assert (status, err) == (0, "")
        assert f"{LARGE} bytes in " in out
        assert want in out
        assert same(tmp_path / "there", tmp_path / "back")
        assert server.line()["event"] == "get"
        assert os.listdir(server.folder) == ["file"]


def test_names_that_are_given_by_half(address: str, tmp_path: Path, cp: Copy) -> None:
    make(tmp_path / "name", 10)
    make(tmp_path / "empty", 0)
    with serving(tmp_path / "served", address, "--writable") as server:
        (server.folder / "inner").mkdir()
        (tmp_path / "here").mkdir()
        for target in ("", "inner/"):
            assert cp("-q", str(tmp_path / "name"), f"{server.at}/{target}") == (0, "", "")
        assert (server.folder / "name").stat().st_size == 10
        assert cp("-q", f"{server.at}/inner/name", str(tmp_path / "here")) == (0, "", "")
        assert (tmp_path / "here" / "name").stat().st_size == 10
        assert cp("-q", str(tmp_path / "empty"), f"{server.at}/name") == (0, "", "")
        assert (server.folder / "name").read_bytes() == b""


def test_several_at_a_time(address: str, tmp_path: Path) -> None:
    names = ["0", "1", "2"]
    for name in names:
        make(tmp_path / name, (1 << 20) + int(name))
    with serving(tmp_path / "served", address, "--writable") as server:
        copies = [
            subprocess.Popen([*COMMAND, "cp", "-q", str(tmp_path / name), f"{server.at}/"])
            for name in names
        ]
        assert [copy.wait(LIMIT_S) for copy in copies] == [0] * len(names)
        assert all(same(tmp_path / name, server.folder / name) for name in names)


def test_what_is_refused(address: str, tmp_path: Path, cp: Copy) -> None:
    make(tmp_path / "file", 10)
    (tmp_path / "secret").write_text("x")
    with serving(tmp_path / "served", address) as server:
        (server.folder / "link").symlink_to("../secret")
        (server.folder / "up").symlink_to("..")
        for name, words in (
            ("none", "No such file"),
            ("link", "symbolic link"),
            ("up/secret", "Not a directory"),
        ):
            status, out, err = cp(f"{server.at}/{name}", str(tmp_path / "got"))
            assert (status, out) == (1, "")
            assert words in err
            assert server.line()["event"] == "failed"
        for name in ("../secret", "/etc/passwd"):
            assert cp(f"{server.at}/{name}", str(tmp_path / "got"))[:2] == (2, "")
        status, out, err = cp("--json", str(tmp_path / "file"), f"{server.at}/new")
        assert status == 1
        assert json.loads(out)["reason"] == "read-only"
        assert "--writable" in err
    assert sorted(os.listdir(tmp_path)) == ["file", "secret", "served"]


def test_what_is_not_there(
    address: str, tmp_path: Path, cp: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = cp(str(tmp_path / "none"), f"{address}:1/x")
    assert (status, out) == (1, "")
    assert "none: No such file" in err
    (tmp_path / "file").touch()
    status, out, err = cp(str(tmp_path / "file"), f"{address}:1/x")
    assert (status, out) == (1, "")
    assert "file was not copied: " in err
    assert cp(f"{address}:1/x", str(tmp_path / "got"))[0] == 1
    assert main(["serve", str(tmp_path / "none")]) == 1
    assert "none: No such file" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--host", "192.0.2.1"]) == 1
    assert "cannot listen on 192.0.2.1" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]


def faults_of_a_copy(address: str, tmp_path: Path, size: int, *, is_put: bool) -> int:
    """Page faults of `aiordma cp` and `aiordma serve` together."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    with serving(tmp_path / "served", address, "--writable") as server:
        here, there = tmp_path / "here", server.folder / "there"
        make_large(here if is_put else there, size)
        names = [str(here), f"{server.at}/there"]
        words = names if is_put else names[::-1]
        subprocess.run([*COMMAND, "cp", "-q", *words], check=True, timeout=LIMIT_S)
        assert here.stat().st_size == there.stat().st_size == size
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before


@pytest.mark.parametrize("is_put", [True, False], ids=["put", "get"])
def test_a_file_goes_through_memory_that_is_used_again(
    address: str, tmp_path: Path, is_put: bool
) -> None:
    """Memory that is new for each piece costs up to 256 page faults a MiB, and most of the time.

    The count does not depend on the speed of the machine, as the time does.  But it depends on how
    many pieces are under way at a time: copies of one file differ by up to 2,500 faults, 40 a MiB.
    """
    small = faults_of_a_copy(address, tmp_path, 32 << 20, is_put=is_put)
    large = faults_of_a_copy(address, tmp_path, LARGE + (32 << 20), is_put=is_put)
    assert (large - small) / (LARGE >> 20) < 100


@contextlib.contextmanager
def copying(source: str, target: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A copy that is under way: some of the file is in the folder."""
    copy = subprocess.Popen(
        [*COMMAND, "cp", source, target], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: any(path.stat().st_size for path in folder.iterdir()))
        yield copy
    finally:
        copy.kill()
        copy.communicate(timeout=LIMIT_S)


def make_large(path: Path, size: int = 8 << 30) -> str:
    """A file of zeros; by default it takes longer to copy than any test has."""
    with path.open("wb") as file:
        file.truncate(size)
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_client_that_is_ended_in_the_middle(
    address: str, tmp_path: Path, number: signal.Signals, cp: Copy
) -> None:
    large = make_large(tmp_path / "large")
    with serving(tmp_path / "served", address, "--writable") as server:
        with copying(large, f"{server.at}/file", server.folder) as copy:
            copy.send_signal(number)
            _, err = copy.communicate(timeout=LIMIT_S)
        assert copy.returncode == (130 if number == signal.SIGINT else -number)
        assert not err.strip()
        assert server.line()["event"] == "failed"
        assert os.listdir(server.folder) == []
        make(tmp_path / "small", 10)
        assert cp("-q", str(tmp_path / "small"), f"{server.at}/file") == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_server_that_is_ended_in_the_middle(
    address: str, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "served"
    large = make_large(tmp_path / "large")
    with (
        serving(folder, address, "--writable") as server,
        copying(large, f"{server.at}/file", folder) as copy,
    ):
        if number == signal.SIGINT:
            server.end(number)
            assert os.listdir(folder) == []
        else:
            server.process.kill()
        _, err = copy.communicate(timeout=LIMIT_S)
        assert copy.returncode == 1
        assert "was not copied" in err
        assert "Traceback" not in err
        assert not (folder / "file").exists()


def test_ctrl_c_of_a_get_leaves_nothing(address: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    with serving(tmp_path / "served", address) as server:
        make_large(server.folder / "large")
        with copying(f"{server.at}/large", str(here), here) as copy:
            copy.send_signal(signal.SIGINT)
            assert copy.wait(LIMIT_S) == 130
            assert os.listdir(here) == []
        assert server.line()["event"] == "failed"


@pytest.mark.parametrize("term", ["xterm", "linux", ""])
def test_progress_is_for_eyes(address: str, tmp_path: Path, term: str) -> None:
    """A bar in a terminal, in the unit of the last line, and in colors."""
    make(tmp_path / "file", 4 << 20)
    with serving(tmp_path / "served", address, "--writable") as server:
        words = [*COMMAND, "cp", str(tmp_path / "file"), f"{server.at}/x"]
        with terminal(words, TERM=term) as screen:
            assert screen.end() == 0
        text = plain(screen.screen)
        assert "\u2501" in text, "the bar"
        assert "/4.2 MiB" not in text
        assert re.search(r"/4\.0 MiB", text)
        assert re.search(r"\d MiB/s", text)
        assert not re.search(r"[kMG]B", text)
        last = text.rstrip("\n").rpartition("\n")[2]
        assert re.search(r"4194304 bytes in \d+\.\d\d s \(\d+\.\d MiB/s\)  sha256 ", last)


def test_no_progress_in_a_pipe(address: str, tmp_path: Path) -> None:
    make(tmp_path / "file", 4 << 20)
    with serving(tmp_path / "served", address, "--writable") as server:
        done = subprocess.run(
            [*COMMAND, "cp", str(tmp_path / "file"), f"{server.at}/x"],
            capture_output=True, check=False, text=True, timeout=LIMIT_S,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "\x1b" not in done.stdout


def test_ctrl_c_in_a_terminal(address: str, tmp_path: Path) -> None:
    large = make_large(tmp_path / "large")
    with serving(tmp_path / "served", address, "--writable") as server:
        with terminal([*COMMAND, "cp", large, f"{server.at}/x"], TERM="xterm") as screen:
            screen.until("MiB/s")
            screen.press(CTRL_C)
            assert screen.end() == 130
        assert "Traceback" not in screen.screen
        assert server.line()["event"] == "failed"
        assert os.listdir(server.folder) == []


def test_the_default_port(address: str, tmp_path: Path, cp: Copy) -> None:
    make(tmp_path / "file", 10)
    (tmp_path / "served").mkdir()
    words = ("serve", str(tmp_path / "served"), "--host", address, "--writable")
    with running(*words) as server:
        assert server.line() == f"listening on {address} {DEFAULT_PORT}"
        assert cp("-q", str(tmp_path / "file"), f"{address}:/") == (0, "", "")
        assert cp("-q", f"{address}:/file", str(tmp_path / "back")) == (0, "", "")
        assert same(tmp_path / "file", tmp_path / "back")
        assert server.end().status == 0


def test_a_server_of_another_kind(address: str, tmp_path: Path, cp: Copy) -> None:
    with running("echo", "--host", address) as server:
        server.line()
        status, out, err = cp(f"{address}:/x", str(tmp_path / "x"))
    assert (status, out) == (1, "")
    assert err == (
        f"aiordma cp: {address}:/x was not copied: a listener for messages is there, such as "
        "`aiordma echo`, not an `aiordma serve`\n"
    )


def test_g02_a_server_whose_lines_are_not_read_goes_on(
    tmp_path: Path, address: str, cp: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "served", address, "--writable") as server:
        assert server.process.stdout is not None
        # Room for a page, which the lines of a few copies fill.
        fcntl.fcntl(server.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        name = "n" * 200
        make(tmp_path / name, 10)
        for _ in range(16):
            assert cp(name, f"{server.at}/{name}")[0] == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0
