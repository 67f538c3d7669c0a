"""The commands where no device is, where libraries are missing, and where a driver hangs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from aiordma.cli import bounded, devices, doctor
from aiordma.cli.__main__ import main
from aiordma.cli.app import aiordma
from aiordma.cli.ports import DEFAULT_PORT

from .machine import Machine

ROOT = Path(__file__).parents[3]
LIMIT_S = 60

# Stands before a program: what happens on a machine where the libraries cannot be loaded.
NO_LIBRARIES = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "aiordma._ffi._rdma":
            raise ImportError("librdmacm.so.1: cannot open shared object file")
        if name == "click":
            raise ModuleNotFoundError(name, name=name)
        return None

sys.meta_path.insert(0, Blocker())
from aiordma.cli.__main__ import main
"""


@pytest.fixture(params=["click", "argparse"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both command lines: with the extra `cli` and without."""
    if request.param == "argparse":
        monkeypatch.setitem(sys.modules, "click", None)
        monkeypatch.delitem(sys.modules, "aiordma.cli.app", raising=False)
    return str(request.param)


# ---- no device -----------------------------------------------------------------------------


def test_doctor_says_what_to_do(
    machine: Machine, parser: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"FAIL  kernel devices      the kernel lists none in {machine.sysfs}" in text
    assert "python -m aiordma_softroce" in text
    assert text.splitlines()[-1].startswith("RDMA cannot be used like this: 1 failed")


def test_the_page_shows_every_check_of_doctor() -> None:
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    block = page.split("$ aiordma doctor\n", 1)[1].split("```", 1)[0]
    shown = [line.removeprefix("OK    ") for line in block.splitlines() if line.startswith("OK ")]
    for line, name in zip(shown, doctor.CHECKS, strict=True):
        assert line.startswith(f"{name} "), "docs/commands.md has the checks in their order"


def test_doctor_for_programs(
    machine: Machine, parser: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [check["name"] for check in found["checks"]] == list(doctor.CHECKS)
    assert {check["status"] for check in found["checks"]} <= {"OK", "WARN", "FAIL", "SKIP"}
    assert all(check["advice"] for check in found["checks"] if check["status"] == "FAIL")


def test_devices_hints_at_the_reason(
    machine: Machine, parser: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no RDMA device" in err or "cannot load rdma-core" in err
    assert "aiordma doctor" in err


def test_devices_for_programs(
    machine: Machine, parser: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []


# ---- the command line ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [[], ["--dance"], ["doctor", "--dance"], ["devices", "rxe0"], ["gids", "a", "b"]]
)
def test_wrong_words(parser: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "sage: aiordma" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["dance", "ping", "echo", "cp", "serve", "perf"])
def test_without_click_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    monkeypatch.setitem(sys.modules, "click", None)
    monkeypatch.delitem(sys.modules, "aiordma.cli.app", raising=False)
    assert main([word, "10.80.0.1", "-c", "1"]) == 2
    assert capsys.readouterr() == (
        "",
        "aiordma: only devices, doctor, gids work here: click is not installed; all commands: "
        "pip install 'aiordma[cli]'\n",
    )


def test_another_module_that_is_missing_is_not_taken_for_click(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "aiordma.cli.perf.command", None)
    monkeypatch.delitem(sys.modules, "aiordma.cli.app", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"perf\.command"):
        main(["doctor"])


def test_the_commands_that_the_rest_of_the_group_names() -> None:
    """Each with a docstring, and each with the same letters for help."""
    assert set(aiordma.commands) >= {
        "cp", "devices", "doctor", "echo", "gids", "perf", "ping", "serve"
    }  # fmt: skip
    runner = CliRunner()
    for name, command in aiordma.commands.items():
        assert command.help, name
        answers = [runner.invoke(aiordma, [name, word]) for word in ("-h", "--help")]
        assert [answer.exit_code for answer in answers] == [0, 0]
        assert answers[0].output == answers[1].output
        assert answers[0].output.startswith(f"Usage: aiordma {name} ")


def test_one_port_for_all() -> None:
    ports = {
        name: option.default
        for name, command in aiordma.commands.items()
        for option in command.params
        if option.name == "port"
    }
    assert ports == dict.fromkeys(("doctor", "echo", "perf", "ping", "serve"), DEFAULT_PORT)


@pytest.mark.parametrize(
    "words",
    [
        ("ping",), ("ping", "a", "b"), ("ping", "-c", "0", "a"), ("ping", "-i", "0", "a"),
        ("ping", "-s", "-1", "a"), ("ping", "-s", "67108865", "a"), ("ping", "-W", "0", "a"),
        ("ping", "--connect", "-s", "56", "a"), ("ping", "--key-file", "/", "a"),
        ("ping", "--key-file", "/nowhere", "a"), ("ping", "--key-file", "/dev/null", "a"),
        ("ping", "--key-file", "/dev/zero", "a"),
        ("ping", "-W", "nan", "a"), ("ping", "-i", "inf", "a"), ("ping", "--port", "0", "a"),
        ("echo", "a"), ("echo", "--max-clients", "0"), ("echo", "--port", "65536"),
        ("doctor", "--key-file", "/nowhere", "a"), ("doctor", "--key-file", "/dev/null", "a"),
        ("doctor", "a", "b"), ("doctor", "--port", "0", "a"), ("doctor", "--timeout", "0", "a"),
        ("serve",), ("cp", "a"),
    ],
)  # fmt: skip
def test_wrong_options(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "Error: " in err


@pytest.mark.parametrize(
    "words", [["-h"], ["--help"], ["doctor", "-h"], ["gids", "--help"], ["--version"]]
)
def test_questions(parser: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "aiordma" in out
    assert err == ""


def test_the_package_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "aiordma", "doctor", "--json"],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stderr == ""
    assert done.returncode == (0 if json.loads(done.stdout)["ok"] else 1)


def test_neither_libraries_nor_click_are_needed() -> None:
    for command in ("doctor", "devices"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", f"{NO_LIBRARIES}sys.exit(main(['{command}']))"],
            capture_output=True,
            check=False,
            cwd=ROOT,
            text=True,
            timeout=LIMIT_S,
        )
        text = done.stdout + done.stderr
        assert done.returncode == 1, text
        assert "librdmacm.so.1: cannot open shared object file" in text
        assert "apt install" in text
        assert "Traceback" not in text


def test_a_reader_that_has_seen_enough() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "aiordma", "doctor"],
            check=False,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=out,
            timeout=LIMIT_S,
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_devices_that_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()
    monkeypatch.setattr(bounded, "LIMIT_S", 0.05)
    monkeypatch.setattr(devices, "devices", lambda: release.wait(LIMIT_S) and [])
    try:
        assert main(["devices"]) == 1
    finally:
        release.set()
    assert "no answer within 0.05 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("a", "b"),
        ("h:1/a", "h:1/b"),
        ("h:0/a", "b"),
        ("h:/", "b"),
        ("h:1/", "b"),
        ("a",),
        ("a", "h:1/.."),
    ],
)
def test_wrong_words_for_cp(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err


def test_the_page_has_every_command() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    table = page.partition("```")[0]
    assert set(re.findall(r"`aiordma (\w+)`", table)) == set(aiordma.commands)
