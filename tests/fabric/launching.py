"""Commands over the fabric, started from a process that is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["LIMIT_S", "ROOT", "gone", "launch", "launch_tests", "launched", "outside"]

ROOT = Path(__file__).parents[2]
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
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit_s: float = LIMIT_S,
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
        timeout=limit_s,
    )


def launch_tests(
    options: Sequence[str], words: Sequence[str], *, device: str = "rxe", limit_s: float
) -> str:
    """Run device tests over the fabric, none of which may be skipped; the last line of pytest."""
    pytest = ("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", f"--rootdir={ROOT}")
    env = outside(
        AIORDMA_SOFTROCE_ADDR="127.0.0.1",
        AIORDMA_SOFTROCE_DEVICE=device,
        PYTHONPATH=os.environ.get("PYTHONPATH", ""),
    )
    done = launch(
        *options, "--", sys.executable, *pytest, *words, env=env, cwd=ROOT, limit_s=limit_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert "skipped" not in last
    return last


def gone(folder: Path) -> bool:
    """Whether a folder goes away in time: a process of its own removes it."""
    deadline = time.monotonic() + LIMIT_S
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not folder.exists()
