"""The module of software iWARP for a distribution's kernel; test_qemu.py loads one."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiordma_softroce import kernel_build, module_build, packages, tools
from aiordma_softroce.errors import InfrastructureError

_HEADERS = "linux-headers-6.1.0-56-amd64"
#: As apt-cache prints them, of Debian 12 and of Debian 13.
_DEPENDS = {
    _HEADERS: ["  Depends: linux-headers-6.1.0-56-common", "  Depends: linux-kbuild-6.1",
               "  Depends: linux-compiler-gcc-12-x86"],
    "linux-kbuild-6.1": ["  Depends: libc6", "  Depends: libelf1", "  Depends: <of-many>",
                         "    libssl3"],
    "linux-compiler-gcc-12-x86": ["  Depends: gcc-12", "  Depends: linux-kbuild-6.1"],
    "linux-headers-6.12.117-amd64": [
        " |Depends: linux-image-6.12.117-amd64", "  Depends: linux-image-6.12.117-amd64-unsigned",
        "  Depends: linux-base", "  Depends: linux-headers-6.12.117-common",
        " |Depends: gcc-14", " |Depends: clang", "  Depends: gcc",
    ],
}  # fmt: skip


def test_the_packages_of_the_kernel_are_unpacked_and_others_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def query(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert argv[:3] == ["apt-cache", "depends", "--important"]
        lines = [argv[3], *_DEPENDS.get(argv[3], ())]
        return subprocess.CompletedProcess(argv, 0, "\n".join(lines), "")

    monkeypatch.setattr(tools, "query", query)
    parts, others = module_build.parts_of(_HEADERS)
    assert parts == [
        _HEADERS, "linux-headers-6.1.0-56-common", "linux-kbuild-6.1", "linux-compiler-gcc-12-x86",
    ]  # fmt: skip
    assert others == ["libc6", "libelf1", "gcc-12"]
    newer = "linux-headers-6.12.117-amd64"
    assert module_build.parts_of(newer) == ([newer, "linux-headers-6.12.117-common"], ["gcc-14"])


def test_a_kernel_whose_headers_are_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "image"
    (image / "lib/modules/6.1.0-1-amd64").mkdir(parents=True)
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packages, "candidate", lambda _name: "")
    monkeypatch.setattr(packages, "update", lambda _log, **_: None)
    with pytest.raises(InfrastructureError, match=r"linux-headers-6\.1\.0-1-amd64.*remove"):
        module_build.siw(image)
    assert not list((tmp_path / "cache").glob("siw-*"))


def test_a_cache_whose_path_the_kernels_make_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(tmp_path / "a cache"))
    with pytest.raises(InfrastructureError, match="no spaces and colons: set AIORDMA_SOFTROCE"):
        module_build.siw(tmp_path)


def test_variables_of_another_make_do_not_reach_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MAKEFLAGS", "CROSS_COMPILE", "LLVM", "KCFLAGS"):
        monkeypatch.setenv(name, "-of-another-make")
    told = subprocess.run(
        [*kernel_build.MAKE, "-s", "-f", "-", "--eval", "$(info $(MAKEFLAGS):$(LLVM)) all:;@env"],
        input="", capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "of-another-make" not in told
