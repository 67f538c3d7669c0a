"""The list of programs that are tried under the switch, and the helpers they share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

__all__ = ["LARGE", "Program", "background", "free_port", "programs", "tried"]

Exchange = Callable[[str], Awaitable[None]]
LARGE = 300_000  # bytes: more than a connection registers

programs: dict[str, Program] = {}


@dataclass(frozen=True, slots=True)
class Program:
    """A server and a client, and what goes between them.

    Attributes:
        name: For the command line.
        server: Packages of the server's side; empty for a few lines of asyncio.
        client: Packages of the client's, likewise.
        does: What is exchanged.
        expected: "RDMA", "TCP" or "UDP".
        why: Where it stays on TCP, the reason, for the table.
        exchange: Talks; raises if the answers are wrong.
    """

    name: str
    server: tuple[str, ...]
    client: tuple[str, ...]
    does: str
    expected: str
    why: str
    exchange: Exchange


def tried(
    does: str,
    *,
    server: tuple[str, ...] = (),
    client: tuple[str, ...] = (),
    expected: str = "RDMA",
    why: str = "",
) -> Callable[[Exchange], Exchange]:
    """Put an exchange on the list."""

    def enter(exchange: Exchange) -> Exchange:
        name = exchange.__name__
        programs[name] = Program(name, server, client, does, expected, why, exchange)
        return exchange

    return enter


_ports = iter(range(7100, 7200))


def free_port() -> int:
    """A port for programs that want to be told one; the guest runs nothing else."""
    return next(_ports)


@contextlib.asynccontextmanager
async def background(
    server: Awaitable[object], ready: Callable[[], bool] | None = None
) -> AsyncIterator[asyncio.Future[object]]:
    """A server that runs until it is canceled, or ends by itself, once it is `ready`."""
    task: asyncio.Future[object] = asyncio.ensure_future(server)
    try:
        while ready is not None and not ready():
            if task.done():
                task.result()
            await asyncio.sleep(0.01)
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
