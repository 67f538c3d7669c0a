"""``make calibrate``: the profiles of the fabric beside the adapters that they stand for.

Usage: ``python -m tests.calibration.compare [--record] [--write] [--skeleton] [NAME...]``

Each program runs under the recorder over the fabric, with a profile, and its trace is compared with
that of the adapter: in `traces/`, or with ``--record`` run anew in a guest of softroce.  A
difference is in `explained.toml`, with its reason and its source, or the command fails.
``--write`` brings the tables of `docs/calibration.md` up to date, if all programs run;
``--skeleton`` prints what is not explained as that file wants it.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRACES = HERE / "traces"
EXPLAINED = HERE / "explained.toml"
PAGE = ROOT / "docs/calibration.md"
#: The profile of the fabric, and the device of the guest that it stands for.
DEVICES = {"rxe-6.12": "rxe", "siw-6.12": "siw"}
STANDARD = "standard"
KERNEL = "6.12"
#: What run.py writes for a program that the transport cannot run.
ELSEWHERE = "note not for this transport\n"
#: Of a guest that runs all programs.
GUEST_S = 1500
#: How often a guest may die before the rest is given up.
DEATHS = 20

Traces = dict[str, str]


class CalibrationError(Exception):
    """The traces cannot be made or read."""


# ---- making traces


def build_recorder(folder: Path) -> Path:
    """Compile the recorder; it brings both libraries, so that it finds them behind itself."""
    library = folder / "recorder.so"
    call(
        "gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC",
        "-fvisibility=hidden", "-shared", *sorted(HERE.glob("recorder*.c")), "-o", library,
        "-Wl,--no-as-needed", "-lrdmacm", "-libverbs",
    )  # fmt: skip
    return library


def call(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], cwd=ROOT, check=False)
    if done.returncode:
        raise CalibrationError(f"{words[0]} ended with status {done.returncode}")


def program_command(recorder: Path, folder: Path, names: Sequence[str]) -> list[str]:
    run = (sys.executable, "-m", "tests.calibration.run", folder, *names)
    return ["env", f"LD_PRELOAD={recorder}", f"PYTHONPATH={ROOT}", *map(str, run)]


def start_fabric(
    profile: str, recorder: Path, folder: Path, names: Sequence[str]
) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "aiordma.testing.fabric", "--profile", profile, "--"]
    return subprocess.Popen([*launcher, *program_command(recorder, folder, names)], cwd=ROOT)


def run_guest(device: str, recorder: Path, folder: Path, names: Sequence[str]) -> None:
    """Run programs in a guest; in another one those that come after one that took it down."""
    left = list(names)
    for _ in range(DEATHS):
        launcher = (
            sys.executable, "-m", "aiordma_softroce", "--engine", "uml", "--kernel",
            KERNEL, "--device", device, "--timeout", str(GUEST_S), "--",
        )  # fmt: skip
        status = subprocess.run(
            [*launcher, *program_command(recorder, folder, left)], cwd=ROOT, check=False
        ).returncode
        for running in folder.glob("*.running"):
            trace = running.read_text()
            running.with_suffix(".txt").write_text(f"{trace}note the kernel died\n")
            running.unlink()
        left = [name for name in left if not (folder / f"{name}.txt").exists()]
        if not left:
            return
        if not status:
            break
    raise CalibrationError(f"the guest with {device} did not run {', '.join(left)}")


def read_folder(folder: Path) -> Traces:
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}


# ---- the file of an adapter


def read_traces(path: Path) -> Traces:
    """The traces of an adapter: each begins with a line of its name."""
    traces: Traces = {}
    name = ""
    for line in path.read_text().splitlines(keepends=True):
        if line.startswith("== "):
            name = line[3:].strip()
            traces[name] = ""
        else:
            traces[name] += line
    return traces


def write_traces(path: Path, traces: Traces) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"== {name}\n{traces[name]}" for name in sorted(traces)))


# ---- comparing


def hunks(theirs: str, ours: str) -> list[str]:
    """Where two traces differ: lines of the adapter with a minus, of the fabric with a plus."""
    before, after = theirs.splitlines(), ours.splitlines()
    found = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            lines = [*(f"- {line}" for line in before[i:j]), *(f"+ {line}" for line in after[k:m])]
            found.append("\n".join(lines))
    return found


@dataclass
class Reason:
    """Why an adapter and its profile differ in some programs."""

    devices: list[str]
    reason: str
    source: str
    #: Of a program, by name: the hunks, with empty lines between them.
    differences: dict[str, str]


def read_reasons(path: Path) -> list[Reason]:
    reasons = [Reason(**each) for each in tomllib.loads(path.read_text()).get("reason", [])]
    for each in reasons:
        if not each.reason or not each.source:
            raise CalibrationError(f"{path.name}: {sorted(each.differences)}: no reason or source")
    return reasons


@dataclass
class Result:
    """What a comparison of an adapter with its profile has found, by programs."""

    equal: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    unexplained: dict[str, list[str]] = field(default_factory=dict)
    #: Explained, and no longer so.
    stale: list[str] = field(default_factory=list)


def compare(device: str, theirs: Traces, ours: Traces, reasons: Iterable[Reason]) -> Result:
    """Compare the traces of an adapter with those of its profile."""
    known: dict[str, list[str]] = {}
    for reason in reasons:
        if device in reason.devices:
            for name, text in reason.differences.items():
                known.setdefault(name, []).extend(text.strip("\n").split("\n\n"))
    result = Result()
    for name in sorted(ours):
        if ours[name] == ELSEWHERE and theirs.get(name) == ELSEWHERE:
            continue
        found = hunks(theirs.get(name, ""), ours[name])
        left = known.get(name, []).copy()
        open_ = [hunk for hunk in found if not taken(hunk, left)]
        if open_:
            result.unexplained[name] = open_
        elif found:
            result.explained.append(name)
        else:
            result.equal.append(name)
        if left:
            result.stale.append(name)
    return result


def taken(hunk: str, known: list[str]) -> bool:
    if hunk not in known:
        return False
    known.remove(hunk)
    return True


# ---- telling


def skeleton(device: str, result: Result) -> Iterator[str]:
    """What is not explained, for explained.toml."""
    if result.unexplained:
        yield f'[[reason]]\ndevices = ["{device}"]\nreason = ""\nsource = ""\n'
        yield "[reason.differences]"
    for name, found in result.unexplained.items():
        yield f"{name} = '''\n" + "\n\n".join(found) + "\n'''"


def report(device: str, result: Result) -> bool:
    """Print what was found; whether all is well."""
    for name, found in result.unexplained.items():
        print(f"\n{device}: {name}: unexplained")
        print("\n\n".join(found))
    for name in result.stale:
        print(f"\n{device}: {name}: explained.toml has a difference that is gone")
    print(
        f"\n{device}: {len(result.equal)} equal, {len(result.explained)} explained, "
        f"{len(result.unexplained)} unexplained"
    )
    return not result.unexplained and not result.stale


def counts(results: dict[str, Result]) -> Iterator[str]:
    """The table of the page."""
    yield "| Adapter | Equal | Explained | Unexplained |"
    yield "| --- | --- | --- | --- |"
    for device, result in results.items():
        numbers = [len(result.equal), len(result.explained), len(result.unexplained)]
        cells = [f"`{device}`", *map(str, numbers)]
        yield f"| {' | '.join(cells)} |"


def reasons_told(reasons: Iterable[Reason]) -> Iterator[str]:
    """The list of what is explained."""
    rows: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for each in reasons:
        devices, names = rows.setdefault((each.reason, each.source), ({}, {}))
        devices.update(dict.fromkeys(each.devices))
        names.update(dict.fromkeys(each.differences))
    for (reason, source), (devices, names) in rows.items():
        told = ", ".join(f"`{name}`" for name in names)
        yield f"- {reason} ({', '.join(devices)}: {told}. Source: {source}.)"


def departures(theirs: Traces, standard: Traces, rules: dict[str, str]) -> Iterator[str]:
    """Where an adapter departs from the standard's profile: a rule, and what differs."""
    for name in sorted(theirs):
        if ELSEWHERE in (theirs[name], standard.get(name, ELSEWHERE)):
            continue
        if found := hunks(theirs[name], standard[name]):
            yield f"**{name}**: {rules.get(name, '')}\n\n```diff\n" + "\n".join(found) + "\n```\n"


def put(text: str, mark: str, lines: Iterable[str]) -> str:
    """Replace what stands between two marks of a page."""
    first, last = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    head, found, rest = text.partition(first)
    _, ended, tail = rest.partition(last)
    if not found or not ended:
        raise CalibrationError(f"{PAGE.name}: no place for {mark}")
    return f"{head}{first}\n\n" + "\n".join(lines).strip() + f"\n\n{last}{tail}"


def rules_of_programs() -> dict[str, str]:
    """Name and rule of each program, without loading the libraries that they call."""
    import ast

    rules = {}
    for path in sorted((HERE / "programs").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(each, ast.Call) and getattr(each.func, "id", "") == "program"
                for each in node.decorator_list
            ):
                rules[node.name] = ast.get_docstring(node) or ""
    return rules


def record(recorder: Path, scratch: Path, names: Sequence[str]) -> None:
    """Run the programs on the adapters, and keep the traces."""
    for device, kind in DEVICES.items():
        folder = scratch / f"guest-{device}"
        folder.mkdir()
        run_guest(kind, recorder, folder, names)
        path = TRACES / f"{device}.txt"
        known = read_traces(path) if path.exists() else {}
        everything = known | read_folder(folder)
        write_traces(
            path, {name: everything[name] for name in rules_of_programs() & everything.keys()}
        )


def over_the_fabric(recorder: Path, scratch: Path, names: Sequence[str]) -> dict[str, Traces]:
    """Run the programs with each profile; side by side, because they wait most of the time."""
    running = {}
    for profile in (*DEVICES, STANDARD):
        folder = scratch / profile
        folder.mkdir()
        running[profile] = folder, start_fabric(profile, recorder, folder, names)
    for profile, (_, process) in running.items():
        if status := process.wait():
            raise CalibrationError(f"{profile}: the programs ended with status {status}")
    return {profile: read_folder(folder) for profile, (folder, _) in running.items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make calibrate")
    parser.add_argument("--record", action="store_true", help="run on the adapters, too")
    parser.add_argument("--write", action="store_true", help="write docs/calibration.md")
    parser.add_argument("--skeleton", action="store_true", help="print entries to be explained")
    parser.add_argument("names", nargs="*", help="of programs; all of them by default")
    options = parser.parse_args(arguments)
    rules = rules_of_programs()
    if unknown := set(options.names) - rules.keys():
        parser.error(f"there is no program {', '.join(sorted(unknown))}")
    names = options.names or list(rules)
    scratch = Path(tempfile.mkdtemp(prefix="calibration-", dir=os.environ.get("TMPDIR", "/tmp")))
    try:
        recorder = build_recorder(scratch)
        if options.record:
            record(recorder, scratch, names)
        ours = over_the_fabric(recorder, scratch, names)
        theirs = {device: read_traces(TRACES / f"{device}.txt") for device in DEVICES}
        reasons = read_reasons(EXPLAINED)
        results = {
            device: compare(device, theirs[device], ours[device], reasons) for device in DEVICES
        }
        good = True
        for device, result in results.items():
            if options.skeleton:
                print("\n".join(skeleton(device, result)))
            else:
                good = report(device, result) and good
        if options.write and not options.names:
            text = put(PAGE.read_text(), "counts", counts(results))
            text = put(text, "reasons", reasons_told(reasons))
            for device in DEVICES:
                told = departures(theirs[device], ours[STANDARD], rules)
                text = put(text, f"departures of {device}", told)
            PAGE.write_text(text)
    except CalibrationError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(scratch)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
