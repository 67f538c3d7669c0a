"""The two parts of every kind of measurement: a client that measures, and a server that answers."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from aiordma.cli.perf.report import Flow

__all__ = ["ClientSide", "ServerSide", "Stop"]


class Stop:
    """When a measurement ends: after a number of iterations, or of seconds.

    Args:
        count: Iterations, or None.
        seconds: Seconds, or None.

    Attributes:
        most: Iterations at most.
        deadline: Of `time.perf_counter_ns`; set by `begin`.
    """

    __slots__ = ("_seconds", "deadline", "most")

    def __init__(self, count: int | None, seconds: float | None = None) -> None:
        self.most: int = sys.maxsize if count is None else count
        self._seconds = seconds
        self.deadline: int = sys.maxsize

    def begin(self) -> int:
        """The measurement begins now; the time, in nanoseconds."""
        now = time.perf_counter_ns()
        if self._seconds is not None:
            self.deadline = now + int(self._seconds * 1e9)
        return now


class ClientSide(Protocol):
    """The end that measures."""

    async def connect(self, at: dict[str, Any]) -> None:
        """Connect to the address that the server has named."""

    async def meet(self, lent: dict[str, Any]) -> None:
        """Take the names of the server's registered memory, once the client is connected."""

    async def lat(self, size: int, stop: Stop) -> list[int]:
        """Measure latency: when the first iteration began and each ended, in nanoseconds.

        A list: appending to an array takes four times as long as reading the clock.
        """

    async def flow(self, size: int, stop: Stop) -> Flow:
        """Measure bandwidth."""

    async def close(self) -> None:
        """Give everything back."""


class ServerSide(Protocol):
    """The end that answers."""

    async def listen(self, host: str) -> dict[str, Any]:
        """Begin to listen; return the words for the client."""

    async def accept(self) -> dict[str, Any]:
        """Wait for the client's connections; return the words about memory lent to the client."""

    async def start(self, size: int, count: int | None) -> None:
        """Begin to answer; the client begins when this has returned."""

    async def finish(self, count: int) -> None:
        """Wait until everything that the client has sent was received or answered."""

    async def close(self) -> None:
        """Give everything back."""
