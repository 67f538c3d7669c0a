"""Hostile peers: they speak as they like, or not at all, and harm nobody but themselves."""

from __future__ import annotations

import asyncio
import contextlib

import aiordma
from aiordma.endpoint.wire import (
    FRAME,
    NUMBERS_MESSAGES,
    TAKES_BARE,
    TAKES_FRAGMENTS,
    FrameKind,
    Hello,
)
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    connected,
    count_of,
    pattern,
    settings,
    size_of,
    unless_broken,
)
from tests.simulation.world import World

__all__ = ["hostile"]

_SLOT, _STUTTERS = 1024, b"st"
#: Where the number of a message begins in the first byte of its header.
_NUMBER_SHIFT = 4
#: Seconds after which a silent peer is given up (`idle_timeout_s`, up to twice `keepalive_s` more),
#: and what the end takes then.
_SILENT_S = 80.0


async def hostile(world: World) -> None:
    """Peers that break the rules beside one that keeps them, all at one server."""
    world.may_overrun = True
    world.may_lose_events = True  # of what they send without asking for one
    world.may_log = "this side ends the connection with", "the peer ended the connection", "refused"

    async def handler(connection: aiordma.Connection) -> None:
        answers = not world.draw("takes only", 3)
        began, stutters = world.now, False
        try:
            async for message in connection:
                stutters |= bytes(message) == _STUTTERS
                if answers or len(message) >= 8:
                    await connection.send(bytes(message))
                message.release()
        except BROKEN as error:
            text = f"{error!r}, {error.__cause__!r}"
            told = world.may_break or not stutters or "came twice" in text
            world.check(told, f"a message came twice, and the handler was told {text}")
        silent = _SILENT_S + world.patience
        world.check(world.now - began < 2 * silent, "a hostile peer has kept a handler busy")

    def frame() -> bytes:
        """Something like a message: often in good order, with numbers that are anything."""
        kind = world.one_of("kind", [*FrameKind, 0, 255])
        body = bytes(world.draw("body", _SLOT - FRAME.size))
        length = world.one_of("length", (len(body), len(body), 0, 1 << 40, world.draw("any", 5000)))
        credit = world.one_of("credits", (0, 0, 1, 0xFFFF))
        flags = world.one_of("flags", (0, 0, 0, 1, 0x80, 0xFF))
        return FRAME.pack(kind, flags, credit, world.draw("imm", 3), length) + body

    async def rude(port: int) -> None:
        config = aiordma.ConnectionConfig(
            raw=True, slot_size=_SLOT, recv_depth=2 + world.draw("receives", 20), rnr_retry_count=1
        )
        hello = Hello(
            1 + world.draw("says depth", 20),
            world.draw("says window", 3),
            _SLOT,
            1024,
            flags=TAKES_BARE * world.draw("bare", 2)
            | TAKES_FRAGMENTS * world.draw("fragments", 2)
            | NUMBERS_MESSAGES * world.draw("numbers", 2),
        ).pack(56)
        with contextlib.suppress(*BROKEN):
            connection = await aiordma.connect(ADDRESS, port, config=config, private_data=hello)
            try:
                await misbehave(connection)
            finally:
                connection.abort()
                await world.within(20 + world.patience, "close()", connection.close())

    async def stutter(port: int) -> None:
        """Send a message in good order, and the same once more, as an adapter might."""
        config = aiordma.ConnectionConfig(raw=True, slot_size=_SLOT, recv_depth=20)
        hello = Hello(20, 1, _SLOT, 1024, flags=NUMBERS_MESSAGES).pack(56)
        with contextlib.suppress(*BROKEN):
            connection = await aiordma.connect(ADDRESS, port, config=config, private_data=hello)
            try:
                await connection.send(FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0))
                kind = FrameKind.DATA | 1 << _NUMBER_SHIFT
                message = FRAME.pack(kind, 0, 0, 0, len(_STUTTERS)) + _STUTTERS
                for _ in range(2):
                    await connection.send(message)
                    await asyncio.sleep(world.draw("stutters after", 10) / 10_000)
            finally:
                connection.abort()
                await world.within(20 + world.patience, "close()", connection.close())

    async def misbehave(connection: aiordma.Connection) -> None:
        if not world.once_in("mute", 5):
            await connection.send(FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0))
        for _ in range(world.draw("frames", 12)):
            what = world.draw("does", 6)
            if what < 4:
                async with asyncio.timeout(1 + world.patience):
                    await connection.send(frame())
            elif what == 4:
                async with asyncio.timeout(0.01):
                    (await connection.recv()).release()
            else:
                await asyncio.sleep(world.draw("waits", 100) / 10_000)
        if world.once_in("silent", 4):
            await asyncio.sleep(_SILENT_S)

    async def good(number: int, port: int) -> None:
        with unless_broken(world):
            async with connected(world, port) as connection:
                for index in range(count_of(world, "messages", 6)):
                    data = pattern(1 + number << 32 | index, 8 + size_of(world))
                    await world.within(world.patience, "send()", connection.send(data))
                    with await world.within(world.patience, "recv()", connection.recv()) as back:
                        assert bytes(back) == data, "an answer is not what was sent"
                    await asyncio.sleep(world.draw("rests", 50) / 10_000)

    config = settings(world)
    async with (
        aiordma.serve(handler, ADDRESS, 0, config=config) as server,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(count_of(world, "clients", 2)):
            tasks.create_task(good(number, server.port))
        for _ in range(count_of(world, "rude", 3)):
            tasks.create_task(rude(server.port))
        if world.once_in("stutters", 3):
            tasks.create_task(stutter(server.port))
