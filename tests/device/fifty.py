"""Fifty connections between programs without privileges, with messages of many sizes at once.

Run as: python fifty.py ADDRESS [PORT | pairs | transfers]
Without PORT it is the server, and prints its port.  With `pairs` it is both, of half as many; with
`transfers` it is both ends of one connection, with READs and WRITEs.  At the end it prints one line
of JSON: connections, messages that came, the most bytes that were pinned.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from pathlib import Path

import aiordma
from aiordma._ffi import load_error

USER = 65534
LIMIT_S = 100
CONNECTIONS = 50
#: Bytes of messages, and how many of each connection.
MESSAGES = ((64, 20), (5000, 20), (20_000, 4), (60_000, 3), (200_000, 2), (300_000, 2))
MEMLOCK = 8 << 20

told = {"connections": 0, "messages": 0, "pinned": 0}


def look() -> None:
    """Note how much is pinned."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPin:"):
            told["pinned"] = max(told["pinned"], int(line.split()[1]) << 10)


async def echo(connection: aiordma.Connection) -> None:
    async with connection:
        async for message in connection:
            told["messages"] += 1
            await connection.send(message)
    look()


async def serve(address: str) -> None:
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        print(listener.port, flush=True)
        await accept(listener, CONNECTIONS)


async def accept(listener: aiordma.Listener, number: int) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(echo(await listener.accept()))
            told["connections"] += 1


async def pairs(address: str) -> None:
    number = CONNECTIONS // 2
    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.listen(address, 0) as listener,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(accept(listener, number))
        await talk(address, listener.port, number)


async def ask(client: aiordma.Connection, size: int, count: int) -> None:
    for number in range(count):
        data = bytes([number]) * size
        await client.send(data)
        with await client.recv() as answer:
            told["messages"] += answer == data
    look()


async def talk(address: str, port: int, number: int) -> None:
    clients = [await aiordma.connect(address, port) for _ in range(number)]
    for size, count in MESSAGES:
        await asyncio.gather(*(ask(client, size, count) for client in clients))
    for client in clients:
        await client.close()


async def transfers(address: str) -> None:
    """READs and WRITEs of 400,000 bytes, forty at a time, on one connection."""
    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port) as client,
        await listener.accept() as server,
        server.expose(400_000, read=True, write=True) as remote,
    ):
        told["connections"] = 1
        for call in (client.write, client.read):
            buffers = [bytearray(b"x" * 400_000) for _ in range(40)]
            sizes = await asyncio.gather(*(call(remote, each) for each in buffers))
            told["messages"] += sizes.count(400_000)
            assert all(each == b"x" * 400_000 for each in buffers)
            look()


async def main(address: str, port: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        await talk(address, port, CONNECTIONS)
    told["connections"] = CONNECTIONS


if __name__ == "__main__":
    load_error()  # the libraries, while their files may be read
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK, MEMLOCK))
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    if sys.argv[2:] == ["pairs"]:
        asyncio.run(pairs(sys.argv[1]))
    elif sys.argv[2:] == ["transfers"]:
        asyncio.run(transfers(sys.argv[1]))
    elif len(sys.argv) > 2:
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
    else:
        asyncio.run(serve(sys.argv[1]))
    print(json.dumps(told))
