"""The ends of programs with large messages: `run(SERVE, MEASURE, [ROLE, ADDRESS, PORT, CHECK])`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import uvloop

import aiordma

__all__ = ["run"]

LIMIT_S = 3000


def run(
    serve: Callable[[str, int, aiordma.ConnectionConfig], Awaitable[None]],
    measure: Callable[[str, int, aiordma.ConnectionConfig], Awaitable[dict[str, float]]],
    words: list[str],
) -> int:
    """Run one end, on uvloop; returns the exit status.  The client prints one JSON object.

    Args:
        serve: The server.
        measure: The client; returns its figures.
        words: Those of the command; with CHECK `unchecked` large messages have no checksums.
    """
    role, address, port, check = words
    config = aiordma.ConnectionConfig(check_large=check == "checked")

    async def end() -> None:
        async with asyncio.timeout(LIMIT_S):
            if role == "server":
                await serve(address, int(port), config)
            else:
                print(json.dumps(await measure(address, int(port), config)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(end())
    return 0
