"""The module of software iWARP for a distribution's kernel; test_qemu.py loads one."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiordma.testing.softroce import module_build, packages, tools
from aiordma.testing.softroce.errors import InfrastructureError

_HEADERS = "linux-headers-6.1.0-56-amd64"
_DEPENDS = {
    _HEADERS: ["linux-headers-6.1.0-56-common", "linux-kbuild-6.1", "linux-compiler-gcc-12-x86"],
    "linux-kbuild-6.1": ["libc6", "libelf1", "<of-many>"],
    "linux-compiler-gcc-12-x86": ["gcc-12", "linux-kbuild-6.1"],
}


def test_the_packages_of_the_kernel_are_unpacked_and_others_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def query(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert argv[:3] == ["apt-cache", "depends", "--important"]
        lines = [argv[3], *(f"  Depends: {name}" for name in _DEPENDS.get(argv[3], ()))]
        return subprocess.CompletedProcess(argv, 0, "\n".join([*lines, "    one of them"]), "")

    monkeypatch.setattr(tools, "query", query)
    parts, others = module_build.parts_of(_HEADERS)
    assert parts == [_HEADERS, *_DEPENDS[_HEADERS]]
    assert others == ["libc6", "libelf1", "gcc-12"]


def test_a_kernel_whose_headers_are_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "image"
    (image / "lib/modules/6.1.0-1-amd64").mkdir(parents=True)
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packages, "candidate", lambda _name: "")
    with pytest.raises(InfrastructureError, match=r"linux-headers-6\.1\.0-1-amd64.*remove"):
        module_build.siw(image)
    assert not list((tmp_path / "cache").glob("siw-*"))
