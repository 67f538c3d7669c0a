"""`softroce --check`: a line for each need, and a status that a script can ask for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from aiordma_softroce import (
    cache,
    check,
    cli,
    host,
    kernel_build,
    kernel_source,
    packages,
    uml,
)

from .conftest import LIMIT, Runner


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without a kernel."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(folder))
    return folder


def _lines(capfd: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The text of each line, by mark and subject."""
    found = {}
    for line in capfd.readouterr().out.splitlines():
        mark, _, rest = line.partition("  ")
        subject, _, text = rest.strip().partition(": ")
        found[f"{mark.strip()} {subject}"] = text
    return found


@pytest.mark.uml
def test_a_machine_with_a_kernel_is_ready(softroce: Runner) -> None:
    done = softroce("--check", "--engine", "uml")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.decode().splitlines()
    assert lines[-1] == "ready"
    assert all(line.startswith("ok       ") for line in lines[:-1])
    assert any("trial: a command ran" in line for line in lines)
    assert f"ok       kernel: {cache.root()}/uml-" in done.stdout.decode()


def test_a_first_run_builds(empty: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--check", "--engine", "uml"]) == 0
    said = _lines(capfd)
    assert said["ok kernel"].startswith(f"none in {empty}; a first run makes it")
    assert "gcc" in said["ok compiler and tools of a build"]
    assert said["ok source of the kernel"].startswith("linux-source-")
    assert "ok trial" not in said  # it would build
    assert not empty.exists()


def test_a_kernel_by_name_that_the_system_does_not_know(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = empty.with_name("keys")
    monkeypatch.setattr(kernel_source, "KEYS", keys)
    for present in (False, True):
        if present:
            keys.touch()
        assert cli.main(["--check", "--engine", "uml", "--kernel", "99.9"]) == (0 if present else 1)
        said = _lines(capfd)
        text = said["ok source of the kernel" if present else "missing source of the kernel"]
        assert text.startswith("this system has no linux-source-99.9; the build looks in Debian's")
        assert ("install debian-archive-keyring" in text) != present


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("packages", "apt-get install --no-install-recommends make flex"),
        ("compiler and tools of a build", "not found: gcc"),
        ("source of the kernel", "apt-get update"),
        ("memory", "use --memory"),
        ("file for the guest's memory", "free some space"),
        ("ptrace", "ptrace_scope"),
        ("kernel", "16777216 MB of free space"),
        ("kernel", "mounted noexec: set AIORDMA_SOFTROCE_CACHE"),
    ],
)
def test_each_need_is_told(
    missing: str,
    words: str,
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = []
    if missing == "packages":
        monkeypatch.setattr(
            packages, "missing", lambda names: [n for n in names if n in "make flex"]
        )
    elif missing == "compiler and tools of a build":
        which = shutil.which
        monkeypatch.setattr(
            shutil, "which", lambda name, **kw: None if name == "gcc" else which(name, **kw)
        )
    elif missing == "source of the kernel":
        monkeypatch.setattr(packages, "newest_known", lambda *_: None)
    elif missing == "memory":
        options = ["--memory", "1000G"]
    elif missing == "file for the guest's memory":
        real = os.statvfs

        def full(path: str) -> os.statvfs_result:
            found = real(path)
            return os.statvfs_result((*found[:3], 0, 0, *found[5:]))

        monkeypatch.setattr(os, "statvfs", full)
    elif missing == "ptrace":
        monkeypatch.setattr(check, "TRACE_ME", 16)  # to attach to process 0, which none may
    elif "noexec" in words:
        found = os.statvfs(empty.parent)
        flags = (*found[:8], found.f_flag | os.ST_NOEXEC, found[9])
        noexec = os.statvfs_result((*flags, found.f_fsid))
        monkeypatch.setattr(os, "statvfs", lambda path: noexec if path == empty.parent else found)
    else:
        monkeypatch.setattr(kernel_build, "NEEDED_BYTES", 1 << 44)
    assert cli.main(["--check", "--engine", "uml", *options]) == 1
    out = capfd.readouterr().out
    assert out.endswith("not ready: see the lines that begin with 'missing'\n")
    (line,) = (line for line in out.splitlines() if line.startswith(f"missing  {missing}: "))
    assert words in line
    assert not empty.exists()


def test_a_cache_that_others_may_write_is_told(
    empty: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    digest = cache.digest(
        Path(kernel_build.__file__).with_name("uml.config").read_bytes(),
        kernel_build.register_bytes(),
        1,
    )
    entry = empty / f"uml-1.2-{digest}"
    entry.mkdir(parents=True, mode=0o700)
    (entry / "linux").write_text("planted")
    (entry / "linux").chmod(0o666)
    assert cli.main(["--check", "--engine", "uml"]) == 1
    assert "may be written to by others" in _lines(capfd)["missing kernel"]


def test_a_reader_that_leaves(empty: Path, softroce: Runner) -> None:
    process = softroce.start(
        "--check", "--engine", "uml", environment={"AIORDMA_SOFTROCE_CACHE": str(empty)}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ok       engine: uml\n"
    process.stdout.close()
    assert process.wait(timeout=LIMIT) == 128 + 13
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_host_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    assert cli.main(["--check", "--engine", "host"]) == 1
    assert "use --engine uml" in _lines(capfd)["missing device"]


def test_host_with_a_device_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    assert cli.main(["--check", "--engine", "host", "--device", "siw"]) == 1
    assert "no siw with an active port" in _lines(capfd)["missing device"]


def test_options_are_checked_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--check", "--", "true"]) == 2
    assert "--check takes no command" in capfd.readouterr().err
    assert cli.main(["--check", "--engine", "uml", "--counted"]) == 1
    assert "--engine qemu" in capfd.readouterr().out


@pytest.mark.parametrize("count", [65530, uml.MAPPINGS_WANTED])
def test_few_memory_mappings_are_told_and_are_no_fault(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    limit = tmp_path / "max_map_count"
    limit.write_text(f"{count}\n")
    monkeypatch.setattr(uml, "MAPPINGS", limit)
    cli.main(["--check", "--engine", "uml"])
    text = _lines(capfd)["ok memory mappings"]
    assert text.startswith(f"{count} for a process")
    assert ("uses more than 255 MB" in text and uml.MAPPINGS_REMEDY in text) == (count == 65530)


@pytest.mark.parametrize(("before", "after"), [(65530, 1_048_576), (2_000_000, 2_000_000)])
def test_memory_mappings_are_raised_and_never_lowered(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "max_map_count"
    limit.write_text(f"{before}\n")
    monkeypatch.setattr(uml, "MAPPINGS", limit)
    uml.raise_mappings()
    assert int(limit.read_text()) == after


@pytest.mark.uml
@pytest.mark.parametrize("asked", [True, False])
def test_memory_mappings_are_raised_if_that_is_asked_for(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "max_map_count"
    limit.write_text("65530\n")
    monkeypatch.setattr(uml, "MAPPINGS", limit)
    monkeypatch.setenv("AIORDMA_SOFTROCE_INSTALL", "1" if asked else "")
    assert cli.main(["--engine", "uml", "--", "true"]) == 0
    assert int(limit.read_text()) == (uml.MAPPINGS_WANTED if asked else 65530)


def test_memory_mappings_that_may_not_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uml, "MAPPINGS", tmp_path / "absent")
    uml.raise_mappings()
