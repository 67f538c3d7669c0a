"""Wheels and environments for tests of the package as its users have it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

#: Seconds.
BUILD_S = 400.0


def call_tool(*words: str | Path, cwd: Path, seconds: float) -> str:
    """Run a program that has to succeed, and return its output."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=surroundings(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def surroundings() -> dict[str, str]:
    """Those of this process, without its own settings of Python and pytest."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYT")}
