"""The fixtures of the seeds' tests: those of the device tests, and two connected ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.device.shared import *  # noqa: F403  # each folder on a device has these
from tests.seeds.ends import Pair, connected


@pytest.fixture
async def pair(address: str) -> AsyncIterator[Pair]:
    """A client and a server, connected, each on an event channel of its own."""
    async with connected(address) as both:
        yield both
