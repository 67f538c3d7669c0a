"""No permission is told as no permission, by a program that has given up its own."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma.endpoint.config import plan_of

pytestmark = [pytest.mark.device, pytest.mark.program]

LIMIT_S = 90
NODES = Path("/dev/infiniband")
PLENTY = 1 << 30


@contextmanager
def modes(**wanted: int) -> Iterator[None]:
    """Nodes with such modes for the length of a block; the others may be opened by all."""
    paths = [NODES / "rdma_cm", *NODES.glob("uverbs*")]
    before = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    try:
        for path in paths:
            path.chmod(wanted.get(path.name, 0o666))
        yield
    finally:
        for path, mode in before.items():
            path.chmod(mode)


def run(address: str, memlock: int = PLENTY) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each call told, and what `aiordma doctor` saw."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).with_name("unprivileged.py")), address,
         str(memlock)],
        capture_output=True, check=False, text=True, timeout=LIMIT_S,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines, _, report = done.stdout.partition("{\n")
    print(done.stdout)
    calls = [json.loads(line) for line in lines.splitlines()]
    checks = {check["name"]: check for check in json.loads("{\n" + report)["checks"]}
    return {name: rest for name, *rest in calls}, checks


@pytest.mark.parametrize("node", ["rdma_cm", "uverbs0"])
def test_b02_a_node_of_mode_0600(address: str, node: str) -> None:
    with modes(**{node: 0o600}):
        calls, checks = run(address)
    assert any(name.startswith("unavailable:") and node in name for name in calls)
    for name in ("channel", "connect", "listen"):
        kinds, number, text, hint = calls[name]
        if name == "channel" and node == "uverbs0" and number is None:
            continue  # a channel needs the connection manager alone
        assert "RdmaPermissionError" in kinds, (name, text)
        assert "PermissionError" in kinds
        assert number == errno.EACCES
        assert f"/dev/infiniband/{node}" in text
        assert "0666" in hint
        assert "modprobe" not in text
    words = json.dumps(checks["device nodes"]) + json.dumps(checks["connection manager"])
    assert checks["device nodes"]["status"] == "FAIL"
    assert "0666" in words
    assert "modprobe" not in words


CHANGES_ITS_USER = """
import asyncio, contextlib, os, sys
import aiordma

async def echo(conn):
    async for message in conn:
        await conn.send(message)

async def exchange(conn, data):
    await conn.send(data)
    assert bytes(await conn.recv()) == data

async def main(address):
    server = await aiordma.serve(echo, address, 0)
    async with aiordma.connect(address, server.port) as conn:
        await exchange(conn, b"as root")
        os.setuid(65534)
        with contextlib.suppress(ConnectionError):  # a software adapter posts by a call
            await exchange(conn, b"as nobody")
    await server.stop()

asyncio.run(main(sys.argv[1]))
"""


def test_a_server_that_has_changed_its_user_stops(address: str) -> None:
    """The kernel takes no calls of it any more, and what it has served is closed all the same."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHANGES_ITS_USER, address],
        capture_output=True, check=False, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    print(done.stderr)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.kernel
def test_b03_memory_that_may_not_be_pinned(address: str) -> None:
    each = plan_of(aiordma.ConnectionConfig()).pinned
    for limit in (0, each - 1):
        with modes():
            calls, checks = run(address, limit)
        for name in ("connect", "memory"):
            kinds, number, text, hint = calls[name]
            assert "RdmaOSError" in kinds, text
            assert number in (errno.ENOMEM, errno.EPERM)
            assert "ulimit -l" in hint
            assert "ibv_reg_mr" in text
        assert checks["locked memory"]["status"] == "FAIL"


@pytest.mark.kernel
def test_b03_as_much_as_one_connection_needs(address: str) -> None:
    each = plan_of(aiordma.ConnectionConfig()).pinned
    with modes():
        calls, checks = run(address, each)
    kinds, _, text, _ = calls["connect"]
    assert "ConnectionRefusedError" in kinds, text  # nobody listens: the memory was there
    assert checks["locked memory"]["status"] == "WARN"
    assert "room for one connection " in checks["locked memory"]["seen"]
