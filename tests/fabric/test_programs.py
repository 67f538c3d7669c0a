"""The programs of rdma-core and perftest over the fabric: two processes of one run.

None of them knows of the fabric.  Each must end with its status and say what it says after all its
turns; those that compare bytes are told to.  tests/fabric/foreign.py has their commands.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fabric.foreign import CASES, LEFT_OUT, PACKAGES, SHOWS, Case
from tests.fabric.launching import ROOT, launch

LIMIT_S = 40.0
BYTES = bytes(range(250)) * 1200


#: Below those that the kernel chooses: until a program listens there, another test may get it.
_PORTS = itertools.count(20_000 + os.getpid() % 100 * 100)


def free_port() -> int:
    """A port of TCP that nobody has; those of RDMA are the run's own anyhow."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError


def ran(case: Case, **names: object) -> dict[str, Any]:
    """What became of both sides."""
    plan = {
        "server": case.server.format(**names).split(),
        "client": case.client.format(**names).split(),
        "ready": case.ready.format(**names),
        "endless": case.endless,
        "again": case.again,
        "limit_s": LIMIT_S,
    }
    words = (sys.executable, "-m", "tests.fabric.pair", json.dumps(plan))
    done = launch("--", *words, cwd=ROOT, limit_s=LIMIT_S + 20)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def told(results: dict[str, Any]) -> str:
    return "\n".join(
        f"{side}: status {seen['status']}, it said:\n{seen['said']}"
        for side, seen in results.items()
    )


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_program(case: Case, tmp_path: Path) -> None:
    given, taken = tmp_path / "given", tmp_path / "taken"
    given.write_bytes(BYTES)
    results = ran(case, port=free_port(), given=given, taken=taken)
    sides = {"server": (case.server, case.server_says), "client": (case.client, case.client_says)}
    assert set(results) == {side for side, (words, _) in sides.items() if words}, told(results)
    for side, seen in results.items():
        if side == "server" and case.endless:
            assert seen["status"] < 0, told(results)  # by the signal, and not before
        else:
            assert seen["status"] == case.status, told(results)
        assert re.search(sides[side][1], seen["said"]), told(results)
    if case.program == "rcopy":
        assert taken.read_bytes() == BYTES


def installed(package: str) -> set[str]:
    """The programs of a package."""
    done = subprocess.run(
        ["dpkg-query", "-L", package], capture_output=True, text=True, check=True, timeout=30
    )
    return {Path(line).name for line in done.stdout.splitlines() if "/bin/" in line}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_program_of_a_package_is_run_or_left_out(package: str) -> None:
    left_out = {name for name in installed(package) if name in LEFT_OUT}
    assert installed(package) == set(SHOWS[package]) | left_out
    assert not set(SHOWS[package]) & set(LEFT_OUT)


def test_what_is_shown_is_run() -> None:
    words = {word for case in CASES for word in (case.server + " " + case.client).split()}
    shown = {name for programs in SHOWS.values() for name in programs}
    assert shown <= words
    assert {case.program for case in CASES} <= shown
