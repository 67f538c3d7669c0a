"""Write docs/conformance.md: which of CPython's tests of asyncio run over RDMA, and why others not.

Usage: ``tools/conformance_table.py [--check]``, after ``make test STAGES=conformance`` with the
same Python. The reasons are in tests/conformance/table.py, the tests are those that this Python
brings, and the results are read from the report of the stage. ``--check`` writes nothing; it fails
if the page is not what would be written.
"""

from __future__ import annotations

import sys
import unittest
import warnings
from collections import Counter
from xml.etree import ElementTree

from checks import ROOT, write_page

PAGE = ROOT / "docs/conformance.md"
REPORT = ROOT / "build/test/conformance.xml"

_HEAD = """\
# asyncio's own tests, over RDMA

CPython tests asyncio with `test.test_asyncio`. Those of its tests that make connections run over
`RdmaTransport`, too, unchanged: their loop is asyncio's own, except that its `create_connection`
and `create_server` are those of aiordma, and that addresses of this host are replaced by that of
the RDMA device. Where the other end of a test is a blocking socket, in a thread or in
`http.server`, a relay in a thread of its own carries bytes, ends of streams and aborts between
that socket and an RDMA connection.

This page is written by `tools/conformance_table.py`, from `tests/conformance/table.py` and the
report of the stage `conformance`. A test that neither runs nor has a reason here makes that stage
fail.

"""


def inventory() -> tuple[list[str], Counter[str]]:
    """Names of the tests that run, and how many others have which reason."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from tests.conformance.harvest import cases, modules, name_of
    from tests.conformance.table import RUN, why_left_out

    run: list[str] = []
    left_out: Counter[str] = Counter()
    for module in modules():
        try:
            names = [name_of(case) for case in cases(module)]
        except unittest.SkipTest:
            names = [f"{module}.all"]
        for name in names:
            why = why_left_out(name)
            if why is None:
                run.append(name)
            else:
                kind = name.rpartition(".")[0]
                left_out[f"{kind if kind in RUN else module} | {why}"] += 1
    return run, left_out


def results() -> dict[str, str]:
    """Passed or failed, by the name of the test; of the last run."""
    if not REPORT.exists():
        raise SystemExit(f"{REPORT} is missing: make test STAGES=conformance")
    found = {}
    for case in ElementTree.parse(REPORT).iter("testcase"):
        name = case.get("name", "").partition("[")[2].rstrip("]")
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[name] = "did not pass" if bad else "passed"
    return found


def page() -> str:
    """The whole page."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, left_out = inventory()
    verdicts = results()
    version = ".".join(str(part) for part in sys.version_info[:3])
    lines = [
        f"{_HEAD}With Python {version}, {len(run)} tests run over RDMA; the other"
        f" {sum(left_out.values())} do not:\nmost of them test other parts of asyncio.\n",
        "## Tests that run\n",
        "| Test | Result |",
        "| --- | --- |",
        *(f"| `{name}` | {verdicts.get(name, 'not run')} |" for name in sorted(run)),
        "\n## Tests that do not\n",
        "| Where | Reason | Tests |",
        "| --- | --- | --- |",
    ]
    for each, count in sorted(left_out.items()):
        kind, _, why = each.partition(" | ")
        lines.append(f"| `{kind}` | {why} | {count} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_page(PAGE, page(), __doc__)
