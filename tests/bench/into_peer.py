"""Large messages into an array of numpy that is there: `main([ROLE, ADDRESS, PORT, CHECK])`.

The client sends one buffer again and again; the server receives each message by `recv_into`, into
the same array, and answers with the seconds that all took.  The client prints one JSON object:
`MiB/s`, with checksums or, with CHECK `unchecked`, without.  With CHECK `copied` the server
receives by `recv`, and copies, without checksums.
"""

from __future__ import annotations

import functools
import struct
import sys
import time
from typing import Any

import numpy as np

import aiordma
from tests.bench.large_ends import run

__all__ = ["main"]

SIZE, COUNT = 64 << 20, 2
SECONDS = struct.Struct("d")


async def receive(connection: aiordma.Connection, array: Any, *, copied: bool) -> None:
    """Receive a message into the array."""
    if not copied:
        await connection.recv_into(array)
        return
    with await connection.recv() as message:
        memoryview(array).cast("B")[: len(message)] = memoryview(message)


async def serve(address: str, port: int, config: aiordma.ConnectionConfig, *, copied: bool) -> None:
    """Receive from one client."""
    array = np.ones(SIZE // 8)  # its pages are there
    async with (
        aiordma.listen(address, port, config=config) as listener,
        await listener.accept() as connection,
    ):
        await receive(connection, array, copied=copied)  # small
        # With it comes the memory for large messages.
        await receive(connection, array, copied=copied)
        begun = time.perf_counter()
        # The client makes its first sum only now, inside what is measured.
        await connection.send(b"begin")
        for _ in range(COUNT):
            await receive(connection, array, copied=copied)
        await connection.send(SECONDS.pack(time.perf_counter() - begun))
        if array.any():
            msg = "the array does not have the bytes of the client"
            raise ValueError(msg)
        async for message in connection:
            message.release()


async def measure(address: str, port: int, config: aiordma.ConnectionConfig) -> dict[str, float]:
    """The client's side."""
    data = bytearray(SIZE)
    async with aiordma.connect(address, port, config=config) as connection:
        await connection.send(b"first")
        await connection.send(memoryview(data)[: 2 << 20])
        (await connection.recv()).release()
        for _ in range(COUNT):
            await connection.send(data)
        (seconds,) = SECONDS.unpack(bytes(await connection.recv()))
    return {"MiB/s": COUNT * SIZE / 2**20 / seconds}


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    return run(functools.partial(serve, copied=words[3] == "copied"), measure, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
