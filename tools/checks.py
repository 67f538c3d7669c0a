"""What the tools share: counts of results in JUnit files, named checks, running programs.

pytest writes such a file itself; `Checks` writes one for the stages that are no pytest runs, so
that a linter that failed is counted like a test that failed.
"""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
#: Of the text of an error, in a list of failures.
_MESSAGE_CHARACTERS = 240


@dataclass(frozen=True, slots=True)
class Counts:
    """How many tests ended in which way; errors in a fixture count as failed."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    xfailed: int = 0

    @property
    def ran(self) -> int:
        """The number of tests whose body was run."""
        return self.passed + self.failed + self.xfailed

    def __add__(self, other: Counts) -> Counts:
        """Add the counts of two runs."""
        return Counts(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.xfailed + other.xfailed,
        )


def read_counts(path: Path) -> Counts | None:
    """Return the counts of a JUnit file, or None if it is absent or was not finished."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    passed = failed = skipped = xfailed = 0
    # A test that fails and whose fixture then fails too has two elements; each is a failure.
    for case in root.iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is None:
            passed += 1
        elif skip.get("type") == "pytest.xfail":
            xfailed += 1
        else:
            skipped += 1
    return Counts(passed, failed, skipped, xfailed)


def read_failures(path: Path) -> list[str]:
    """Return a line for each failed test of a JUnit file: its name and how its error begins."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return []
    lines = []
    for case in root.iter("testcase"):
        for failure in (*case.findall("failure"), *case.findall("error")):
            place = case.get("classname", "").removeprefix("tests.")
            message = " ".join(failure.get("message", "").split())
            lines.append(f"{place} {case.get('name')}: {message[:_MESSAGE_CHARACTERS]}")
    return lines


class CheckFailedError(Exception):
    """A check did not pass; the text says why and what to do."""


class Checks:
    """Runs named checks one after another, prints each result, goes on after a failure.

    Args:
        name: of the whole, for the report.
        report: where to write the JUnit file, or None.
    """

    def __init__(self, name: str, report: Path | None) -> None:
        self._suite = ElementTree.Element("testsuite", name=name)
        self._report = report
        self._failed: list[str] = []
        self._skipped: list[str] = []

    def run(self, name: str, check: Callable[[], object]) -> bool:
        """Run one check and return whether it passed; it fails by raising `CheckFailedError`."""
        case = ElementTree.SubElement(self._suite, "testcase", name=name)
        started = time.monotonic()
        error = ""
        try:
            check()
        except (CheckFailedError, OSError, subprocess.SubprocessError) as reason:
            error = str(reason) or repr(reason)
            ElementTree.SubElement(case, "failure", message=error)
            self._failed.append(name)
        seconds = time.monotonic() - started
        case.set("time", f"{seconds:.3f}")
        mark = "FAIL" if error else "ok"
        print(f"{mark:4} {name} ({seconds:.1f} s)" + (f": {error}" if error else ""), flush=True)
        return not error

    def skip(self, name: str, why: str) -> None:
        """Note a check that this machine cannot run, and say so where it is seen."""
        case = ElementTree.SubElement(self._suite, "testcase", name=name)
        ElementTree.SubElement(case, "skipped", message=why)
        self._skipped.append(f"{name} ({why})")
        print(f"SKIP {name}: {why}", flush=True)

    def finish(self) -> int:
        """Write the report and return the exit status."""
        if self._report is not None:
            self._report.parent.mkdir(parents=True, exist_ok=True)
            ElementTree.ElementTree(self._suite).write(self._report, encoding="utf-8")
        if self._skipped:
            print(f"NOT CHECKED: {'; '.join(self._skipped)}", file=sys.stderr)
        if self._failed:
            print(f"failed: {', '.join(self._failed)}", file=sys.stderr)
        return 1 if self._failed else 0


def call(*command: str | Path, limit_s: float = 300, cwd: Path | None = None) -> str:
    """Run a program and return its output, which is shown only if the program fails.

    Raises:
        CheckFailedError: it ended with another status than 0, is not there, or took too long.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            timeout=limit_s,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except FileNotFoundError:
        raise CheckFailedError(f"{words[0]} is not there: run make setup") from None
    except subprocess.TimeoutExpired:
        raise CheckFailedError(f"took more than {limit_s:.0f} s: {' '.join(words)}") from None
    if done.returncode:
        print(done.stdout, end="", flush=True)
        raise CheckFailedError(f"exit status {done.returncode}: {' '.join(words[:8])}")
    return done.stdout


def write_page(path: Path, text: str, usage: str) -> None:
    """Be the whole of a tool that writes a page: with ``--check`` it only compares.

    Args:
        path: The page.
        text: Of the page.
        usage: Is shown if the command line has anything else.
    """
    if sys.argv[1:] == ["--check"]:
        if path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)} is out of date: {sys.argv[0]}")
    elif sys.argv[1:]:
        sys.exit(usage)
    else:
        path.write_text(text)


def copy_repository(folder: Path) -> None:
    """Copy the files of the repository to a folder; those that are there with the same text stay.

    A copy is what is built in another way than the tree, which other programs use at that time.
    What stays keeps its time, so that only what has changed is compiled again.

    Raises:
        CheckFailedError: this is no git work tree, or git is not there.
    """
    wanted = repository_files()
    for path in wanted:
        copy = folder / path
        if not copy.is_file() or not filecmp.cmp(ROOT / path, copy, shallow=False):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)
            copy.chmod((ROOT / path).stat().st_mode)
    # What the tree no longer has would still be found by a test run.
    for top in {path.parts[0] for path in wanted if len(path.parts) > 1}:
        for copy in (folder / top).rglob("*"):
            source = ROOT / copy.relative_to(folder)
            if (
                copy.is_file()
                and not source.exists()
                and copy.suffix in {".py", ".c", ".h", ".pyi"}
            ):
                copy.unlink()


def repository_files() -> list[Path]:
    """Return the paths that git tracks or would track, relative to the root.

    In an unpacked sdist, whose files are those, the sdist's own list has them.

    Raises:
        CheckFailedError: this is no git work tree, or git is not there.
    """
    listing = ROOT / "aiordma.egg-info" / "SOURCES.txt"
    if not (ROOT / ".git").exists() and listing.is_file():
        paths = map(Path, listing.read_text().splitlines())
        return [
            path for path in paths if "egg-info" not in path.parts[0] and (ROOT / path).is_file()
        ]
    # The user may be root in someone else's clone: this only lists names.
    git = ("git", "-c", f"safe.directory={ROOT}")
    listed = call(*git, "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]
