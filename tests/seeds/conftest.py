"""The fixtures of the seeds' tests: those of the device tests, and two connected ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.device.conftest import (
    address,
    clean,
    device_is_there,
    is_siw,
    no_lost_events,
    short_traces,
    warm,
)
from tests.seeds.ends import Pair, connected

__all__ = [
    "address", "clean", "device_is_there", "is_siw", "no_lost_events", "pair", "short_traces",
    "warm",
]  # fmt: skip


@pytest.fixture
async def pair(address: str) -> AsyncIterator[Pair]:
    """A client and a server, connected, each on an event channel of its own."""
    async with connected(address) as both:
        yield both
