"""Commands over the fabric, started from a process that is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["LIMIT_S", "gone", "launch", "launched", "outside"]

LIMIT_S = 30
_POLL_S = 0.01


def outside(**more: str) -> dict[str, str]:
    """The environment of a process that is over no fabric, whatever this session is in."""
    told = {name: value for name, value in os.environ.items() if not name.startswith("AIORDMA_")}
    own = os.environ.get("AIORDMA_FABRIC", "")
    paths = told.pop("LD_LIBRARY_PATH", "").split(":")
    if kept := [path for path in paths if path and path != f"{own}/lib"]:
        told["LD_LIBRARY_PATH"] = ":".join(kept)
    return told | more


def launched(*words: str) -> list[str]:
    """The words that run the launcher."""
    return [sys.executable, "-m", "aiordma_fabric", *words]


def launch(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end."""
    return subprocess.run(
        launched(*words),
        env=outside() if env is None else env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def gone(folder: Path) -> bool:
    """Whether a folder goes away in time: a process of its own removes it."""
    deadline = time.monotonic() + LIMIT_S
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not folder.exists()
