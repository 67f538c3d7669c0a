"""Programs on a loop with the switch, in a thread of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiordma.streams.policy import When, new_event_loop
from tests.device.oracle import settle

LIMIT_S = 60


class Switched:
    """Runs a coroutine on a loop of its own, which makes connections over RDMA."""

    def __init__(self, uvloop: bool) -> None:
        self._uvloop = uvloop

    async def __call__(self, main: Callable[[], Any], when: When = "device") -> Any:
        """In a thread: the test itself runs on a loop."""

        async def watched() -> Any:
            reports: list[Any] = []
            loop = asyncio.get_running_loop()
            loop.set_debug(True)
            loop.set_exception_handler(lambda _, context: reports.append(context))
            async with asyncio.timeout(LIMIT_S):
                result = await main()
            await settle()
            assert not reports
            return result

        def run() -> Any:
            factory = lambda: new_event_loop(when=when, uvloop=self._uvloop)  # noqa: E731
            with asyncio.Runner(loop_factory=factory) as runner:
                return runner.run(watched())

        return await asyncio.to_thread(run)
