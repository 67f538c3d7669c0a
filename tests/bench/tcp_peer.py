"""asyncio over TCP, for comparison: `main([ROLE, FORM, LOOP, ADDRESS, PORT])`.

Both ends are in one machine, so that Linux sends nothing to a device: what is measured is asyncio
and the kernel's TCP over its loopback path, whatever address is used.  The client prints one JSON
object: half a round trip of 64 bytes in microseconds, and MiB/s in pieces of 64 KiB.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable

import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
TRIPS, WARM_UP, SMALL = 300, 30, 64
PIECES, LARGE = 320, 65_536
LIMIT_S = 120


class End(asyncio.Protocol):
    """Answers within `data_received`, as long as there is something to answer."""

    def __init__(self, *, client: bool) -> None:
        self._client = client
        self._left = WARM_UP + TRIPS
        self._there = 0
        self._mark = 0.0
        self._told: dict[str, float] = {}
        self._writable = asyncio.Event()
        self._writable.set()
        loop = asyncio.get_running_loop()
        self._pumped = loop.create_future()
        self.done: asyncio.Future[dict[str, float]] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        if self._client:
            self._transport.write(bytes(SMALL))

    def data_received(self, data: bytes) -> None:
        self._there += len(data)
        if self._left:
            if self._there >= SMALL:
                self._there -= SMALL
                self._step()
        elif self._client:  # all pieces are there
            self._told["bw"] = PIECES * LARGE / (time.perf_counter() - self._mark) / 2**20
            self._transport.close()
        elif self._there >= PIECES * LARGE:
            self._transport.write(b"!")

    def _step(self) -> None:
        self._left -= 1
        if self._left == TRIPS:
            self._mark = time.perf_counter()
        if self._left or not self._client:
            self._transport.write(bytes(SMALL))
            return
        self._told["lat"] = (time.perf_counter() - self._mark) / TRIPS / 2 * 1e6
        self._task = asyncio.get_running_loop().create_task(self._pump())

    async def _pump(self) -> None:
        self._mark = time.perf_counter()
        piece = bytes(LARGE)
        for _ in range(PIECES):
            self._transport.write(piece)
            await self._writable.wait()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.done.set_result(self._told)
        else:
            self.done.set_exception(exc)


async def by_streams(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, client: bool
) -> dict[str, float]:
    """The same by reader and writer."""
    told = {}
    mark = 0.0
    for number in range(WARM_UP + TRIPS):
        if number == WARM_UP:
            mark = time.perf_counter()
        if client:
            writer.write(bytes(SMALL))
        await reader.readexactly(SMALL)
        if not client:
            writer.write(bytes(SMALL))
    told["lat"] = (time.perf_counter() - mark) / TRIPS / 2 * 1e6
    mark = time.perf_counter()
    piece = bytes(LARGE)
    for _ in range(PIECES):
        if client:
            writer.write(piece)
            await writer.drain()
        else:
            await reader.readexactly(LARGE)
    if client:
        await reader.readexactly(1)
        told["bw"] = PIECES * LARGE / (time.perf_counter() - mark) / 2**20
    else:
        writer.write(b"!")
    writer.close()
    await writer.wait_closed()
    return told


async def serve(form: str, address: str, port: int) -> dict[str, float]:
    """Serve one client."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[dict[str, float]] = loop.create_future()
    if form == "protocol":
        end = End(client=False)
        server = await loop.create_server(lambda: end, address, port)
        done = end.done
    else:

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            done.set_result(await by_streams(reader, writer, client=False))

        server = await asyncio.start_server(talk, address, port)
    async with server:
        return await done


async def measure(form: str, address: str, port: int) -> dict[str, float]:
    """The client's side."""
    if form == "protocol":
        loop = asyncio.get_running_loop()
        _, end = await loop.create_connection(lambda: End(client=True), address, port)
        return await end.done
    return await by_streams(*await asyncio.open_connection(address, port), client=True)


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, loop, address, port = words

    async def end() -> None:
        async with asyncio.timeout(LIMIT_S):
            told = await (measure if role == "client" else serve)(form, address, int(port))
        if role == "client":
            print(json.dumps(told))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
