"""A completion queue and slots for each connection, a common queue, and a pool with one.

    python -m aiordma_softroce --engine qemu --counted -- \\
        python tests/bench/growth_sharing.py

For 10, 100 and 1,000 connections, with the settings of docs/sharing.md: what one pins and keeps
resident, idle and after all were busy; what a message of 64 bytes costs, and how many wake-ups of
both loops it takes, while ten of them or all are busy.  A busy connection has one message under way
at any time, to an echo in another process.  The loops count their wake-ups here, which is a call of
Python for each, in both columns.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import aiordma
from tests.bench.growth import Peer, Row, Wakeups, compare, own_address, peer
from tests.bench.growth_memory import connect_up_to
from tests.bench.growth_peer import memory

SETTINGS = ("own", "queue", "pool")
COUNTS = (10, 100, 1000)
COUNTED = "connections"
FEW = 10
PAYLOAD = bytes(64)
KINDS = ("resident", "pinned")


def name(setting: str, count: int, what: str) -> str:
    """What a figure is called."""
    return f"{setting}, {count:,} connections, {what}"


async def echoes(connection: aiordma.Connection, messages: int) -> None:
    """There and back, one at a time."""
    for _ in range(messages):
        await connection.send(PAYLOAD)
        (await connection.recv()).release()


async def busy(
    connections: list[aiordma.Connection], messages: int, other: Peer, wakeups: Wakeups
) -> tuple[float, float]:
    """Microseconds and wake-ups for a message in one direction; all of them are busy."""
    each = max(5, messages // 2 // len(connections))
    # Everything that is used has been used before, and a pool has given what it gives.
    await asyncio.gather(*(echoes(connection, 2) for connection in connections))
    before = wakeups.count + (await other.ask("wakeups"))["count"]
    begun = time.perf_counter()
    await asyncio.gather(*(echoes(connection, each) for connection in connections))
    took = time.perf_counter() - begun
    count = wakeups.count + (await other.ask("wakeups"))["count"] - before
    sent = 2 * each * len(connections)
    return took / sent * 1e6, count / sent


async def one_setting(
    setting: str, options: argparse.Namespace, counts: list[int], wakeups: Wakeups
) -> list[Row]:
    """All figures of a setting; memory is that of the connecting end."""
    address = options.address or own_address()
    rows: list[Row] = []
    connections: list[aiordma.Connection] = []
    async with peer(address, setting, options.loop, "--echo", "--wakeups") as other:
        await connect_up_to(connections, 1, address, other, setting)
        first = memory()
        for count in counts:
            await connect_up_to(connections, count, address, other, setting)
            more = len(connections) - 1

            def tell(state: str, count: int = count, more: int = more) -> None:
                now = memory()
                for kind in KINDS:
                    kib = (now[kind] - first[kind]) / more / 1024
                    rows.append(Row(name(setting, count, f"{kind} KiB, {state}"), kib, unit="KiB"))

            tell("idle")
            for used in dict.fromkeys((FEW, count)):
                us, times = await busy(connections[:used], options.messages, other, wakeups)
                what = "all busy" if used == count else f"{used} busy"
                rows.append(Row(name(setting, count, f"{what}, us"), us, unit="us"))
                rows.append(Row(name(setting, count, f"{what}, wake-ups"), times))
            tell("after")
        for connection in connections:
            connection.abort()
    return rows


if __name__ == "__main__":
    compare(one_setting, "own queues and slots, or a pool", __doc__, SETTINGS, 1000)
