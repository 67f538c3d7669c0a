"""pyverbs' own tests, as a program of the system's Python: `pyverbs_suite.py FOLDER FILE`.

FOLDER has the package `tests` as rdma-core delivers it.  FILE gets an object of what became of each
test: its outcome, and the reason if it was skipped or what went wrong if it failed.

One function of theirs is replaced.  `_get_ip_mac` asks sysfs for the network device of an adapter,
and the program `ip` for its address; the fabric is not in sysfs.  Without an address the tests of
the connection manager would be left out.  Here it answers with the address in AIORDMA_FABRIC_ADDR.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import unittest
from pathlib import Path
from typing import Any

#: That of a loopback device: no test but those of flows looks at it.
_MAC = "00:00:00:00:00:00"


class Outcomes(unittest.TestResult):
    """What became of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[str]] = {}
        self._begun = 0.0

    def _note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        self.seen[test.id()] = [outcome, why]
        took = time.monotonic() - self._begun
        print(f"{took:.2f} {outcome} {test.id()} {why}", flush=True)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begun = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed", self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._note(test, "failed", self.errors[-1][1])


def _get_ip_mac(self: Any, dev: str, port: int, index: int) -> None:
    self.args.append([dev, port, index, os.environ["AIORDMA_FABRIC_ADDR"], _MAC])


def main(folder: str, file: str, *options: str) -> None:
    """Run all of them; names of tests after the options choose some."""
    # As run_tests.py there is run.
    sys.path[:0] = [folder, f"{folder}/tests"]
    sys.argv[1:] = ["--dev", "fab0"]
    importlib.import_module("args_parser").parser.parse_args()
    base = importlib.import_module("tests.base")
    base.RDMATestCase._get_ip_mac = _get_ip_mac
    loader = unittest.defaultTestLoader
    if options:
        suite = loader.loadTestsFromNames(options)
    else:
        suite = loader.loadTestsFromModule(importlib.import_module("tests"))
    outcomes = Outcomes()
    suite.run(outcomes)
    Path(file).write_text(json.dumps(outcomes.seen, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
