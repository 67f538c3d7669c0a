"""examples/rping.py with rdma-core's rping, in the roles of its first lines."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.interop.program import running
from tests.interop.rping import assert_shown, ended_well, rping_client, rping_server

EXAMPLE = (sys.executable, "-W", "error", str(Path(__file__).parents[2] / "examples/rping.py"))
SIZE = 64


async def listener_is_there(address: str, port: int) -> None:
    """Until the kernel knows of a listener; the time limit of its program bounds it."""
    command = ("rdma", "-j", "resource", "show", "cm_id")
    addresses: list[str] = []
    while f"{address}:{port}" not in addresses:
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        shown, _ = await process.communicate()
        ids = [cm_id for cm_id in json.loads(shown) if cm_id["state"] == "LISTEN"]
        addresses = [cm_id["src-addr"] for cm_id in ids]


async def test_the_example_serves_rping(address: str, port: int) -> None:
    async with running(*EXAMPLE, "server", address, str(port)) as example:
        await example.line("listening on")
        async with running(*rping_client(address, port, SIZE)) as rping:
            await ended_well(rping)
        await example.finish()
    assert_shown(rping, "ping data: ", SIZE)
    assert_shown(example, "ping data: ", SIZE)


async def test_the_example_calls_rping(address: str, port: int) -> None:
    async with running(*rping_server(address, port, SIZE, "-v")) as rping:
        await listener_is_there(address, port)
        async with running(*EXAMPLE, "client", address, str(port)) as example:
            await example.finish()
        await ended_well(rping)
    assert rping.said("server ping data: ") == [f"aiordma-ping-{n}" for n in range(3)]
