"""Programs for test_device_removal: python removal.py SCENARIO; prints what its test compares."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from aiordma.verbs import DeviceEvents

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiordma
from tests.device.closing import Hall
from tests.inside.endpoint import link_of

ADDRESS = os.environ["AIORDMA_SOFTROCE_ADDR"]
DEVICE = os.environ["AIORDMA_SOFTROCE_DEVICE"] + "0"
CARD = "dummy0"


def say(*words: object) -> None:
    print(*words, flush=True)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def remove() -> subprocess.Popen[bytes]:
    """Begin to remove the device; the command may wait for this program to end."""
    return subprocess.Popen(["rdma", "link", "delete", DEVICE])


async def outcome(name: str, call: Awaitable[Any]) -> None:
    """Say what a call ended with."""
    try:
        result: object = await call
    except Exception as exc:
        cause = f" from {type(exc.__cause__).__name__}" if exc.__cause__ else ""
        result = f"{type(exc).__name__}{cause}"
    say(f"{name}: {result}")


async def connect(port: int) -> str:
    async with aiordma.connect(ADDRESS, port, timeout=3):
        return "connected"


async def collect(events: Any) -> list[str]:
    return [event.type.name async for event in events]


async def count(items: Any) -> int:
    return len([item async for item in items])


async def taken() -> None:
    """A kernel that takes the device away: whatever waits is told, and all can be closed."""
    hall = Hall(ADDRESS)
    ends = await hall.connected()
    listener = await aiordma.listen(ADDRESS, 0)
    requests = await aiordma.listen(ADDRESS, 0)
    everywhere = await aiordma.listen(None, 0)
    client = await aiordma.connect(ADDRESS, listener.port)
    server = await listener.accept()
    context = link_of(client).context
    waiting = [
        outcome("client.recv", client.recv()),
        outcome("listener.accept", listener.accept()),
        outcome("listener", count(listener)),
        outcome("requests", count(requests.requests())),
        outcome("client.events", collect(client.events())),
        outcome("device events", collect(DeviceEvents(context))),
        outcome("native receive", ends[0].waiting[0]),
        outcome("native events", ends[0].waiting[2]),
    ]
    tasks = [asyncio.create_task(wait) for wait in waiting]
    await asyncio.sleep(0)
    remove()
    await asyncio.wait(tasks[:4], timeout=30)
    began = time.monotonic()
    await client.close()
    await server.close()
    for end in ends:
        end.close()
        await end.ended()
    say("closed in time:", time.monotonic() - began < 10)
    await outcome("connect", connect(everywhere.port))
    await outcome("listen", aiordma.listen(ADDRESS, 0).__aenter__())
    for one in (listener, requests, everywhere):
        one.close()
        await one.wait_closed()
    tasks[5].cancel()
    await asyncio.wait(tasks, timeout=10)
    await hall.close()


async def kept() -> None:
    """A kernel that waits for its users: nothing is told, and everything goes on."""
    async with (
        aiordma.listen(ADDRESS, 0) as listener,
        aiordma.connect(ADDRESS, listener.port) as client,
        await listener.accept() as server,
    ):
        with client.events() as events:
            removing = remove()
            await outcome("events", asyncio.wait_for(anext(events), 1))
        await client.send(b"still here")
        say(bytes(await server.recv()))
        async with (
            aiordma.connect(ADDRESS, listener.port) as another,
            await listener.accept() as its_peer,
        ):
            await another.send(b"and more")
            say(bytes(await its_peer.recv()))
        say("delete is over:", removing.poll() is not None)


async def down() -> None:
    """Messages while the port is down."""
    async with aiordma.listen(ADDRESS, 0) as listener:
        client = await aiordma.connect(ADDRESS, listener.port)
        server = await listener.accept()
        run("ip", "link", "set", "dev", CARD, "down")
        await client.send(b"to nowhere")
        await outcome("flush", client.flush())
        try:
            await client.send(b"more")
        except aiordma.ConnectionLostError as exc:
            say(exc)
        with DeviceEvents(link_of(client).context) as events:
            run("ip", "link", "set", "dev", CARD, "up")
            while (await anext(events)).type.name != "PORT_ACTIVE":
                pass
        client.abort()
        server.abort()
        await asyncio.gather(client.wait_closed(), server.wait_closed())


if __name__ == "__main__":
    asyncio.run({"taken": taken, "kept": kept, "down": down}[sys.argv[1]]())
