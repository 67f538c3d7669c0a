"""READs between two hosts whose wire jitters, loses, doubles and reorders."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import pytest

import aiordma
from aiordma import Connection, RemoteRegion
from tests.device.faulty import talking_over
from tests.device.large_wire import FAULTS

pytestmark = [pytest.mark.device, pytest.mark.two_hosts, pytest.mark.usefixtures("wire")]

_COUNT = 400
_SIZE = 16_000
_TASKS = 4
_LIMIT_S = 120.0  # of the guest, for one READ


class Scene:
    """Two hosts, of which one reads memory of the other, while messages go both ways.

    Args:
        registered: Whether the tasks read into memory that they have registered.
    """

    def __init__(self, *, registered: bool) -> None:
        self._registered = registered
        self._left = _COUNT
        self._theirs = os.urandom(_SIZE)
        self.ended: Counter[str] = Counter(right=0, wrong=0)

    async def run(self, fault: str) -> Counter[str]:
        """How many READs over a wire with a fault were `right` and `wrong`, or had which error."""
        while self._left > 0:
            await self._one_connection(fault)
        return self.ended

    async def _one_connection(self, fault: str) -> None:
        async with (
            talking_over(fault) as (client, server),
            server.expose(self._theirs, read=True) as region,
        ):
            await asyncio.gather(*(self._work(client, region) for _ in range(_TASKS)))

    async def _work(self, client: Connection, remote: RemoteRegion) -> None:
        mine = bytearray(_SIZE)
        into: Any = await client.register(mine) if self._registered else mine
        while self._left > 0 and not client.is_closing():
            self._left -= 1
            mine[:] = bytes(_SIZE)
            try:
                async with asyncio.timeout(_LIMIT_S):
                    await client.read(remote, into)
            except aiordma.ConnectionLostError:
                self.ended["lost"] += 1
                break
            except aiordma.ResultLostError:
                self.ended["incomplete"] += 1
            else:
                self.ended["right" if mine == self._theirs else "wrong"] += 1
        if self._registered:
            into.close()


@pytest.mark.parametrize("registered", [False, True], ids=["copied", "registered"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_is_read_is_right_or_an_error(fault: str, registered: bool) -> None:
    ended = await Scene(registered=registered).run(FAULTS[fault])
    print(f"{fault}: {dict(ended)}")
    assert ended["wrong"] == 0
    assert ended["right"] > _COUNT // 4
    if fault == "jitter":
        # The wire is bad enough.
        assert ended["incomplete"] > 0
