"""Large messages over a wire that reorders, jitters, loses and doubles, counted by how each ended.

By hand, on two hosts, with a number of messages for each fault:

    python -m aiordma_softroce --engine uml --device rxe --hosts 2 --virtual-time -- \\
        python -m tests.device.large_wire 5000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter

import aiordma
from aiordma import Connection, ConnectionConfig
from tests.device.netem import faults, netem

__all__ = ["FAULTS", "Scene"]

#: What netem does to each packet, on both cards.
FAULTS = {
    "reorder": "delay 5ms reorder 25% 50%",
    "jitter": "delay 2ms 1ms loss 3% duplicate 5%",
    "loss": "delay 1ms loss 2% duplicate 10%",
}
_LIMIT_S = 120.0  # of the guest, for one message
_SMALLEST, _LARGEST = 16 * 1024, 4 << 20
_POOL = 16 << 20


class Scene:
    """Two hosts, and messages that go both ways until enough have come to an end.

    Args:
        check: Whether the connections check large messages.
        seed: Of sizes and contents.
        largest: Bytes of the largest message.
    """

    def __init__(self, *, check: bool, seed: int, largest: int = _LARGEST) -> None:
        self._config = ConnectionConfig(
            rendezvous_threshold=0, check_large=check, close_timeout_s=2
        )
        self._rng = random.Random(seed)
        self._bytes = memoryview(self._rng.randbytes(_POOL))
        self._largest = largest
        self._left = 0
        self._until_wrong = False
        self.ended: Counter[str] = Counter()

    async def run(self, fault: str, count: int, *, until_wrong: bool = False) -> Counter[str]:
        """Have `count` messages sent over a wire with a fault.

        Args:
            fault: Words for netem.
            count: Messages.
            until_wrong: Stop at the first one that was delivered and wrong.

        Returns:
            How many were `right` and `wrong`, and how many were not delivered, by the name of the
            error.
        """
        self._left, self._until_wrong = count, until_wrong
        self.ended = Counter(right=0, wrong=0)
        while self._left > 0:
            await self._one_connection(fault)
        return self.ended

    async def _one_connection(self, fault: str) -> None:
        here, there = os.environ["AIORDMA_SOFTROCE_ADDR"], os.environ["AIORDMA_SOFTROCE_ADDR2"]
        faults()  # connecting is not what is looked at
        async with aiordma.listen(here, 0, config=self._config) as listener:
            client = await aiordma.connect(
                here, listener.port, config=self._config, local_addr=(there, 0)
            )
            server = await listener.accept()
            faults(*fault.split())
            ways = [
                asyncio.create_task(self._one_way(*ends))
                for ends in ((client, server), (server, client))
            ]
            try:
                await asyncio.wait(ways)
                for way in ways:
                    way.result()
            finally:
                faults()
                await asyncio.gather(client.close(), server.close())

    async def _one_way(self, sender: Connection, receiver: Connection) -> None:
        while self._left > 0 and not sender.is_closing() and not receiver.is_closing():
            self._left -= 1
            size = int(_SMALLEST * (self._largest / _SMALLEST) ** self._rng.random())
            start = self._rng.randrange(_POOL - size)
            data = self._bytes[start : start + size]
            sending = asyncio.create_task(sender.send(data))
            try:
                async with asyncio.timeout(_LIMIT_S):
                    message = await receiver.recv()
            except aiordma.RdmaError as exc:
                self.ended[type(exc).__name__] += 1
                sender.abort()
                receiver.abort()
            else:
                right = memoryview(message) == data
                self.ended["right" if right else "wrong"] += 1
                if not right and self._until_wrong:
                    self._left = 0
                del right
                message.release()
            (sent,) = await asyncio.gather(sending, return_exceptions=True)
            if sent is not None and not isinstance(sent, aiordma.RdmaError):
                raise sent


async def _main(count: int, seed: int, largest: int, chosen: list[str]) -> None:
    with netem():
        for fault in chosen:
            for check in (True, False):
                begun = time.monotonic()
                ended = await Scene(check=check, seed=seed, largest=largest).run(
                    FAULTS[fault], count
                )
                took = time.monotonic() - begun
                print(
                    f"{fault}, {'checked' if check else 'not checked'}, seed {seed}: "
                    f"{dict(ended)}, {took:.0f} s of the guest",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="messages for each fault, with and without check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=_LARGEST, help="bytes")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS))
    options = parser.parse_args()
    asyncio.run(_main(options.count, options.seed, options.largest, options.fault or list(FAULTS)))
