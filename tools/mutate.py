"""Put bugs into the library, one at a time, and see whether the tests find them.

Usage: ``tools/mutate.py [--quick | --only NAME...] [--by simulation] [--list] [--jobs N]
[--junit FILE]``.

Each entry of tests/mutations.toml is a plausible bug: a file, a text that stands in it exactly
once, what stands there with the bug, and the tests that must find it.  It is put into a copy of the
repository below build/mutate, C is compiled again there, and the tests run.

Those of the kind "order" concern order, time and ends.  With ``--by simulation`` they have to be
found without their tests: seeds of the simulation run until one fails (docs/simulation.md).  An
entry whose place is "simulation" has no other test.

A bug is found if a test fails by an assertion or an exception.  One that only a limit of time has
noticed counts as survived: such a test does not say what broke.  Before all others the tests run
without a bug; they have to pass.

The exit status is 0 if every bug was found.  An entry whose text does not stand in its file exactly
once is an error: change the entry together with the code.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from checks import ROOT, CheckFailedError, repository_files

ENTRIES = ROOT / "tests" / "mutations.toml"
SCRATCH = ROOT / "build" / "mutate"
#: Folders with a compiled module each, or with the library of the fabric or of faults.
MODULES = ("aiordma/_core", "aiordma/_ffi", "aiordma/testing/fabric", "aiordma/testing/faults")
#: Exit statuses of pytest: all passed, some failed.
PASSED, FAILED = 0, 1
#: Seconds that the tests of one entry may take in all, and those of all entries together.
LIMIT_S = {"unit": 150, "guest": 300}
#: The place of bugs that seeds find; how many run, and how long they may take in all.
SIMULATION, SEEDS, SEEDS_S = "simulation", 800, 120
WITHOUT_BUGS_S = 900
_TIMED_OUT = re.compile(r"Timeout|TimeoutError|did not end|seconds left")
#: Where tests can run: the options of softroce, or none for this machine.
WHERE: dict[str, tuple[str, ...]] = {
    "unit": (),
    "rxe": ("--engine", "uml", "--device", "rxe"),
    "siw": ("--engine", "uml", "--device", "siw"),
    SIMULATION: (),
    "hosts": ("--engine", "uml", "--device", "rxe", "--hosts", "2", "--virtual-time"),
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug.

    Attributes:
        name: what the command line and the table call it.
        file: where it is put in, from the root of the repository.
        old: what stands there, exactly once.
        new: what stands there with the bug.
        bug: what it does to a program, in a line.
        tests: node ids of pytest, or files; none where seeds alone find it.
        where: a key of `WHERE`.
        kind: "order" for what concerns order, time and ends.
        system: of the simulation, whose seeds find it; else all systems take turns.
        seed: of the simulation, that finds it, if the simulation has not changed since.
        loop: the event loop of tests in a guest.
        quick: part of `make test`.
    """

    name: str
    file: str
    old: str
    new: str
    bug: str
    tests: tuple[str, ...] = ()
    where: str = "unit"
    kind: str = ""
    system: str = ""
    seed: int = 0
    loop: str = "asyncio"
    quick: bool = False

    @property
    def is_c(self) -> bool:
        """Whether the extension has to be compiled again."""
        return self.file.endswith((".c", ".h"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an entry.

    Attributes:
        verdict: "found", "timeout", "survived" or "error".
        seconds: of real time.
        test: the first test that failed.
        text: the first line of its failure, or what the error is.
    """

    verdict: str
    seconds: float = 0.0
    test: str = ""
    text: str = ""


def load(path: Path = ENTRIES) -> list[Mutation]:
    """Read the entries.

    Raises:
        CheckFailedError: one is malformed, or a name is there twice.
    """
    entries = []
    for raw in tomllib.loads(path.read_text())["mutation"]:
        try:
            entry = Mutation(**{**raw, "tests": tuple(raw.get("tests", ()))})
        except (KeyError, TypeError) as exc:
            raise CheckFailedError(f"{path.name}: {raw.get('name', raw)}: {exc}") from None
        if entry.where not in WHERE or bool(entry.tests) == (entry.where == SIMULATION):
            raise CheckFailedError(f"{path.name}: {entry.name}: no such place, or no tests")
        if entry.kind not in {"", "order"}:
            raise CheckFailedError(f"{path.name}: {entry.name}: no such kind")
        if entry.quick and entry.where != "unit":
            raise CheckFailedError(f"{path.name}: {entry.name}: quick is for unit tests")
        entries.append(entry)
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CheckFailedError(f"{path.name}: there twice: {', '.join(twice)}")
    return entries


def misfits(entries: Iterable[Mutation], root: Path = ROOT) -> list[str]:
    """Return what is wrong with the texts and tests of the entries."""
    wrong = []
    for entry in entries:
        file = root / entry.file
        count = file.read_text().count(entry.old) if file.is_file() else -1
        if count != 1:
            found = "there is no such file" if count < 0 else f"stands there {count} times"
            wrong.append(f"{entry.name}: {entry.file}: its text {found}")
        if entry.old == entry.new:
            wrong.append(f"{entry.name}: changes nothing")
        wrong += [
            f"{entry.name}: there is no {test}" for test in entry.tests if not _is_there(root, test)
        ]
    return wrong


def _is_there(root: Path, test: str) -> bool:
    """Whether the file of a test is there, and names its class and function."""
    name, *inside = test.partition("[")[0].split("::")
    file = root / name
    return file.is_file() and all(
        re.search(rf"^\s*(async def|def|class) {word}\b|^{word} = ", text, re.MULTILINE)
        for text in [file.read_text()]
        for word in inside
        if word != "runTest"
    )


def compiled(root: Path) -> list[Path]:
    """The compiled modules below a folder."""
    return sorted(path for folder in MODULES for path in (root / folder).glob("_*.so"))


@dataclass
class Tree:
    """A copy of the repository, in which one bug at a time is put.

    Attributes:
        root: where it is.
    """

    root: Path
    _latest: float = field(default_factory=time.time)

    def fill(self) -> None:
        """Copy what git tracks or would track, and what was compiled."""
        built = [path.relative_to(ROOT) for path in compiled(ROOT)]
        if len(built) < len(MODULES):
            raise CheckFailedError("the extension is not built: run make setup")
        for name in [*repository_files(), *built]:
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        (self.root / "build").mkdir()

    def write(self, name: str, text: str) -> None:
        """Change a file."""
        path = self.root / name
        path.write_text(text)
        self._touch(path)

    def _touch(self, path: Path) -> None:
        # Python compares times with what it has compiled, in whole seconds.
        self._latest = max(self._latest + 1, time.time())
        os.utime(path, (self._latest, self._latest))

    def _kept(self, path: Path) -> Path:
        return self.root / "build" / path.relative_to(self.root)

    def keep_built(self) -> None:
        """Remember what was compiled without a bug."""
        for path in compiled(self.root):
            self._kept(path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, self._kept(path))

    def restore_built(self) -> None:
        """Put that back."""
        for path in compiled(self.root):
            path.unlink()  # another process may have it mapped
        for path in compiled(self.root / "build"):
            shutil.copy2(path, self.root / path.relative_to(self.root / "build"))

    def compile(self, changed: str) -> None:
        """Compile the module of a C file that has changed; without optimization, which is quicker.

        Raises:
            CheckFailedError: it does not compile.
        """
        for path in compiled(self.root):
            # Times tell setuptools nothing here.
            folder = path.parent.relative_to(self.root)
            if changed.endswith(".h") or Path(changed).is_relative_to(folder):
                path.unlink()
        command = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
        status, output = run(command, self.root, 300, CFLAGS="-O0 -g0")
        if status:
            raise CheckFailedError(f"it does not compile: {output[-600:]}")

    def test(
        self, tests: Sequence[str], where: str, loop: str, limit: float = 0
    ) -> tuple[int | None, Path]:
        """Run tests here; the exit status of pytest, None after the limit, and the report."""
        report = self.root / "build" / "report.xml"
        report.unlink(missing_ok=True)
        limit = limit or LIMIT_S["guest" if where != "unit" else "unit"]
        one = 7200 if "--virtual-time" in WHERE[where] else LIMIT_S["guest"] / 3
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-W", "error", "-p", "no:cacheprovider",
            "--tb=native", f"--timeout={one:.0f}", f"--junitxml={report}",
        ]  # fmt: skip
        if where != "unit":
            softroce = [sys.executable, "-m", "aiordma_softroce", *WHERE[where]]
            command = [*softroce, f"--timeout={limit - 20:.0f}", "--", *command, f"--loop={loop}"]
        status, output = run([*command, *tests], self.root, limit)
        (self.root / "build" / "output.txt").write_text(output)
        return status, report

    def simulate(self, system: str = "", seed: int = 0) -> Outcome:
        """Run this seed, if it is not 0, and then others, until one fails."""
        outcome = Outcome("survived")
        for first, count in [(seed, 1)] * bool(seed) + [(1, SEEDS)]:
            command = [sys.executable, "-m", "tests.simulation.run", "--once", "--stop"]
            words = [f"--first={first}", f"--count={count}"]
            words += [f"--system={system}"] * bool(system)
            status, output = run([*command, *words], self.root, SEEDS_S, PYTHONASYNCIODEBUG="")
            (self.root / "build" / "output.txt").write_text(output)
            outcome = judge_seeds(status, output)
            if outcome.verdict != "survived":
                break
        return outcome


def run(
    command: Sequence[str], cwd: Path, limit_s: float, **variables: str
) -> tuple[int | None, str]:
    """Run a program in a group of its own; its status, None after the limit, and its output."""
    # PYTHONPATH: what tests start as programs of their own is to be that of this tree, too.
    path = f"{cwd}:{cwd}/softroce/src"
    environment = {**os.environ, "PYTHONASYNCIODEBUG": "1", "PYTHONPATH": path, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        end(process)
        output, _ = process.communicate(timeout=30)
        return None, output
    finally:
        _running.discard(process)


_running: set[subprocess.Popen[str]] = set()


def end(process: subprocess.Popen[str]) -> None:
    """End what `run` has started: softly, so that a runner takes its guest along."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def first_failure(report: Path) -> tuple[str, str]:
    """Return the name of the first test that failed in a JUnit file, and the line that says why."""
    try:
        root = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return "", "there is no report"
    for case in root.iter("testcase"):
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                lines = (found.get("message") or found.text or "").strip().splitlines()
                return case.get("name", ""), lines[0] if lines else kind
    return "", ""


def judge(status: int | None, report: Path) -> Outcome:
    """Say whether the tests have found the bug, from the status of pytest and its report."""
    if status == PASSED:
        return Outcome("survived", text="every test passes with it")
    if status is None:
        return Outcome("timeout", text="the tests did not end")
    test, text = first_failure(report)
    if status != FAILED or not test:
        return Outcome(
            "timeout" if status in {124, 137} else "error", 0, test, text or f"status {status}"
        )
    if _TIMED_OUT.match(text.removeprefix("Failed: ")):
        return Outcome("timeout", 0, test, text)
    return Outcome("found", 0, test, text)


_FAILED = re.compile(r"^FAILED (\w+, seed \d+) (.*?)^  again:", re.MULTILINE | re.DOTALL)


def judge_seeds(status: int | None, output: str) -> Outcome:
    """Say whether a seed has found the bug, from the status and the output of the simulation."""
    if status == PASSED:
        return Outcome("survived", text="no seed fails with it")
    failed = _FAILED.search(output)
    if status is None or not failed:
        text = output.strip().splitlines()[-1:] or [f"status {status}"]
        return Outcome("timeout" if status is None else "error", text=text[0])
    lines = [line.strip(" |") for line in failed[2].splitlines() if line.strip(" |+-")]
    # A loop without an end, which a limit of true time has ended, tells nothing.
    verdict = "timeout" if "status -14" in lines[0] else "found"
    return Outcome(verdict, test=failed[1], text=lines[-1])


def try_one(tree: Tree, entry: Mutation, *, by_seeds: bool = False) -> Outcome:
    """Put one bug in, run its tests, or seeds, and take it out again."""
    started = time.monotonic()
    before = (tree.root / entry.file).read_text()
    tree.write(entry.file, before.replace(entry.old, entry.new))
    try:
        if entry.is_c:
            tree.compile(entry.file)
        if by_seeds or entry.where == SIMULATION:
            outcome = tree.simulate(entry.system, entry.seed)
        else:
            outcome = judge(*tree.test(entry.tests, entry.where, entry.loop))
    except CheckFailedError as exc:
        outcome = Outcome("error", text=str(exc))
    finally:
        tree.write(entry.file, before)
        if entry.is_c:
            tree.restore_built()
    seconds = time.monotonic() - started
    return Outcome(outcome.verdict, seconds, outcome.test, outcome.text)


def without_bugs(tree: Tree, entries: Sequence[Mutation], *, by_seeds: bool = False) -> list[str]:
    """Run the tests of the entries as they are; return what does not pass."""
    wrong = []
    if by_seeds or any(entry.where == SIMULATION for entry in entries):
        outcome = tree.simulate()
        if outcome.verdict != "survived":
            wrong.append(f"without a bug: {outcome.test}: {outcome.text}")
    if by_seeds:
        return wrong
    places = sorted({(e.where, e.loop) for e in entries if e.where != SIMULATION})
    for where, loop in places:
        tests = sorted(
            {
                t
                for entry in entries
                if (entry.where, entry.loop) == (where, loop)
                for t in entry.tests
            }
        )
        status, report = tree.test(tests, where, loop, WITHOUT_BUGS_S)
        if status != PASSED:
            test, text = first_failure(report)
            place = where if where == "unit" else f"{where}, {loop}"
            wrong.append(f"without a bug ({place}): status {status}: {test}: {text}")
    return wrong


def try_all(
    entries: Sequence[Mutation], jobs: int, scratch: Path, *, by_seeds: bool = False
) -> tuple[dict[str, Outcome], list[str]]:
    """Try every entry, so many at a time; what came of each, and what fails without a bug."""
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for number in range(jobs):
        tree = Tree(scratch / f"tree{number}")
        tree.fill()
        tree.keep_built()
        trees.put(tree)
    lock, width = threading.Lock(), max(len(entry.name) for entry in entries)

    def using(work: Callable[[Tree], Outcome | list[str]]) -> Outcome | list[str]:
        tree = trees.get()
        try:
            return work(tree)
        finally:
            trees.put(tree)

    def one(entry: Mutation) -> Outcome:
        outcome = using(lambda tree: try_one(tree, entry, by_seeds=by_seeds))
        assert isinstance(outcome, Outcome)
        with lock:
            print(
                f"{outcome.verdict:<9}{entry.name:<{width + 2}}{outcome.seconds:6.1f} s  "
                f"{outcome.test}: {outcome.text}"[:230],
                flush=True,
            )
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        clean = pool.submit(using, lambda tree: without_bugs(tree, entries, by_seeds=by_seeds))
        outcomes = dict(zip((e.name for e in entries), pool.map(one, entries), strict=True))
        wrong = clean.result()
    assert isinstance(wrong, list)
    return outcomes, wrong


def write_report(path: Path, outcomes: dict[str, Outcome], wrong: Sequence[str]) -> None:
    """Write a JUnit file: one case for each entry."""
    suite = ElementTree.Element("testsuite", name="mutate")
    clean = ElementTree.SubElement(suite, "testcase", name="without a bug")
    if wrong:
        ElementTree.SubElement(clean, "failure", message="; ".join(wrong))
    for name, outcome in outcomes.items():
        case = ElementTree.SubElement(suite, "testcase", name=name, time=f"{outcome.seconds:.1f}")
        if outcome.verdict != "found":
            ElementTree.SubElement(case, "failure", message=f"{outcome.verdict}: {outcome.text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8")


def print_table(entries: Sequence[Mutation], outcomes: dict[str, Outcome], seconds: float) -> None:
    """Print what survived and why that matters, and the sums."""
    for entry in entries:
        outcome = outcomes[entry.name]
        if outcome.verdict != "found":
            print(f"\n{outcome.verdict.upper()}: {entry.name} ({entry.file})")
            print(f"  the bug: {entry.bug}\n  {outcome.test} {outcome.text}")
    kinds = ("found", "timeout", "survived", "error")
    counts = {kind: sum(o.verdict == kind for o in outcomes.values()) for kind in kinds}
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"\n{summary}, of {len(entries)} in {seconds:.0f} s", flush=True)


def interrupt(_number: int, _frame: object) -> None:
    """End what is running, with the guests."""
    for process in list(_running):
        end(process)
    os._exit(130)


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(description="Put bugs in and see whether the tests find them.")
    parser.add_argument("--quick", action="store_true", help="those that are part of make test")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these alone")
    parser.add_argument("--where", choices=sorted(WHERE), help="those whose tests run there")
    parser.add_argument(
        "--by", choices=[SIMULATION], help="those of order, time and ends, by seeds alone"
    )
    parser.add_argument("--list", action="store_true", help="name the bugs and end")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time (2)")
    parser.add_argument("--junit", type=Path, help="write the results there")
    options = parser.parse_args()
    try:
        entries = load()
        if unknown := set(options.only) - {entry.name for entry in entries}:
            parser.error(f"no such bug: {', '.join(sorted(unknown))}")
        # Of all: code that has changed takes its entries along, whoever runs which of them.
        if wrong := misfits(entries):
            raise CheckFailedError("\n".join(wrong))
        chosen = [
            entry
            for entry in entries
            if (not options.only or entry.name in options.only)
            and (entry.quick or not options.quick)
            and options.where in {None, entry.where}
            and (entry.kind == "order" or not options.by)
        ]
        if options.list:
            for entry in chosen:
                print(f"{entry.where:<6}{entry.name:<44}{entry.bug}")
            return 0
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, interrupt)
        started = time.monotonic()
        SCRATCH.mkdir(parents=True, exist_ok=True)
        # One run may be beside another.
        with tempfile.TemporaryDirectory(dir=SCRATCH, ignore_cleanup_errors=True) as scratch:
            outcomes, wrong = try_all(
                chosen, options.jobs, Path(scratch), by_seeds=options.by == SIMULATION
            )
    except CheckFailedError as exc:
        print(f"mutate: {exc}", file=sys.stderr)
        return 2
    print_table(chosen, outcomes, time.monotonic() - started)
    for line in wrong:
        print(f"FAILED {line}")
    if options.junit:
        write_report(options.junit, outcomes, wrong)
    return 1 if wrong or any(o.verdict != "found" for o in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
