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
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from multiprocessing import get_context
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
LIMITS = aiordma.ListenerLimits(handshake_timeout_s=LIMIT_S)
#: Tiny slots: a connection that can do everything and pins almost no memory.
LEAN = aiordma.ConnectionConfig(
    slot_size=256,
    recv_depth=8,
    send_depth=8,
    rendezvous_window=1,
    one_sided_depth=1,
    keepalive_s=LIMIT_S,
    idle_timeout_s=3 * LIMIT_S,
)
ORDINARY = aiordma.ConnectionConfig(
    keepalive_s=LIMIT_S,
    idle_timeout_s=3 * LIMIT_S,
)
#: The same out of a pool, with shared completion queues; enough for 2,000 connections.
SHARED = replace(LEAN, shared_slots=2000 * LEAN.guaranteed)
#: The settings of docs/sharing.md: each for itself, with a common completion queue, and out of a
#: pool for 1,000 connections.
OWN = replace(
    ORDINARY, slot_size=4096, recv_depth=32, send_depth=16, rendezvous_window=2, shared_queues=False
)
QUEUE = replace(OWN, shared_queues=True)
POOL = replace(OWN, shared_slots=1000 * OWN.guaranteed + 1000)
CONFIGS = {
    "lean": LEAN, "ordinary": ORDINARY, "shared": SHARED, "own": OWN, "queue": QUEUE, "pool": POOL
}  # fmt: skip


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


def run(
    loop: str, main: Coroutine[Any, Any, list[Row]], wakeups: Wakeups | None = None
) -> list[Row]:
    """Run on the loop of that name, which counts its wake-ups if asked to."""
    with asyncio.Runner(loop_factory=loop_factory(loop, wakeups)) as runner:
        return runner.run(asyncio.wait_for(main, DEADLINE_S))


class Wakeups:
    """How often a descriptor was readable: `count`.

    One wake-up of a loop that has one busy descriptor, as a process of these benches has.
    """

    def __init__(self) -> None:
        self.count = 0

    def of(self, kind: type[asyncio.AbstractEventLoop]) -> type[asyncio.AbstractEventLoop]:
        """A loop of this kind that counts them."""
        wakeups = self

        class Counting(kind):  # type: ignore[misc, valid-type]
            def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
                def counted() -> None:
                    wakeups.count += 1
                    callback(*args)

                super().add_reader(fd, counted)

        return Counting


def loop_factory(
    name: str, wakeups: Wakeups | None = None
) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes loops of that name, "asyncio" or "uvloop"."""
    kind: type[asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop
    if name == "uvloop":
        import uvloop

        kind = uvloop.Loop
    return kind if wakeups is None else wakeups.of(kind)


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


#: Takes the name of a setting, the numbers of connections and what counts wake-ups.
OneSetting = Callable[[str, argparse.Namespace, list[int], Wakeups], Coroutine[Any, Any, list[Row]]]


def _counted(one: OneSetting, setting: str, options: argparse.Namespace) -> list[Row]:
    counts = sorted(int(count) for count in options.connections.split(","))
    wakeups = Wakeups()
    return run(options.loop, one(setting, options, counts, wakeups), wakeups)


def compare(
    one: OneSetting, title: str, description: str | None, settings: Sequence[str], messages: int
) -> None:
    """What a program does that compares settings: parse, measure, print.

    Each setting has a process of its own: what one leaves of its memory would otherwise be the next
    one's for nothing.

    Args:
        one: Measures a setting.
        title: Of the table.
        description: Of the program.
        settings: Their names.
        messages: How many, for each figure, at least.
    """
    options = parser(description)
    options.add_argument("--connections", default="10,100,1000")
    options.add_argument("--messages", type=int, default=messages, help="for each figure, at least")
    options.add_argument("--settings", default=",".join(settings))
    given = options.parse_args()
    rows: list[Row] = []
    for setting in given.settings.split(","):
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
            rows += process.submit(_counted, one, setting, given).result()
    publish(f"{title}, {given.loop}", rows, given.json)


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
