"""A program in which threads cannot be started: thread_starts.py ADDRESS NUMBER [for-ever].

The start of this number is refused, or every one from it on.  The conversation may fail, with an
error of the library's; it leaves nothing behind, and with threads to be had again the next one
works.
"""

from __future__ import annotations

import asyncio
import sys
import threading

import aiordma

LARGE = 300_000
_start = threading.Thread.start


class Refusing:
    """Stands in for `Thread.start`."""

    def __init__(self, number: int, *, for_ever: bool) -> None:
        self.number, self.for_ever = number, for_ever
        self.starts = self.refused = 0

    def __call__(self, thread: threading.Thread) -> None:
        self.starts += 1
        if self.starts == self.number or (self.for_ever and self.starts > self.number):
            self.refused += 1
            msg = "can't start new thread"
            raise RuntimeError(msg)
        _start(thread)


async def serve(conn: aiordma.Connection) -> None:
    """Send back whatever comes."""
    async with conn:
        async for message in conn:
            with message:
                await conn.send(message)


async def conversation(address: str) -> None:
    """Connect, send small and large messages, register and expose memory, close."""
    async with aiordma.listen(address, 0) as listener:
        accepting = asyncio.create_task(listener.accept())
        try:
            async with aiordma.connect(address, listener.port) as conn:
                serving = asyncio.create_task(serve(await accepting))
                try:
                    for data in (b"small", bytes(LARGE)):
                        await conn.send(data)
                        with await conn.recv() as message:
                            assert message == data
                    (await conn.register(1 << 20)).close()
                    async with conn.expose(bytearray(LARGE), read=True):
                        pass
                finally:
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)


async def main(address: str, number: int, *, for_ever: bool) -> None:
    """Talk while threads are refused, and again when they are not."""
    refusing = Refusing(number, for_ever=for_ever)
    setattr(threading.Thread, "start", lambda thread: refusing(thread))  # noqa: B010
    try:
        async with asyncio.timeout(30):
            await conversation(address)
        outcome = "done"
    except (aiordma.RdmaError, OSError) as exc:
        outcome = f"{type(exc).__name__}: {exc}"
    finally:
        setattr(threading.Thread, "start", _start)  # noqa: B010
    async with asyncio.timeout(30):
        await conversation(address)
    print(f"{refusing.refused} of {refusing.starts} starts refused; {outcome}; then it works")


asyncio.run(main(sys.argv[1], int(sys.argv[2]), for_ever=len(sys.argv) > 3))
