"""Fifty connections between two programs without privileges, with messages of four sizes.

Run as: python fifty.py ADDRESS [PORT]
Without PORT it is the server, and prints its port.  At the end it prints one line of JSON:
connections, messages that came, the most bytes that were pinned.
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

NOBODY = 65534
LIMIT_S = 100
CONNECTIONS = 50
#: Bytes of messages, how many of each connection, and at how many connections at a time: large
#: messages pin as much again.
MESSAGES = ((64, 20, 50), (5000, 20, 50), (20_000, 4, 10), (300_000, 2, 1))
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
        async with asyncio.TaskGroup() as group:
            async for connection in listener:
                told["connections"] += 1
                group.create_task(echo(connection))
                if told["connections"] == CONNECTIONS:
                    break


async def ask(client: aiordma.Connection, size: int, count: int) -> None:
    for number in range(count):
        data = bytes([number]) * size
        await client.send(data)
        with await client.recv() as answer:
            told["messages"] += answer == data
    look()


async def main(address: str, port: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        clients = [await aiordma.connect(address, port) for _ in range(CONNECTIONS)]
        told["connections"] = len(clients)
        for size, count, at_a_time in MESSAGES:
            for first in range(0, CONNECTIONS, at_a_time):
                some = clients[first : first + at_a_time]
                await asyncio.gather(*(ask(client, size, count) for client in some))
        for client in clients:
            await client.close()


if __name__ == "__main__":
    load_error()  # the libraries, while their files may be read
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK, MEMLOCK))
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if len(sys.argv) > 2:
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
    else:
        asyncio.run(serve(sys.argv[1]))
    print(json.dumps(told))
