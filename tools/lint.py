"""Every check that needs no run of the program: style, types, layers, the structure of C.

Usage: ``tools/lint.py [--fix] [--junit FILE]``. ``--fix`` repairs what ruff and clang-format can
repair, then checks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import c_structure
import mutate
import references
import release_notes
from checks import ROOT, CheckFailedError, Checks, call, repository_files

BIN = Path(sys.executable).parent
FFI = Path("aiordma/_ffi")
CORE = Path("aiordma/_core")
FABRIC = Path("aiordma/testing/fabric/lib")
FAULTS = Path("aiordma/testing/faults")


def check_references() -> None:
    """Fail if a comment or a page names a file that does not exist; see tools/references.py."""
    if wrong := references.problems():
        raise CheckFailedError("\n".join(wrong))


#: The analyzer follows the paths of compiled code, so the object file is written, to nowhere.
_C_FLAGS = (
    "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow",
    "-Wundef", "-Wstrict-prototypes", "-Wnull-dereference", "-fanalyzer", "-Werror", f"-I{CORE}",
    "-c", "-o", os.devnull,
)  # fmt: skip
#: As setup.py has them: the fabric has callbacks that leave arguments unread.
_FABRIC_FLAGS = (
    "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wundef", "-Werror", "-fPIC",
    "-fvisibility=hidden", "-c", "-o", os.devnull,
)  # fmt: skip


def check_c_warnings() -> None:
    """Compile the C files on their own, every warning an error, without writing anything.

    The parts of the module that cffi writes are compiled as one, as they are there, without the
    functions that would call them; each file of the core by itself, as it is built.
    """
    code = "import build_ffi; print(build_ffi.ffibuilder._assigned_source[1], end='')"
    joined = call(sys.executable, "-c", code, cwd=ROOT)
    with tempfile.NamedTemporaryFile("w", suffix=".c") as parts:
        parts.write(joined)
        parts.flush()
        call("gcc", *_C_FLAGS, "-Wno-unused-function", parts.name, cwd=ROOT)
    python_headers = f"-isystem{sysconfig.get_path('include')}"
    # The limited API, as setup.py has it: a function that is not of it is not declared.
    abi = "-DPy_LIMITED_API=0x030B0000"
    for path in c_files(CORE, "*.c"):
        call("gcc", *_C_FLAGS, "-Wmissing-prototypes", abi, python_headers, path, cwd=ROOT)
    for path in c_files(Path("tests/fuzz"), "*.c"):
        call("gcc", *_C_FLAGS, path, cwd=ROOT)
    for path in (*c_files(FABRIC, "*.c"), *c_files(FAULTS, "*.c")):
        call("gcc", *_FABRIC_FLAGS, path, cwd=ROOT)


def check_c_structure() -> None:
    """Fail if a file of `_core` breaks the rules of tools/c_structure.py."""
    if wrong := c_structure.problems():
        raise CheckFailedError("\n".join(wrong))


#: What stubtest may say of a stub that is right: up to Python 3.11 C has no `__buffer__` to show,
#: and `disjoint_base` is too new for type checkers.
_STUB_MAY_DIFFER = r"""
aiordma\._core\._compiled\.(BufferExport|Loan|Message)\.__buffer__
aiordma\._core\._compiled\.(Wakeup|PeerRequest|RequestTable)
"""


def check_stub() -> None:
    """The stubs of the compiled modules say what these have."""
    code = "import build_ffi; print(build_ffi.stub_text(), end='')"
    if call(sys.executable, "-c", code, cwd=ROOT) != (ROOT / FFI / "_rdma.pyi").read_text():
        raise CheckFailedError("_rdma.pyi is out of date: run python build_ffi.py --stub")
    with tempfile.NamedTemporaryFile("w") as allowed:
        allowed.write(_STUB_MAY_DIFFER)
        allowed.flush()
        options = (f"--allowlist={allowed.name}", "--ignore-unused-allowlist")
        call(BIN / "stubtest", "aiordma._core._compiled", *options, cwd=ROOT)


def c_files(folder: Path, *patterns: str) -> list[Path]:
    """Return the C files of a folder that people write.

    Raises:
        CheckFailedError: there is none.
    """
    paths = (path for pattern in patterns for path in (ROOT / folder).glob(pattern))
    found = sorted(path.relative_to(ROOT) for path in paths if path.name != "_rdma.c")
    if not found:
        raise CheckFailedError(f"no C file in {folder}: the folders in tools/lint.py are wrong")
    return found


def formatted() -> list[Path]:
    """Return the files that clang-format has; cffi's declarations are no C that it knows."""
    both = (CORE, FABRIC)
    return [
        *c_files(FFI, "*.c"), *c_files(FAULTS, "*.c"),
        *(path for folder in both for path in c_files(folder, "*.c", "*.h")),
    ]  # fmt: skip


def check_shell() -> None:
    """Parse the shell scripts."""
    for path in ("tools/setup", "tools/packages.sh", "tools/python.sh", ".ci/run"):
        call("bash", "-n", path, cwd=ROOT)
    for each in repository_files():
        if each.match("findings/*.sh"):
            call("bash", "-n", each, cwd=ROOT)


def check_types() -> None:
    """Run mypy over the folders of its configuration that are there."""
    wanted = (
        "aiordma",
        "aiordma_fabric.py",
        "aiordma_pytest",
        "softroce/src",
        "softroce/tests",
        "tests",
        "examples",
        "tools",
        "docs/conf.py",
        "build_ffi.py",
    )
    call(BIN / "mypy", *(name for name in wanted if has_python(ROOT / name)), cwd=ROOT)


def has_python(path: Path) -> bool:
    """Return whether ``path`` is, or contains, a Python file."""
    return path.is_file() or next(path.rglob("*.py"), None) is not None


def check_spelling() -> None:
    """Run codespell over the files of the repository."""
    call(BIN / "codespell", *repository_files(), cwd=ROOT)


def check_mutations() -> None:
    """Fail if the code has changed and the bugs that are put into it have not."""
    if wrong := mutate.misfits(mutate.load()):
        raise CheckFailedError("\n".join(wrong))


def check_release_notes() -> None:
    """Fail if the changelog, the citation and pyproject.toml do not fit one another."""
    if wrong := release_notes.problems():
        raise CheckFailedError("\n".join(wrong))


def fix() -> None:
    """Repair what the tools can repair on their own."""
    commands: tuple[list[str | Path], ...] = (
        [BIN / "ruff", "check", "--fix", "--quiet", "."],
        [BIN / "ruff", "format", "--quiet", "."],
        [BIN / "clang-format", "-i", *formatted()],
    )
    for command in commands:
        subprocess.run(command, cwd=ROOT, check=False, timeout=120)


def main() -> int:
    """Run every check and return the exit status."""
    parser = argparse.ArgumentParser(description="Check the sources without running them.")
    parser.add_argument("--fix", action="store_true", help="first repair what can be repaired")
    parser.add_argument("--junit", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.fix:
        fix()
    checks = Checks("lint", options.junit)
    checks.run("ruff check", lambda: call(BIN / "ruff", "check", ".", cwd=ROOT))
    checks.run("ruff format", lambda: call(BIN / "ruff", "format", "--check", ".", cwd=ROOT))
    checks.run("mypy", check_types)
    # Its cache goes by the times of files it knows and does not see that a missing one has come.
    checks.run("layers", lambda: call(BIN / "lint-imports", "--no-cache", cwd=ROOT))
    checks.run(
        "clang-format",
        lambda: call(BIN / "clang-format", "--dry-run", "-Werror", *formatted(), cwd=ROOT),
    )
    checks.run("gcc warnings", check_c_warnings)
    checks.run("structure of C", check_c_structure)
    checks.run("stub", check_stub)
    checks.run("shell syntax", check_shell)
    checks.run("codespell", check_spelling)
    checks.run("references", check_references)
    checks.run("mutations", check_mutations)
    checks.run("release notes", check_release_notes)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
