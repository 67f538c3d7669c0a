"""Waiting for completions without the loop's help: by events, by polling, or by polling first."""

from __future__ import annotations

import asyncio
import time

from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.cq import CompletionQueue

__all__ = ["Completions"]

_BATCH = 256
# Time of polling before the loop has a turn: control messages and limits need the loop.
_SPIN_NS = 10_000_000
# Time in which `adaptive` polls before it sleeps.
_ADAPT_NS = 20_000


class Completions:
    """Counts the successful completions of one queue.

    Args:
        cq: The queue, which no other object polls.
        channel: Its channel.
        wait: `event`, `spin` or `adaptive`.
        alone: Whether no other queue is polled by the same loop.
    """

    __slots__ = ("_armed", "_channel", "_cq", "_patience", "_spin_ns")

    def __init__(
        self, cq: CompletionQueue, channel: CompletionChannel, wait: str, *, alone: bool
    ) -> None:
        self._cq = cq
        self._channel = channel
        self._armed = False
        self._spin_ns = _SPIN_NS if alone else 0
        self._patience: int | None = {"event": 0, "adaptive": _ADAPT_NS}.get(wait)

    async def some(self) -> int:
        """The number of completions that have come; at least 1.

        Raises:
            CompletionError: A request has failed.
        """
        poll = self._cq.poll_count
        if count := poll(_BATCH):
            return count
        if self._patience is None:
            return await self._spin()
        if self._patience:
            clock = time.perf_counter_ns
            until = clock() + self._patience
            while clock() < until:
                if count := poll(_BATCH):
                    return count
        return await self._sleep()

    async def _spin(self) -> int:
        poll, clock = self._cq.poll_count, time.perf_counter_ns
        while True:
            until = clock() + self._spin_ns
            while True:
                if count := poll(_BATCH):
                    return count
                if clock() >= until:
                    break
            await asyncio.sleep(0)

    async def _sleep(self) -> int:
        """Arm, look again, sleep.

        An event that has not been fetched yet stands for the next one, too: the wait then ends at
        once, and arming again is left to the next.
        """
        cq = self._cq
        while True:
            if not self._armed:
                cq.req_notify()
                self._armed = True
                if count := cq.poll_count(_BATCH):
                    return count
            await self._channel.get_cq_event()
            cq.ack_events()
            self._armed = False
            if count := cq.poll_count(_BATCH):
                return count
