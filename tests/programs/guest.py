"""All programs on both loops, where a device is: `python -m tests.programs.guest FILE [NAME...]`.

Each runs in a process of its own; FILE gets a list of what was seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.programs.listed import programs

_LIMIT_S = 120


def _run(name: str, loop: str, address: str) -> dict[str, Any]:
    words = (sys.executable, "-m", "tests.programs.one", name, loop, address)
    done = None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as exc:
        seen = {"name": name, "loop": loop, "error": f"no result: {type(exc).__name__}"}
    if seen["error"]:
        print(f"--- {name} on {loop}\n{done.stdout + done.stderr if done else ''}", flush=True)
    return seen


def main(file: str, *names: str) -> None:
    """Run them, one after the other."""
    address = os.environ["AIORDMA_SOFTROCE_ADDR"]
    results = []
    for name in names or programs:
        for loop in ("asyncio", "uvloop"):
            seen = _run(name, loop, address)
            results.append(seen)
            print(json.dumps(seen), flush=True)
    Path(file).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
