"""Comms of Dask's distributed, over aiordma and over TCP.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, with OVER "rdma" or "tcp": the scheme of
the address.  All else is the same program.

- `dask-message`, with bytes of a text: a message with it goes there and back.  The figure is half a
  round trip in microseconds.
- `dask-array`, with bytes: an array goes to the server, which has it in memory of its own, and
  answers with a short message.  The figures are MiB/s, microseconds an array, nanoseconds a
  byte, and nanoseconds a byte of the processor time of both processes.

The client prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np
from distributed.comm import core
from distributed.protocol.serialize import Serialize

from tests.bench.plain_peer import LOOPS, Told

__all__ = ["main"]

connect: Any = core.connect
listen: Any = core.listen
to_serialize: Any = Serialize

MESSAGES, WARM_UP = 300, 20
#: Bytes that the arrays have together; there are two at least, and as many before the clock runs.
BYTES = 32 << 20


def used(message: Any) -> dict[str, float]:
    """The processor time of this process, if the message asks for it."""
    return {"cpu_s": time.process_time()} if message.get("asks") else {}


async def serve(scheme: str, address: str, port: int) -> None:
    """Answer one client, until it closes."""
    done = asyncio.Event()

    async def answer(comm: Any) -> None:
        try:
            while True:
                message = await comm.read()
                await comm.write({"op": "got", "text": message.get("text"), **used(message)})
        except OSError:
            await comm.close()
        finally:
            done.set()

    async with listen(f"{scheme}://{address}:{port}", answer):
        await done.wait()


async def messages(comm: Any, size: int) -> Told:
    """Messages there and back."""
    took = 0.0
    for count in (WARM_UP, MESSAGES):
        begun = time.perf_counter()
        for _ in range(count):
            await comm.write({"op": "ask", "text": "x" * size})
            await comm.read()
        took = time.perf_counter() - begun
    return {"us": took / MESSAGES / 2 * 1e6}


async def arrays(comm: Any, size: int) -> Told:
    """Arrays there."""
    array = np.ones(size, "u1")
    count = max(1, BYTES // size)
    took = cpu_s = 0.0
    for _ in range(2):
        cpu_s = -await both_used(comm)
        begun = time.perf_counter()
        for _ in range(count):
            await comm.write({"op": "take", "array": to_serialize(array)})
            await comm.read()
        took = time.perf_counter() - begun
        cpu_s += await both_used(comm)
    sent = count * size
    return {
        "us": took / count * 1e6,
        "MiB/s": sent / took / 2**20,
        "ns/B": took / sent * 1e9,
        "processes ns/B": cpu_s / sent * 1e9,
    }


async def both_used(comm: Any) -> float:
    """The processor time of both processes, in seconds."""
    await comm.write({"op": "ask", "asks": True})
    theirs = (await comm.read())["cpu_s"]
    return float(theirs) + time.process_time()


#: By name.
FORMS = {"dask-message": messages, "dask-array": arrays}


async def use(form: str, size: int, scheme: str, address: str, port: int) -> None:
    """Connect, measure, and print."""
    comm = await connect(f"{scheme}://{address}:{port}")
    print(json.dumps(await FORMS[form](comm, size)))
    await comm.close()


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, number, loop, over, address, port = words
    to = (over, address, int(port))
    end = serve(*to) if role == "server" else use(form, int(number), *to)
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
