"""Runs a plan of programs that are profiled, where the device is: see guest.py and profile.py.

    python -m tests.bench.profile_guest PLAN.json

Beside what guest.py tells, a line about a program has what marks.c wrote: how long its window took,
and the maps of the process.  The last line has the kernel's symbols.

Addresses are the same in all processes that run the same program: the kernel places nothing at
random (what is forked from this process shares its maps in any case), and Python's hashes are not
seeded at random, so that its allocations are the same, too.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

from tests.bench import guest
from tests.bench.jobs import MARKS

WINDOW = guest.SCRATCH / "bench-window"


def tell(line: dict[str, Any]) -> None:
    """One line for the host."""
    print(guest.MARK + json.dumps(line), flush=True)


def main(plan: str) -> None:
    """Run all steps of the plan."""
    Path("/proc/sys/kernel/randomize_va_space").write_text("0")
    os.environ |= {"BENCH_WINDOW": str(WINDOW), "PYTHONHASHSEED": "0"}
    steps = json.loads(Path(plan).read_text())
    modules = guest.load(steps)
    marks = ctypes.CDLL(str(MARKS))
    tell({"versions": guest.versions()})
    for port, step in enumerate(steps, guest.FIRST_PORT):
        WINDOW.unlink(missing_ok=True)
        marks.bench_job()
        result = guest.run(step, port, modules)
        took = WINDOW.read_text() if WINDOW.exists() else ""
        tell({"name": step["name"], "number": step["number"], "window": took} | result)
    # As they are now: programs make the kernel load modules.
    symbols = zlib.compress(Path("/proc/kallsyms").read_bytes(), 1)
    tell({"symbols": base64.b64encode(symbols).decode()})


if __name__ == "__main__":
    main(sys.argv[1])
