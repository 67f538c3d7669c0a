"""The launcher of the fabric: it becomes the command, tells it what is there, and tidies up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiordma_fabric import options_parser, profiles
from aiordma_softroce.network import ADDRESS
from tests.fabric.launching import LIMIT_S, gone, launch, launched, outside

#: Prints what a command is told.
_TELL = """
import json, os
names = [name for name in os.environ if name.startswith(("AIORDMA_", "LD_LIBRARY"))]
print(json.dumps({name: os.environ[name] for name in names}))
"""


def told(*words: str, **environment: str) -> dict[str, str]:
    """The variables of a command."""
    command = (sys.executable, "-c", _TELL)
    done = launch(*words, "--", *command, env=outside(**environment))
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", ["aiordma_fabric", "aiordma.testing.fabric"])
def test_the_status_is_that_of_the_command(module: str) -> None:
    words = [sys.executable, "-m", module, "--", "sh", "-c", "echo out; echo err >&2; exit 7"]
    done = subprocess.run(
        words, env=outside(), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")


@pytest.mark.parametrize("module", ["aiordma_fabric", "aiordma.testing.fabric"])
def test_the_help_of_a_module_has_what_was_typed(module: str) -> None:
    words = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(
        words, env=outside(), capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stdout.startswith(f"usage: python -m {module} [options] -- COMMAND ")


def test_the_help_of_the_command_has_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/aiordma-fabric"])
    said = options_parser().format_help()
    assert said.startswith("usage: aiordma-fabric [options] -- COMMAND ")


def test_a_signal_that_ends_the_command_is_seen() -> None:
    assert launch("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_the_command_reads_the_input_of_the_launcher() -> None:
    done = subprocess.run(
        launched("--", "cat"), env=outside(), input="x\n", capture_output=True, text=True,
        check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.stdout == "x\n"


def test_a_command_that_is_none(tmp_path: Path) -> None:
    environment = outside(TMPDIR=str(tmp_path))
    done = launch("--", "no-such-command", env=environment)
    said = "fabric: no-such-command: No such file or directory\n"
    assert (done.returncode, done.stderr) == (127, said)
    done = launch("--", str(tmp_path), env=environment)
    assert (done.returncode, done.stderr) == (126, f"fabric: {tmp_path}: Permission denied\n")
    done = launch()
    said = "fabric: no command was given: put it after --\n"
    assert (done.returncode, done.stderr) == (2, said)
    assert all(gone(folder) for folder in tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command(number: signal.Signals) -> None:
    """The launcher has become the command: there is no process between."""
    script = f"trap 'echo caught; exit 5' {number.name[3:]}; echo ready; read x; exit 6"
    # What this process ignores, as under nohup, a shell could not trap.
    words = launched("--", "env", "--default-signal", "sh", "-c", script)
    with subprocess.Popen(
        words, env=outside(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sh\0-c\0")
        process.send_signal(number)
        # A shell may run a trap when its read has ended.
        out, _ = process.communicate("", timeout=LIMIT_S)
    assert (process.returncode, out) == (5, "caught\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_folder_goes_however_the_command_ends(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        launched("--", "sh", "-c", "echo $AIORDMA_FABRIC; read x"),
        env=outside(TMPDIR=str(tmp_path)), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        os.killpg(process.pid, number)
        process.wait(LIMIT_S)
    assert gone(folder)


def test_what_waits_for_the_output_of_the_command_waits_for_it_alone() -> None:
    """And its own children are those that it has started."""
    script = "import os\ntry: os.wait()\nexcept ChildProcessError: print('none')"
    assert launch("--", sys.executable, "-c", script).stdout == "none\n"


def test_the_command_has_the_signals_that_it_would_have_without() -> None:
    command = ("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")
    direct = subprocess.run(
        command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert launch("--", *command).stdout == direct.stdout


def test_what_the_command_is_told() -> None:
    found = told(LD_LIBRARY_PATH="/some/where")
    folder = found["AIORDMA_FABRIC"]
    assert len(folder) <= 100
    assert found == {
        "AIORDMA_FABRIC": folder,
        "AIORDMA_FABRIC_ADDR": "127.0.0.1",
        "AIORDMA_FABRIC_DEVICES": "1",
        "LD_LIBRARY_PATH": f"{folder}/lib:/some/where",
    }
    assert told("--devices", "0").get("AIORDMA_FABRIC_ADDR") is None
    found = told("--devices=2", "--addresses=10.1.0.1,fd00::1;10.1.0.2")
    assert found["AIORDMA_FABRIC_DEVICES"] == "2"
    assert found["AIORDMA_FABRIC_ADDRESSES"] == "10.1.0.1,fd00::1;10.1.0.2"
    assert (found["AIORDMA_FABRIC_ADDR"], found["AIORDMA_FABRIC_ADDR2"]) == ("10.1.0.1", "10.1.0.2")
    found = told("--devices=2")
    assert (found["AIORDMA_FABRIC_ADDR"], found["AIORDMA_FABRIC_ADDR2"]) == (
        "127.0.0.1",
        "127.0.0.2",
    )


def test_the_help_begins_with_an_address_that_other_devices_have_too() -> None:
    """No adapter but the fabric's has 127.0.0.1."""
    named = re.findall(r"\d+\.\d+\.\d+\.\d+", launch("--help").stdout)
    assert named[0] == ADDRESS


def test_the_names_of_the_library_lead_to_one_file() -> None:
    script = 'cd "$AIORDMA_FABRIC/lib" && for name in *; do echo $name; readlink -f $name; done'
    lines = launch("--", "sh", "-c", script).stdout.split()
    assert lines[::2] == ["libefa.so.1", "libibverbs.so.1", "libmlx5.so.1", "librdmacm.so.1"]
    assert len(set(lines[1::2])) == 1
    assert lines[1].endswith("/aiordma/testing/fabric/_fabric.so")


def test_a_path_that_is_too_long_for_sockets_is_not_used(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    found = told(TMPDIR=str(long))
    assert not Path(found["AIORDMA_FABRIC"]).is_relative_to(tmp_path)
    assert not any(long.iterdir())


def test_profiles(tmp_path: Path) -> None:
    names = profiles()
    assert names[0] == "standard"
    assert launch("--profiles").stdout.split() == names
    assert "AIORDMA_FABRIC_PROFILE" not in told("--profile", "standard")
    for name in names[1:]:
        assert told("--profile", name)["AIORDMA_FABRIC_PROFILE"].endswith(f"/{name}.conf")
    own = tmp_path / "own.conf"
    own.write_text("name = own\n")
    for given in (str(own), os.path.relpath(own)):
        assert told("--profile", given)["AIORDMA_FABRIC_PROFILE"] == str(own)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "mlx"], "fabric: profile mlx: there are {}; the path of a file of your own"),
        (["--profile="], "fabric: profile '': there are {}; the path of a file of your own"),
        (["--profile", "./none"], "fabric: profile ./none: there is no such file\n"),
        (["--profile", "none.conf"], "fabric: profile none.conf: there is no such file\n"),
        (["--devices", "9"], "fabric: --devices 9: expected 0 to 8\n"),
        (["--devices", "-1"], "fabric: --devices -1: expected 0 to 8\n"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, words: list[str], said: str) -> None:
    done = launch(*words, "--", "true", env=outside(TMPDIR=str(tmp_path)))
    assert done.returncode == 2
    assert done.stderr.startswith(said.format(", ".join(profiles())))
    assert not any(tmp_path.iterdir())


def test_a_run_within_a_run_is_the_same_run() -> None:
    inner = [*launched("--"), "sh", "-c", "echo $AIORDMA_FABRIC"]
    done = launch(
        "--", "sh", "-c", 'echo $AIORDMA_FABRIC; "$@"; test -d $AIORDMA_FABRIC', "", *inner
    )
    assert done.returncode == 0, done.stderr
    outer_folder, inner_folder = done.stdout.split()
    assert outer_folder == inner_folder


@pytest.mark.parametrize("option", ["--profile=standard", "--devices=2", "--addresses=10.1.0.1"])
def test_a_run_within_a_run_takes_no_options(option: str) -> None:
    done = launch("--", *launched(option, "--", "true"))
    assert done.returncode == 2
    assert done.stderr.startswith("fabric: this is a process of a run over the fabric already, and")


def test_a_run_that_is_over_is_none_to_be_in() -> None:
    found = told(AIORDMA_FABRIC="/no/such/folder")
    assert Path(found["AIORDMA_FABRIC"]).name.startswith("fabric-")


def test_a_run_has_nothing_of_another_one(tmp_path: Path) -> None:
    former = {
        "AIORDMA_FABRIC": str(tmp_path),  # a folder, and none of a run
        "AIORDMA_FABRIC_PROFILE": "/mlx5.conf",
        "AIORDMA_FABRIC_ADDRESSES": "10.9.9.9;10.9.9.8",
        "AIORDMA_FABRIC_ADDR": "10.9.9.9",
        "AIORDMA_FABRIC_ADDR2": "10.9.9.8",
    }
    found = told("--devices", "1", **former)
    assert found["AIORDMA_FABRIC"] != str(tmp_path)
    assert found["AIORDMA_FABRIC_ADDR"] == "127.0.0.1"
    assert not {"AIORDMA_FABRIC_PROFILE", "AIORDMA_FABRIC_ADDRESSES"} & set(found)
    assert "AIORDMA_FABRIC_ADDR2" not in found


@pytest.mark.parametrize("letter", [":", ";"])
def test_a_path_that_the_loader_would_divide_is_not_used(tmp_path: Path, letter: str) -> None:
    folder = tmp_path / f"a{letter}b"
    folder.mkdir()
    assert not told(TMPDIR=str(folder))["AIORDMA_FABRIC"].startswith(str(tmp_path))
