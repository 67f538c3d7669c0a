"""Returns: programs that return at once when they have written; the loop does the rest."""

from __future__ import annotations

import asyncio
import gc
import warnings

import aiordma
from tests.simulation.common import ADDRESS, BROKEN, OTHER, count_of, pattern, unless_broken
from tests.simulation.loop import run_beside
from tests.simulation.world import World

__all__ = ["returns"]


class _Writing(asyncio.Protocol):
    """Tells when the adapter has all that was written."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()

    def pause_writing(self) -> None:
        """Bytes wait."""
        self.free.clear()

    def resume_writing(self) -> None:
        """None waits any more."""
        self.free.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """They will not be taken."""
        self.free.set()


async def returns(world: World) -> None:
    """A server that reads all, and programs that write, and whose loop ends then."""
    got: asyncio.Queue[bytes] = asyncio.Queue()
    # What the adapter of the programs sends may be held back for so many seconds.
    asleep = world.draw("asleep", 30) if world.once_in("is asleep", 3) else 0
    config = aiordma.StreamConfig(
        ack_timeout=22,
        linger_s=90,
        close_timeout_s=90,
    )

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if world.draw("slow", 2):
                await asyncio.sleep(world.draw("reads later", 300) / 1000)
            got.put_nowait(await reader.read(-1))
        except BROKEN as error:
            world.check(world.may_break, f"read() has raised {error!r}")
            got.put_nowait(b"")
        writer.close()

    async def program(port: int, data: bytes) -> None:
        transport, writing = await aiordma.create_connection(
            _Writing, ADDRESS, port, local_addr=(OTHER, 0), config=config
        )
        kept.append(transport)
        if asleep:
            world.fabric.fabric_pause(1, round((world.now + asleep) * 1e9))
        transport.set_write_buffer_limits(0)
        transport.write(data)
        await writing.free.wait()
        # The adapter has all of it, and the loop waits until it has arrived.
        if world.draw("closes", 2):
            transport.close()

    # Those that are not closed arrive, too, and asyncio warns of them as of sockets.
    warnings.filterwarnings("ignore", "unclosed transport", ResourceWarning)
    kept: list[asyncio.Transport] = []
    with unless_broken(world):
        server = await aiordma.start_server(handler, ADDRESS, 0, config=config)
        async with server:
            for number in range(count_of(world, "programs", 2)):
                size = world.one_of("bytes", (100, 10_000, 100_000, 400_000))
                data = pattern(1 + number, size)
                await run_beside(world, program(server.port, data))
                kept.clear()
                gc.collect()  # as with the process, the queue pair ends
                async with asyncio.timeout(1 + asleep + world.patience):
                    arrived = await got.get()
                world.check(
                    arrived == data or world.may_break,
                    f"{len(arrived)} bytes have arrived of {size} that a program has written",
                )
