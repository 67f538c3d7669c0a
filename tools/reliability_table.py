"""Write docs/reliability.md: what a program sees of each fault; and by which tests that is shown.

Usage: ``tools/reliability_table.py [--check | --run]``. The rows are in tests/matrix.toml, and the
results are read from the reports of the last ``make test`` in build/test. The tests and their
results go to docs/contributing/reliability.md. ``--run`` runs only the tests of the rows, in each
place that this machine has, before it writes the pages; it takes about ten minutes. ``--check``
writes nothing; it fails if a page is not what would be written.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

from checks import ROOT, write_page
from stages import REPORTS, RXE, SIW

PAGE = ROOT / "docs/reliability.md"
TESTS = ROOT / "docs/contributing/reliability.md"
ROWS = ROOT / "tests/matrix.toml"
#: Above the rows that begin with a letter.
SECTIONS = {
    "N": "The network",
    "P": "The peer",
    "D": "The adapter",
    "Q": "Queues and keys",
    "R": "Resources",
    "A": "asyncio and the program",
    "F": "Processes and rights",
    "S": "Hostile peers",
    "E": "Calls and events",
}
PLACES = ("fabric", "Soft-RoCE", "iWARP", "two hosts", "model")

_HEAD = """\
# Reliability

What a program sees when the network, the peer, the adapter or the machine fails, and by when.

## In short

- **Every call ends.** It returns its result, raises an error of [](errors.md), or is canceled,
  within the bounds of [](timeouts.md), whatever the peer does.
- **The network loses, duplicates, delays, reorders or damages packets:** nothing but delay, as the
  adapter sends again. If that is in vain for about two seconds (`ack_timeout`), a side that sends
  gets `ConnectionLostError`. An idle side notices by the keepalive: after `idle_timeout_s` for
  messages and requests, 30 seconds by default; a stream after `keepalive_s` and those retries.
- **The peer's process ends:** `ConnectionLostError` at once, after the data that had arrived. If
  it hangs, its adapter still acknowledges: messages and requests end with `ConnectionLostError`
  after `idle_timeout_s`, and a send that it does not take after `stall_timeout_s`, if you set it.
  If its machine loses power: as with a dead network.
- **A loss is never taken for a good end.** A stream or a sequence of messages ends in good order
  only if the peer has said so; otherwise there is an error.
- **A connect** ends within its `timeout`, ten seconds by default, **a close** within
  `close_timeout_s`.
- **The adapter fails or is taken away:** `DeviceRemovedError` from everything that waits, at once.
- **Memory, descriptors or places are short:** the call that needs them raises; open connections
  go on, and a listener serves again as soon as there are some.
- **A peer that breaks the rules** ends its own connection and no other, and reaches no memory that
  it was not given.
- **An event of the adapter gets lost:** a second of delay.

[](faults.md) shows how to try most of this with a program of your own.

## The matrix

[Tests](contributing/reliability.md) cause each fault, and show that a program sees what stands
beside it.

"""

_TESTS_HEAD = """\
# The tests of the faults

Which tests show each row of [the matrix of faults](../reliability.md), and how many cases have
passed in each place. *Fabric* is [RDMA in memory](../fabric.md), *two hosts* are two Soft-RoCE
devices with a wire between them whose clock skips idle time, and *model* are tests with an adapter
made of code. Both pages are written by `tools/reliability_table.py`, out of `tests/matrix.toml` and
the reports of the tests.

"""


def load_rows() -> dict[str, Any]:
    """The rows, by their names."""
    with ROWS.open("rb") as file:
        return tomllib.load(file)


def place_of(stage: str) -> str:
    """Where the tests of a stage run, from its name."""
    if "fabric" in stage or stage.startswith("matrix-"):
        return "fabric"
    if "two-hosts" in stage:
        return "two hosts"
    if "unit" in stage or stage in ("sanitized", "debug", "fuzz"):
        return "model"
    return "iWARP" if "siw" in stage else "Soft-RoCE"


def read_results() -> dict[str, dict[str, Counter[str]]]:
    """How often each test passed or did not, by its name and the place."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for report in sorted((ROOT / REPORTS).glob("*.xml")):
        place = place_of(report.stem)
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").replace(".", "/") + ".py"
            whole = f"{file}::{case.get('name', '')}"
            kinds = {child.tag for child in case}
            if "skipped" in kinds:
                continue
            verdict = "failed" if kinds & {"failure", "error"} else "passed"
            for name in {whole, whole.partition("[")[0]}:
                found.setdefault(name, {}).setdefault(place, Counter())[verdict] += 1
    return found


def passed(tests: list[str], place: str, results: Mapping[str, Mapping[str, Counter[str]]]) -> str:
    """The results of a row in a place, or an empty text."""
    total: Counter[str] = Counter()
    for test in tests:
        total += results.get(test, {}).get(place, Counter())
    if total["failed"]:
        return f"{place} {total['failed']} failed"
    return f"{place} {total['passed']}" if total["passed"] else ""


def shown(row: Mapping[str, Any], results: Mapping[str, Mapping[str, Counter[str]]]) -> bool:
    """Whether each test of a row has passed somewhere, and none has failed."""
    tests = row.get("shown_by", [])
    counts = [sum(results.get(test, {}).values(), Counter[str]()) for test in tests]
    return bool(tests) and all(count["passed"] and not count["failed"] for count in counts)


def page() -> str:
    """The page for users: what a program sees."""
    rows, results = load_rows(), read_results()
    lines = [_HEAD.rstrip("\n"), ""]
    for title, mine in sections(rows):
        lines += [f"### {title}\n", "| What goes wrong | What a program sees |", "| --- | --- |"]
        lines += [line_of(name, row, done=shown(row, results)) for name, row in mine.items()]
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def line_of(name: str, row: Mapping[str, Any], *, done: bool) -> str:
    """A row of the page for users."""
    mark = "" if done else " (not shown)"
    return f"| **{name}**{mark} {row['fault']} | {row['sees']} |"


def tests_page() -> str:
    """The page for contributors: the tests, and their results."""
    rows, results = load_rows(), read_results()
    if not results:
        raise SystemExit(f"there are no reports in {REPORTS}: make test, or {sys.argv[0]} --run")
    done = [name for name, row in rows.items() if shown(row, results)]
    lines = [f"{_TESTS_HEAD}{len(done)} of {len(rows)} rows are shown.\n"]
    for title, mine in sections(rows):
        lines.append(f"## {title}\n")
        for name, row in mine.items():
            places = (passed(row.get("shown_by", []), place, results) for place in PLACES)
            lines.append(
                f"- **{name}** {row['fault']}: {', '.join(filter(None, places)) or 'none'}"
            )
            lines += [f"  - {note}" for note in notes(row)]
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def sections(rows: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The headings, and the rows below each."""
    for letter, title in SECTIONS.items():
        yield title, {name: row for name, row in rows.items() if name.startswith(letter)}


def notes(row: Mapping[str, Any]) -> Iterator[str]:
    """What stands below a row for contributors: the tests, and what they leave open."""
    yield from (f"`{test}`" for test in row.get("shown_by", []))
    if missing := row.get("missing"):
        yield f"not shown: {missing}"
    if differs := row.get("differs"):
        yield differs


# ---- run the tests of the rows


_APART = "not virtual_time and not two_hosts and not qemu"
#: Software iWARP has neither datagrams nor windows; tests/device/conftest.py leaves them out.
_NOT_ON_IWARP = ("test_datagram", "test_windows")


def commands(tests: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The stages, and how each is run: by its report's name."""

    def pytest(stage: str, *more: str) -> tuple[str, ...]:
        report = ROOT / REPORTS / f"{stage}.xml"
        words = ("-q", "-W", "error", "-p", "no:cacheprovider", f"--junitxml={report}")
        return (sys.executable, "-m", "pytest", *words, *more)

    def below(*folders: str) -> tuple[str, ...]:
        return tuple(test for test in tests if test.startswith(folders))

    softroce = (sys.executable, "-m", "aiordma_softroce")
    device = below("tests/device/")
    iwarp = tuple(test for test in device if not any(word in test for word in _NOT_ON_IWARP))
    slow = ("--timeout=7200",)
    yield "unit", pytest("unit", *below("tests/unit/"))
    yield "fabric", pytest("fabric", "tests/fabric/test_matrix.py", *below("tests/fabric/test_"))
    guests = below("softroce/tests/", "tests/guests/")
    yield "runner", pytest("runner", *guests, "-m", "not qemu and not kernels")
    yield (
        "device-fabric",
        (
            *(sys.executable, "-m", "aiordma_fabric", "--devices=2", "--", "env"),
            *("AIORDMA_SOFTROCE_ADDR=127.0.0.1", "AIORDMA_SOFTROCE_DEVICE=rxe"),
            *pytest("device-fabric", *device, "-m", f"{_APART} and not kernel"),
        ),
    )
    yield "device-rxe", (*softroce, *RXE, "--", *pytest("device-rxe", *device, "-m", _APART))
    yield (
        "device-siw",
        (
            *(*softroce, *SIW, "--"),
            *pytest("device-siw", *iwarp, "--loop=uvloop", "-m", f"{_APART} and not one_device"),
        ),
    )
    for stage, mark, more in (
        ("virtual-time", "virtual_time and not two_hosts", ()),
        ("two-hosts", "two_hosts", ("--hosts", "2")),
    ):
        yield (
            stage,
            (
                *(*softroce, *RXE, *more, "--virtual-time", "--"),
                *pytest(stage, *device, "-m", mark, *slow),
            ),
        )


def run() -> None:
    """Run the tests of all rows, each where it can."""
    (ROOT / REPORTS).mkdir(parents=True, exist_ok=True)
    named = [test for row in load_rows().values() for test in row.get("shown_by", [])]
    tests = sorted({test.partition("[")[0] for test in named})
    for stage, command in commands(tests):
        print(f"{stage} ...", flush=True)
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        print(done.stdout[-3000:] if done.returncode else done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        run()
        del sys.argv[1:]
    write_page(TESTS, tests_page(), __doc__)
    write_page(PAGE, page(), __doc__)
