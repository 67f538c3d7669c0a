"""distributed's own tests, over `rdma://` in place of `tcp://`.

    python -m tests.conformance.dask_suite CHECKOUT [FILE...] [-- PYTEST OPTION...]

CHECKOUT is a copy of distributed's repository: its packages have no tests.  A FILE is one of
`FILES`, all without.  Runs where a device is, on a copy whose tests name our scheme, and the
device's address in place of loopback; our scheme is the default there.  The plugin in
`dask_left_out` skips those that cannot run.  Meant for a guest: it changes the default route.
Prints a table of what passes and of what is skipped, with the reasons.  The status is 1 if a test
fails.

Virtual time (`softroce --virtual-time`) suits it: most of these tests sleep most of the time, and
their limits are short for a busy machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

LIMIT_S = 3600
TEST_LIMIT_S = 300
#: By what they are called here.
FILES = {"comms": "distributed/comm/tests/test_comms.py"} | {
    name: f"distributed/tests/test_{name}.py"
    for name in ("batched", "client", "core", "failed_workers", "nanny", "scheduler", "worker")
}
#: The second has the scheme of addresses that name none.
_TEXTS = ("distributed/utils_test.py", "distributed/comm/core.py", "distributed/**/tests/*.py")
_ROOT = Path(__file__).parents[2]


def over_rdma(source: str, address: str) -> str:
    """The text of the tests, with our scheme, and the device's address in place of this host's."""
    for old, new in (
        ("tcp://", "rdma://"),
        ('"tcp"', '"rdma"'),
        ("from distributed.comm.tcp import TCP", "from tests.conformance.dask_tcp import TCP"),
        ("import distributed.comm.tcp as tcp", "import tests.conformance.dask_tcp as tcp"),
        ("127.0.0.1", address),
    ):
        source = source.replace(old, new)
    return source


def copy(checkout: Path, folder: Path, address: str) -> None:
    """Copy the package, its tests and the settings of pytest, with the texts replaced."""
    shutil.copytree(checkout / "distributed", folder / "distributed")
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(checkout / name, folder)
    for pattern in _TEXTS:
        for path in folder.glob(pattern):
            path.write_text(over_rdma(path.read_text(), address))


def lead_out(address: str) -> None:
    """Give this host a way to others, by the device, which distributed asks for its own address."""
    show = subprocess.run(
        ("ip", "-o", "-4", "addr", "show"), capture_output=True, text=True, check=True
    )
    (interface,) = re.findall(rf"^\d+: (\S+) +inet {re.escape(address)}/", show.stdout, re.M)
    subprocess.run(("ip", "route", "replace", "default", "dev", interface), check=True)


def outcomes(report: Path) -> dict[str, str]:
    """Of each test, out of a file of JUnit: "passed", "failed", or why it was skipped."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {each.tag: each.get("message", "") for each in case}
        kind = "failed" if {"error", "failure"} & set(kinds) else kinds.get("skipped", "passed")
        found[case.attrib["name"]] = kind
    return found


def run(folder: Path, file: str, options: list[str]) -> dict[str, str]:
    """The outcome of each test of a file; of a pytest that died, that it did."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    words = (
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "--runslow",
        "-o", "addopts=-q -p no:asyncio -p no:legacypath", "-p", "tests.conformance.dask_left_out",
        f"--timeout={TEST_LIMIT_S}", "--timeout-method=signal", f"--junit-xml={report}",
        # The mark "flaky" belongs to a plugin that runs failed tests again, which is not wanted.
        "-W", "ignore::pytest.PytestUnknownMarkWarning",
        # Some tests leave a server open; distributed's settings ignore it of sockets.
        "-W", "ignore:unclosed <Listener:ResourceWarning",
        "-W", "ignore:unclosed <EventChannel:ResourceWarning",
    )  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(_ROOT))),
        "DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME": "rdma",
        "DASK_TEMPORARY_DIRECTORY": str(folder / "scratch"),
    }
    command = [*words, *options, FILES[file]]
    done = subprocess.run(command, env=env, check=False, timeout=LIMIT_S, cwd=folder)
    if not report.exists():
        return {f"pytest ended with status {done.returncode}": "failed"}
    return outcomes(report)


def main(words: list[str]) -> int:
    """Run them; returns the exit status."""
    cut = words.index("--") if "--" in words else len(words)
    options = words[cut + 1 :]
    checkout, *files = words[:cut]
    if unknown := set(files) - set(FILES):
        print(f"no file {', '.join(sorted(unknown))}; there are {', '.join(FILES)}")
        return 2
    failed: list[str] = []
    passed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    address = os.environ["AIORDMA_SOFTROCE_ADDR"]
    lead_out(address)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(Path(checkout).resolve(), folder, address)
        for file in files or FILES:
            for test, kind in run(folder, file, options).items():
                if kind == "passed":
                    passed[file] += 1
                elif kind == "failed":
                    failed.append(f"{file}::{test}")
                else:
                    skipped[f"{file} | {re.sub(r' +', ' ', kind)}"] += 1
    print("\n| File | Tests | |\n| --- | --- | --- |")
    for file in files or FILES:
        print(f"| {file} | {passed[file]} | pass |")
    for reason, count in sorted(skipped.items()):
        file, _, text = reason.partition(" | ")
        print(f"| {file} | {count} | {text} |")
    for each in failed:
        print(f"failed: {each}")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
