"""Programs that nobody here wrote, as child processes.

What a program says is kept, and becomes part of the failure if its test fails.  Every program is
bounded in time and ended with its block.  None of them tells when it is ready: `until_listening`
knocks until somebody opens.
"""

from __future__ import annotations

import asyncio
import errno
import os
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from aiordma import Connection, ConnectionFailedError, ConnectionLostError, ConnectionRejectedError
from tests.device.shared import IS_SIW
from tests.tcp_ports import listens

T = TypeVar("T")

#: Seconds of a conversation; all of them take far less than one, but mckey, which sleeps for 3.
LIMIT_S = 80.0
_LONGEST_LINE = 1 << 20
#: Nobody listens there, in the words of InfiniBand, of its datagrams, and of iWARP.
_NOBODY = (8, 1, -errno.ECONNREFUSED)


class Program:
    """A program that runs.

    Attributes:
        lines: What it has said so far, standard error included.
        ended: Whether it has closed its output, as it does at its end.
        reader: The task that reads its output, done at its end.
    """

    def __init__(self, process: Process) -> None:
        self.lines: list[str] = []
        self.ended = False
        self._process = process
        self._news = asyncio.Condition()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(line.decode(errors="backslashreplace").rstrip("\n"))
            async with self._news:
                self._news.notify_all()
        self.ended = True
        async with self._news:
            self._news.notify_all()

    async def line(self, prefix: str) -> str:
        """Wait for the first line that begins with `prefix`; returns the rest of it."""
        async with self._news:
            await self._news.wait_for(lambda: self.said(prefix) or self.ended)
        assert self.said(prefix), f"it ended without saying {prefix!r}"
        return self.said(prefix)[0]

    async def finish(self, status: int = 0) -> list[str]:
        """Wait for the end; the exit status has to be `status`.  Returns all that it said."""
        assert await self.over() == status
        return self.lines

    async def over(self) -> int:
        """Wait for the end; returns the exit status."""
        await self.reader
        return await self._process.wait()

    async def write(self, line: str) -> None:
        """Put a line into its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    def kill(self) -> None:
        """End it by SIGKILL: nothing of its own is done any more."""
        self._process.kill()

    def said(self, prefix: str) -> list[str]:
        """The rest of each line that begins with `prefix`."""
        return [line.removeprefix(prefix) for line in self.lines if line.startswith(prefix)]

    def at(self) -> tuple[str, int]:
        """The state of its main thread, and its ticks of processor time so far."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except FileNotFoundError:
            return "gone", 0
        state, *rest = stat.rpartition(") ")[2].split()
        return state, int(rest[10]) + int(rest[11])

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await asyncio.wait([self.reader])


@asynccontextmanager
async def running(*command: str, limit_s: float = LIMIT_S, **env: str) -> AsyncIterator[Program]:
    """Run a program beside the block, which fails if it takes longer than `limit_s`.

    At the end of the block a program that still runs is killed; `Program.finish` waits for it.
    """
    # Into a pipe C programs write by the page, and what a killed one has not written is lost.
    process = await asyncio.create_subprocess_exec(
        "stdbuf", "-oL", *command,
        stdin=PIPE, stdout=PIPE, stderr=STDOUT, limit=_LONGEST_LINE, env={**os.environ, **env},
    )  # fmt: skip
    program = Program(process)
    try:
        async with asyncio.timeout(limit_s):
            yield program
    except BaseException as exc:
        await program._end()
        said = "\n".join(program.lines[-60:]) or "(nothing)"
        exc.add_note(f"{' '.join(command)}: exit status {process.returncode}, it said:\n{said}")
        raise
    finally:
        await program._end()


def attempts(port: int) -> list[int]:
    """Ports for servers of which one is run after the other: a port stays taken a while.

    On a machine with other load a client comes too soon every second time: four were too few.
    """
    return [port + 500 * turn for turn in range(24)]


def spoke_too_soon(exc: ConnectionFailedError) -> bool:
    """Whether the server has spoken first, and its connection was refused for it.

    Software iWARP takes the first word of a server for a bad answer if it comes before the kernel
    has looked at the answer itself, which C programs do not wait for.
    """
    return exc.errno == errno.EINVAL


async def ended_by_peer(connection: Connection) -> None:
    """The peer closes without a word: raw connections know no other end."""
    with pytest.raises(ConnectionLostError, match="closed by the peer"):
        await connection.recv()


async def _until_rdma_listen_is_over(server: Program, port: int) -> None:
    """Software iWARP loses a connection that comes before: docs/surprises.md.

    The call makes a TCP socket listen, which shows, and then takes some microseconds of processor
    time, in which it does not sleep.
    """
    while not listens(port) and not server.ended:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    ticks = server.at()[1] + 2
    while (at := server.at())[0] == "R" and at[1] < ticks:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def until_listening(server: Program, port: int, knock: Callable[[], Awaitable[T]]) -> T:
    """Call `knock` until the server listens on the port; the time limit of `server` bounds it."""
    if IS_SIW:
        await _until_rdma_listen_is_over(server, port)
    while True:
        try:
            return await knock()
        except ConnectionRejectedError as exc:
            if exc.status not in _NOBODY or server.ended:
                raise


def assert_bytes(got: bytes | memoryview, expected: bytes) -> None:
    """Compare, and tell of long bytes only where they differ."""
    got = bytes(got)
    if got == expected:
        return
    pairs = enumerate(zip(got, expected, strict=False))
    first = next((n for n, (a, b) in pairs if a != b), min(len(got), len(expected)))
    here = slice(max(0, first - 8), first + 24)
    lengths = f"{len(got)} and {len(expected)} bytes"
    raise AssertionError(f"{lengths} differ from byte {first}: {got[here]!r}, {expected[here]!r}")
