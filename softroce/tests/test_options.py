"""What is refused at once, and with which words."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import aiordma_softroce as softroce
from aiordma_softroce import cli, host, qemu, runner, uml
from aiordma_softroce.errors import UsageError
from aiordma_softroce.options import Options, parse_size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "qemu", "--virtual-time"], ("--virtual-time", "--engine uml")),
        (["--engine", "uml", "--counted"], ("--counted", "--engine qemu")),
        (["--engine", "uml", "--cpus", "2"], ("--cpus", "--engine qemu")),
        (["--engine", "qemu", "--counted", "--cpus", "2"], ("--counted", "one processor")),
        (["--engine", "host", "--net", "netem loss 5%"], ("--net", "uml or qemu")),
        (["--engine", "host", "--hosts", "2"], ("--hosts 2", "uml or qemu")),
        (["--engine", "qemu", "--kernel", "6.1"], ("--kernel", "--engine uml")),
        (["--engine", "host", "--kernel", "6.1"], ("--kernel", "--engine uml")),
        (["--kernel", "6"], ("--kernel '6'", "6.12")),
        (["--kernel", "6.12/../x"], ("--kernel", "6.12")),
        (["--kernel", "5.10"], ("--kernel 5.10", "6.1 or later")),
        (["--hosts", "3"], ("--hosts 3", "1 or 2")),
        (["--memory", "many"], ("--memory many", "512M")),
        (["--memory", "1M"], ("--memory", "64M")),
        (["--mtu", "10"], ("--mtu 10", "576")),
        (["--timeout", "0"], ("--timeout", "positive")),
        (["--net", ""], ("--net", "queueing discipline")),
        (["--net", "netem 'loss"], ("--net", "quotation")),
    ],
)
def test_contradictions_are_refused(
    arguments: list[str], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--", "true"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("softroce: ")
    assert all(word in said for word in words), said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("program", "typed"),
    [
        ("/usr/bin/softroce", "softroce"),
        (cli.__file__.replace("cli.py", "__main__.py"), "python -m aiordma_softroce"),
    ],
)
def test_the_help_has_what_was_typed(
    program: str, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert cli.options_parser().format_help().startswith(f"usage: {typed} [options] -- COMMAND ")


def test_a_kernel_that_is_asked_for_is_that_of_a_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "has_device", lambda: True)
    assert runner.choose(Options(kernel="6.1")) == "uml"
    assert runner.choose(Options()) == "host"


def test_the_environment_may_name_a_kernel(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(uml.KERNEL, "")
    assert uml.kernel_name(Options()) is None
    monkeypatch.setenv(uml.KERNEL, "6.12")
    assert uml.kernel_name(Options()) == "6.12"
    assert uml.kernel_name(Options(kernel="6.1")) == "6.1"
    monkeypatch.setenv(uml.KERNEL, "newest")
    assert cli.main(["--engine", "uml", "--", "true"]) == 2
    assert "AIORDMA_SOFTROCE_KERNEL 'newest'" in capfd.readouterr().err


def test_no_command_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "put it after --" in capfd.readouterr().err


def test_more_words_for_qemu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(qemu.MORE, "-plugin 'file=/a b/c.so,out=/d'")
    words = qemu.command_line(Path("/kernel"), (3, 4, 5, 6), Options(counted=True))
    assert words[-2:] == ["-plugin", "file=/a b/c.so,out=/d"]
    assert "shift=1,sleep=off" in words


def test_a_processor_that_is_counted_has_no_fast_string_instructions() -> None:
    """Of which the clock would charge each byte."""
    counted, ordinary = (
        qemu.command_line(Path("/kernel"), (3, 4, 5, 6), Options(counted=counted))
        for counted in (True, False)
    )
    assert counted[counted.index("-cpu") + 1].split(",")[-2:] == ["-erms", "-fsrm"]
    assert "erms" not in ordinary[ordinary.index("-cpu") + 1]


def test_words_for_qemu_that_no_shell_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(qemu.MORE, "-name 'guest")
    with pytest.raises(UsageError, match=r"AIORDMA_SOFTROCE_QEMU.*quotation"):
        qemu.check(Options())


@pytest.mark.parametrize("engine", [uml, qemu])
def test_another_machine_is_refused(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = os.uname()
    other = os.uname_result((*facts[:4], "aarch64"))
    monkeypatch.setattr(os, "uname", lambda: other)
    with pytest.raises(UsageError, match=r"aarch64.*--engine host"):
        engine.check(Options())


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 512 << 20), ("2g", 2 << 30), ("1048576", 1 << 20), ("64KB", 65536)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_net_makes_two_hosts() -> None:
    options = Options(net="netem loss 5%")
    assert options.hosts == 2
    assert options.net_words == ("netem", "loss", "5%")


@pytest.mark.parametrize(
    ("options", "device", "engine"),
    [
        (Options(), True, "host"),
        (Options(), False, "uml"),
        (Options(virtual_time=True), True, "uml"),
        (Options(hosts=2), True, "uml"),
        (Options(device="siw"), True, "uml"),
        (Options(counted=True), True, "qemu"),
        (Options(engine="qemu"), True, "qemu"),
    ],
)
def test_auto_takes_what_can_do_it(
    options: Options, device: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "has_device", lambda: device)
    assert runner.choose(options) == engine


def test_the_function_refuses_like_the_command_line() -> None:
    with pytest.raises(softroce.UsageError, match="no command"):
        softroce.run([])
    with pytest.raises(softroce.UsageError, match="--hosts 7"):
        softroce.run([sys.executable], hosts=7)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def version_of(name: str) -> str:
        if installed:
            return f"1.2.3 of {name}"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    for installed in (True, False):
        with pytest.raises(SystemExit) as caught:
            cli.main(["--version"])
        assert caught.value.code == 0
        told = "1.2.3 of aiordma-softroce" if installed else "of a checkout that is not installed"
        assert capsys.readouterr().out == f"aiordma-softroce {told}\n"
