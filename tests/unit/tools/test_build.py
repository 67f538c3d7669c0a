"""A build on a machine that lacks something says so in a sentence, before the compiler does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LIMIT_S = 120
NEEDS = (
    "Install what a build needs:\n"
    "  Debian, Ubuntu:  apt install gcc libc6-dev python3-dev libibverbs-dev librdmacm-dev\n"
    "  Fedora, RHEL:    dnf install gcc python3-devel rdma-core-devel\n"
    "  openSUSE, SLES:  zypper install gcc python3-devel rdma-core-devel\n"
    "  Arch:            pacman -S gcc rdma-core\n"
)
VERBS, CM, CM_VERBS = "infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h"


def build(folder: Path, **environment: str) -> tuple[int, str]:
    """Build the extension out of a copy of its sources: the status, and what is said."""
    for name in ("setup.py", "build_ffi.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("aiordma/_core", "aiordma/_ffi"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so"))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=folder,
        env={**os.environ, "CFLAGS": "-O0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "present", [(), (VERBS,)], ids=["none of rdma-core", "without librdmacm-dev"]
)
def test_b09_a_build_without_headers_says_what_to_install(
    tmp_path: Path, present: tuple[str, ...]
) -> None:
    folder, include = tmp_path / "source", tmp_path / "include"
    folder.mkdir()
    for name in present:
        (include / name).parent.mkdir(parents=True)
        (include / name).touch()
    missing = ", ".join(f"<{name}>" for name in (VERBS, CM, CM_VERBS) if name not in present)
    # The compiler then looks nowhere but there, and where Python's own headers are.
    flags = f"-nostdinc -isystem {include}"
    assert build(folder, CPPFLAGS=flags) == (
        1,
        f"aiordma cannot be built here: the C compiler does not find {missing}. {NEEDS}",
    )


def test_b09_a_build_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    assert build(tmp_path, CC="no-such-compiler") == (
        1,
        f"aiordma cannot be built here: there is no C compiler (no-such-compiler). {NEEDS}",
    )


def test_b09_a_build_with_headers_that_are_too_old_says_so(tmp_path: Path) -> None:
    folder, include = tmp_path / "source", tmp_path / "include"
    folder.mkdir()
    (include / VERBS).parent.mkdir(parents=True)
    (include / VERBS).write_text("enum ibv_node_type { IBV_NODE_CA = 1 };\n")
    assert build(folder, CPPFLAGS=f"-I{include}") == (
        1,
        "aiordma cannot be built here: the headers of rdma-core are older than 35, the smallest "
        f"that aiordma is built with. {NEEDS}",
    )
