"""Look-ups in the package manager, with a made-up one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiordma_softroce import packages, tools
from aiordma_softroce.errors import InfrastructureError
from aiordma_softroce.kernel_source import PATTERN as SOURCE
from aiordma_softroce.options import OLDEST_KERNEL as OLDEST

_KNOWN = {
    "linux-source-5.10": "5.10.1",
    "linux-source-6.1": "6.1.170-1",
    "linux-source-6.12": "6.12.117-1~deb12u1",
    "linux-source-6.8.0": "6.8.0-50.51",
    "linux-source-6.13": "(none)",
    "linux-source": "6.1.170-1",
}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return packages and their versions, to be changed at will; only flex is installed."""
    listed = dict(_KNOWN)

    def query(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if argv[:2] == ["apt-cache", "pkgnames"]:
            out = "\n".join(listed)
        elif argv[:2] == ["apt-cache", "policy"]:
            out = f"{argv[2]}:\n  Candidate: {listed.get(argv[2], '(none)')}\n"
        else:
            assert argv[0] == "dpkg-query"
            out = "flex installed\nmake config-files\n"
        return subprocess.CompletedProcess(argv, 0, out, "")

    monkeypatch.setattr(tools, "query", query)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return listed


def test_newest_compares_numbers(known: dict[str, str], tmp_path: Path) -> None:
    assert packages.newest(SOURCE, OLDEST, tmp_path / "log") == "linux-source-6.12"
    del known["linux-source-6.12"]
    assert packages.newest(SOURCE, OLDEST, tmp_path / "log") == "linux-source-6.8.0"


def test_lists_are_updated_once_when_nothing_suits(
    known: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known.clear()
    known["linux-source-5.10"] = "5.10.1"
    monkeypatch.setattr(packages, "update", lambda _log: known.update(_KNOWN))
    assert packages.newest(SOURCE, OLDEST, tmp_path / "log") == "linux-source-6.12"


def test_nothing_that_suits_is_told(
    known: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known.clear()
    monkeypatch.setattr(packages, "update", lambda _log: None)
    with pytest.raises(InfrastructureError, match=r"6\.1 or later"):
        packages.newest(SOURCE, OLDEST, tmp_path / "log")


@pytest.mark.usefixtures("known")
def test_a_user_is_told_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InfrastructureError) as caught:
        packages.ensure(["flex", "make", "bison"], "the engine", tmp_path / "log")
    assert str(caught.value).splitlines() == [
        "the engine needs packages that are not installed; run",
        "  sudo apt-get install --no-install-recommends make bison",
    ]


@pytest.mark.usefixtures("known")
def test_root_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tools, "run", lambda argv, **_: ran.append(tuple(argv)))
    packages.ensure(["flex", "make"], "the engine", tmp_path / "log", install=True)
    assert ran == [
        ("apt-get", "update"),
        ("apt-get", "install", "-y", "--no-install-recommends", "make"),
    ]


@pytest.mark.usefixtures("known")
def test_g08_root_is_asked_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tools, "run", lambda argv, **_: ran.append(tuple(argv)))
    for value in (None, "0", ""):
        if value is None:
            monkeypatch.delenv("AIORDMA_SOFTROCE_INSTALL", raising=False)
        else:
            monkeypatch.setenv("AIORDMA_SOFTROCE_INSTALL", value)
        with pytest.raises(InfrastructureError) as caught:
            packages.ensure(["flex", "make"], "the engine", tmp_path / "log")
        assert "apt-get install --no-install-recommends make" in str(caught.value)
        assert "--install" in str(caught.value)
    assert ran == []
    monkeypatch.setenv("AIORDMA_SOFTROCE_INSTALL", "1")
    packages.ensure(["flex", "make"], "the engine", tmp_path / "log")
    assert ran[-1][:2] == ("apt-get", "install")


@pytest.mark.usefixtures("known")
def test_nothing_is_done_when_all_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    packages.ensure(["flex"], "the engine", tmp_path / "log")
    assert not (tmp_path / "log").exists()
