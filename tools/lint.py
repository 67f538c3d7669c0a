"""Every check that needs no run of the program: style, types, layers, C warnings, sizes.

Usage: ``tools/lint.py [--fix] [--junit FILE]``. ``--fix`` repairs what ruff and clang-format can
repair, then checks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import house
import mutate
from checks import ROOT, CheckFailedError, Checks, call, repository_files

BIN = Path(sys.executable).parent
MAX_LINES = 700
FFI = Path("aiordma/_ffi")
# The C files that people write; those with fast.h are compiled by themselves.
C_FILES = tuple(
    path.relative_to(ROOT) for path in sorted((ROOT / FFI).glob("*.c")) if path.name != "_rdma.c"
)
MODULES = tuple(path for path in C_FILES if '#include "fast.h"' in (ROOT / path).read_text())


def check_sizes() -> None:
    """Fail if a file of Python or C is too long; declarations (.h, .pyi) may be."""
    long = []
    for path in repository_files():
        if path.suffix in {".py", ".c"}:
            lines = (ROOT / path).read_bytes().count(b"\n")
            if lines > MAX_LINES:
                long.append(f"{path} has {lines} lines")
    if long:
        raise CheckFailedError(f"{'; '.join(long)} (limit {MAX_LINES}): divide them by topic")


def check_house() -> None:
    """Fail if a figure of the structure is above its bound; see tools/house.py."""
    bad = [
        f"{figure.name}: {figure.value}, above {figure.bound} ({figure.where})"
        for figure in house.figures()
        if figure.value > figure.bound
    ]
    if bad:
        raise CheckFailedError("; ".join(bad))


def check_c_warnings() -> None:
    """Compile the C files on their own, every warning an error, without writing anything.

    The parts of the module that cffi writes are compiled as one, as they are there, without the
    functions that would call them.
    """
    flags = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-fsyntax-only")
    code = "import build_ffi; print(build_ffi.ffibuilder._assigned_source[1], end='')"
    joined = call(sys.executable, "-c", code, cwd=ROOT)
    python_headers = f"-isystem{sysconfig.get_path('include')}"
    with tempfile.NamedTemporaryFile("w", suffix=".c") as parts:
        parts.write(joined)
        parts.flush()
        for path in (Path(parts.name), *MODULES):
            call("gcc", *flags, python_headers, path, cwd=ROOT)


def check_stub() -> None:
    """The stub of the compiled module says what the declarations say."""
    code = "import build_ffi; print(build_ffi.stub_text(), end='')"
    if call(sys.executable, "-c", code, cwd=ROOT) != (ROOT / FFI / "_rdma.pyi").read_text():
        raise CheckFailedError("_rdma.pyi is out of date: run python build_ffi.py --stub")


def c_files() -> list[Path]:
    """Return those of `C_FILES` that are there.

    Raises:
        CheckFailedError: none is.
    """
    found = [path for path in C_FILES if (ROOT / path).is_file()]
    if not found:
        raise CheckFailedError(f"no C file in {FFI}: the list in tools/lint.py is out of date")
    return found


def check_shell() -> None:
    """Parse the shell scripts."""
    for path in ("tools/setup", "tools/packages.sh", "tools/python.sh", ".ci/run"):
        call("bash", "-n", path, cwd=ROOT)


def check_types() -> None:
    """Run mypy over the folders of its configuration that are there."""
    wanted = ("aiordma", "tests", "examples", "tools", "docs/conf.py", "build_ffi.py")
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


def fix() -> None:
    """Repair what the tools can repair on their own."""
    commands: tuple[list[str | Path], ...] = (
        [BIN / "ruff", "check", "--fix", "--quiet", "."],
        [BIN / "ruff", "format", "--quiet", "."],
        [BIN / "clang-format", "-i", *c_files()],
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
        lambda: call(BIN / "clang-format", "--dry-run", "-Werror", *c_files(), cwd=ROOT),
    )
    checks.run("gcc warnings", check_c_warnings)
    checks.run("stub", check_stub)
    checks.run("shell syntax", check_shell)
    checks.run("codespell", check_spelling)
    checks.run("file sizes", check_sizes)
    checks.run("structure", check_house)
    checks.run("mutations", check_mutations)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
