"""Atomics beside messages, over a wire that jitters, loses, doubles and reorders, counted by end.

By hand, on two hosts, with a number of atomics for each fault:

    python -m aiordma_softroce --engine uml --device rxe --hosts 2 --virtual-time -- \\
        python -m tests.device.atomics_wire 5000
"""

from __future__ import annotations

import argparse
import array
import asyncio
import time
from collections import Counter

import aiordma
from aiordma import Connection, RemoteRegion
from tests.device.faulty import talking_over
from tests.device.large_wire import FAULTS
from tests.device.netem import netem

__all__ = ["Scene"]

_LIMIT_S = 120.0  # of the guest, for one atomic
_TASKS = 4


class Scene:
    """Two hosts; on one, tasks with an integer each at the other, which no other task changes."""

    def __init__(self) -> None:
        self._left = 0
        self.ended: Counter[str] = Counter()

    async def run(self, fault: str, count: int) -> Counter[str]:
        """Do `count` atomics over a wire with a fault.

        Args:
            fault: Words for netem.
            count: Atomics, additions and swaps alike.

        Returns:
            How many were `right` and `wrong`, and how many had an error, by its name.  Also how
            often an integer was not what so many atomics make of it: `repeated`.
        """
        self._left = count
        self.ended = Counter(right=0, wrong=0)
        while self._left > 0:
            await self._one_connection(fault)
        return self.ended

    async def _one_connection(self, fault: str) -> None:
        counters = array.array("Q", bytes(8 * _TASKS))
        async with (
            talking_over(fault) as (client, server),
            server.expose(counters, atomic=True) as region,
        ):
            await asyncio.gather(*(self._work(client, region, counters, i) for i in range(_TASKS)))

    async def _work(
        self, client: Connection, remote: RemoteRegion, counters: array.array[int], place: int
    ) -> None:
        value = 0
        while self._left > 0 and not client.is_closing():
            self._left -= 1
            adds, offset = self._left % 2, 8 * place
            try:
                async with asyncio.timeout(_LIMIT_S):
                    if adds:
                        old = await client.fetch_add(remote, 1, offset=offset)
                    else:
                        old = await client.compare_swap(remote, value, value + 1, offset=offset)
            except aiordma.RdmaError as exc:
                self.ended[type(exc).__name__] += 1
            else:
                self.ended["right" if old == value else "wrong"] += 1
            # An atomic that has ended has taken place, if at all; this is the memory itself.
            self.ended["repeated"] += not value <= counters[place] <= value + 1
            value = counters[place]


async def _main(count: int, chosen: list[str]) -> None:
    with netem():
        for fault in chosen:
            begun = time.monotonic()
            ended = await Scene().run(FAULTS[fault], count)
            took = time.monotonic() - begun
            print(f"{fault}: {dict(ended)}, {took:.0f} s of the guest", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="atomics for each fault")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS))
    options = parser.parse_args()
    asyncio.run(_main(options.count, options.fault or list(FAULTS)))
