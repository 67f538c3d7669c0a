"""What the growth benches share: arguments, a peer in another process, tables and JSON.

A row is one figure.  `goal` is what the ratio has to reach (or the figure itself, where it stands
beside nothing); None for figures that are there to be read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import aiordma

HERE = Path(__file__).resolve().parent
# Of the guest's clock, which jumps while the guest waits for files of the host; the whole run is
# limited by softroce's --timeout.
DEADLINE_S = 36_000.0
LIMIT_S = 3600.0
#: Tiny slots: a connection that can do everything and pins almost no memory.
LEAN = aiordma.ConnectionConfig(
    slot_size=256,
    recv_depth=8,
    send_depth=8,
    rendezvous_window=1,
    one_sided_depth=1,
    connect_timeout_s=LIMIT_S,
    handshake_timeout_s=LIMIT_S,
    keepalive_s=LIMIT_S,
    idle_timeout_s=3 * LIMIT_S,
)
ORDINARY = aiordma.ConnectionConfig(
    connect_timeout_s=LIMIT_S,
    handshake_timeout_s=LIMIT_S,
    keepalive_s=LIMIT_S,
    idle_timeout_s=3 * LIMIT_S,
)
#: The same out of a pool, with shared completion queues; enough for 2,000 connections.
SHARED = replace(LEAN, shared_slots=2000 * LEAN.guaranteed)
CONFIGS = {"lean": LEAN, "ordinary": ORDINARY, "shared": SHARED}


@dataclass
class Row:
    """One figure, and what stands beside it."""

    figure: str
    ours: float
    theirs: float | None = None
    goal: float | None = None
    unit: str = ""
    better: str = "lower"
    ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.ratio = None if not self.theirs else self.ours / self.theirs

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        value = self.ours if self.ratio is None else self.ratio
        return value >= self.goal if self.better == "higher" else value <= self.goal


def parser(description: str | None) -> argparse.ArgumentParser:
    """What all of them understand."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--json", metavar="FILE", help="write the rows there; - for here")
    options.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    options.add_argument("--address", help="of the RDMA device (default: its own)")
    return options


def own_address() -> str:
    """IPv4 address of the first device that has one."""
    for device in aiordma.devices():
        with device.open() as context:
            for entry in context.gid_table():
                if entry.gid[:12] == bytes(10) + b"\xff\xff":
                    return ".".join(str(byte) for byte in entry.gid[12:])
    raise SystemExit("no RDMA device with an IPv4 address")


def run(loop: str, main: Coroutine[Any, Any, list[Row]]) -> list[Row]:
    """Run on the loop of that name."""
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(asyncio.wait_for(main, DEADLINE_S))


def publish(title: str, rows: list[Row], where: str | None) -> None:
    """Print the table, or the JSON."""
    versions = {
        "aiordma": aiordma.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cffi": version("cffi"),
    }
    text = json.dumps({"rows": [asdict(row) for row in rows], "versions": versions}, indent=1)
    if where == "-":
        print(text)
        return
    if where:
        Path(where).write_text(text + "\n")
    table = Table("figure", title=title)
    for column in ("ours", "beside", "ratio", "goal"):
        table.add_column(column, justify="right")
    for row in rows:
        sign = ">=" if row.better == "higher" else "<="
        goal = "" if row.goal is None else f"{sign} {row.goal:g}"
        mark = {None: "", True: " reached", False: " missed"}[row.reached]
        table.add_row(
            f"{row.figure} [{row.unit}]" if row.unit else row.figure,
            f"{row.ours:,.2f}",
            "" if row.theirs is None else f"{row.theirs:,.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            goal + mark,
        )
    Console(width=110).print(table)


class Peer:
    """The other end, in a process of its own; see growth_peer."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.port = port

    async def ask(self, command: str) -> dict[str, float]:
        """What the peer answers to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command.encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer has ended")
        answer: dict[str, float] = json.loads(line)
        return answer


@asynccontextmanager
async def peer(address: str, config: str, loop: str, *more: str) -> AsyncIterator[Peer]:
    """Start the other end; it ends with the block."""
    command = (
        sys.executable, str(HERE / "growth_peer.py"), address, config, "--loop", loop, *more,
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the peer did not start")
        yield Peer(process, int(line))
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
