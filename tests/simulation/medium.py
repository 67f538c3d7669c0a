"""Medium messages, which go through several slots or into a landing of the receiver's.

A run has one connection, and one of `_ACTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable

import aiordma
from aiordma.endpoint.wire import FRAME, KNOWS_LANDINGS, TAKES_FRAGMENTS, FrameKind, Hello
from aiordma.verbs import Access
from tests.inside.simulated import raw_frames
from tests.simulation.common import ADDRESS, BROKEN, count_of, pattern, unless_broken
from tests.simulation.large import begun, pair, turns
from tests.simulation.world import World

__all__ = ["medium"]

_SLOT = 1024
#: Flags of a frame: the message goes on in the next, and the landing is free again.
_MORE, _FREE = 0x02, 0x04


async def _growing(world: World) -> None:
    """Messages of growing sizes to a reader that is slow, and says something now and then."""
    config = aiordma.ConnectionConfig()
    count = 4 + world.draw("messages", 20)
    sizes = [
        world.draw("size", world.one_of("up to", (60_000, 10_000, 250_000, 900_000)))
        for _ in range(count)
    ]
    bodies = [pattern(1 + number, 8 + size) for number, size in enumerate(sizes)]
    if world.once_in("loses", 3):
        # What the adapter sends again has to be what it sent before.
        world.may_delay, world.patience = True, max(world.patience, 60.0)
        world.fabric.fabric_set(b"loss", 10_000 << world.draw("loss", 4))
    async with pair(world, config, config) as (near, far), asyncio.TaskGroup() as tasks:

        async def say(number: int, step: int) -> None:
            for data in bodies[number::step]:
                await near.send(data)
                await turns(world, "between", 10)

        async def hear() -> None:
            async for answer in near:
                answer.release()

        senders = count_of(world, "senders", 2)
        for number in range(senders):
            tasks.create_task(say(number, senders))
        hearing = tasks.create_task(hear())
        got = []
        for _ in range(count):
            await turns(world, "before", world.one_of("turns", (1, 10, 100)))
            if world.once_in("rests", 4):
                await asyncio.sleep(0.01)
            with await world.within(world.patience, "recv()", far.recv()) as message:
                got.append(bytes(message))
            if world.draw("answers", 2):
                await far.send(b"answer")
        assert sorted(got) == sorted(bodies), "a message has other bytes than were sent"
        for number in range(senders):
            mine = [data for data in got if data in bodies[number::senders]]
            assert mine == bodies[number::senders], "messages of a task in another order"
        hearing.cancel()


async def _crowded(world: World) -> None:
    """Messages of several slots each, for which the receiver has not always so many."""
    config = aiordma.ConnectionConfig(
        slot_size=512, recv_depth=4 + world.draw("recv_depth", 8), send_depth=32
    )
    bodies = [pattern(1 + number, 100 + world.draw("size", 3000)) for number in range(20)]
    async with pair(world, config, config) as (near, far), asyncio.TaskGroup() as tasks:
        for data in bodies:
            tasks.create_task(near.send(data, imm=world.one_of("imm", (None, 1))))
        got = []
        for _ in bodies:
            await turns(world, "before", world.one_of("turns", (1, 10, 100)))
            with await world.within(world.patience, "recv()", far.recv()) as message:
                got.append(bytes(message))
        assert sorted(got) == sorted(bodies), "a message has other bytes than were sent"


async def _closing(world: World) -> None:
    """A side that closes drops what comes then, and keeps nobody from reading its last message."""
    config = aiordma.ConnectionConfig(
        slot_size=512, recv_depth=4, send_depth=32, receive_buffer_size=1 << 16
    )
    last = pattern(1, 300_000)
    # Where room comes back late, a message is announced, and read by nobody until the end.
    late = BROKEN if world.may_delay else ()
    async with pair(world, config, config) as (near, far):

        async def hear() -> None:
            with contextlib.suppress(*BROKEN):
                async for message in far:
                    message.release()

        async def close() -> None:
            await asyncio.sleep(world.draw("closes after", 3) / 1000)
            await turns(world, "closes in", 30)
            await far.close()

        async def talk() -> None:
            for _ in range(4 + world.draw("messages", 4)):
                # In all slots that there are: with an immediate it goes into no landing.
                sending = near.send(bytes(1500 + world.draw("size", 400)), imm=1)
                await world.within(world.patience, "send() to a side that closes", sending)
                await asyncio.sleep(0.001)
            with await world.within(world.patience, "recv()", near.recv()) as message:
                assert bytes(message) == last, "a message has other bytes than were sent"

        async with begun(far.send(last)), begun(hear()), begun(close()):
            with contextlib.suppress(*late):
                await talk()


async def _offered(world: World) -> None:
    """A larger landing is offered while a message is written, on a wire that loses packets."""
    config = aiordma.ConnectionConfig(send_depth=64)
    small = [b"%8d" % number for number in range(70)]
    sizes = [10_000, *(world.draw("size", 64_000) for _ in range(8))]
    bodies = [pattern(1 + number, 6000 + size) for number, size in enumerate(sizes)]
    larger = world.draw("larger", 6)
    bodies.insert(2 + larger, pattern(99, 66_000 + world.draw("larger size", 30_000)))
    world.may_delay, world.patience = True, max(world.patience, 60.0)
    async with pair(world, config, config) as (near, far), asyncio.TaskGroup() as tasks:

        async def hear(expected: list[bytes]) -> None:
            for data in expected:
                with await world.within(world.patience, "recv()", far.recv()) as message:
                    assert bytes(message) == data, "a message has other bytes than were sent"
                if len(data) > 8:
                    await far.send(b"answer")

        async def say(what: list[bytes]) -> None:
            for data in what:
                try:
                    await world.within(world.patience, "send()", near.send(data))
                except aiordma.RdmaOSError:  # there was no memory, and nothing was sent
                    await world.within(world.patience, "send()", near.send(data))
                await turns(world, "between", 40)

        async def answers() -> None:
            for _ in bodies:
                (await near.recv()).release()

        # Room for many fragments comes with traffic, and the first landing with the first of them.
        for _ in range(3):
            hearing = tasks.create_task(hear(small))
            await say(small)
            await hearing
        tasks.create_task(answers())
        hearing = tasks.create_task(hear(bodies))
        await say(bodies[:1])
        await asyncio.sleep(0.01)
        world.fabric.fabric_set(b"loss", 20_000 << world.draw("loss", 3))
        if world.draw("no stage", 4):
            # The receiver has memory for a larger landing, and the sender has none for its copies.
            world.fabric.fabric_fault(b"ibv_reg_mr", 1, 1, errno.ENOMEM)
        await say(bodies[1:])
        await hearing


async def _written(world: World) -> None:
    """A peer of another make may write to a landing once, and then again when it is told so."""
    polite = bool(world.draw("polite", 2))
    config = aiordma.ConnectionConfig(slot_size=_SLOT, recv_depth=20, send_depth=8)
    got: list[int] = []
    ends: list[BaseException] = []
    over = asyncio.Event()
    over.set()

    async def handler(connection: aiordma.Connection) -> None:
        over.clear()
        try:
            while True:
                with await connection.recv() as message:
                    got.append(len(message))
                await connection.send(b"taken")
                await asyncio.sleep(0 if polite else 0.1)  # the landing is taken meanwhile
        except BROKEN as error:
            ends.append(error)
        finally:
            over.set()

    async with aiordma.serve(handler, ADDRESS, 0, config=config) as server:
        with raw_frames(), contextlib.suppress(*BROKEN):
            await _write(world, server.port, polite=polite)
        await world.within(world.patience, "the end of the peer", over.wait())
    if not world.may_delay:
        sizes = [1500, 5000, 6000]
        world.check(got == sizes[: len(got)] and (not polite or got == sizes), f"came: {got}")
        rude = any(isinstance(end, aiordma.ProtocolError) for end in ends)
        world.check(rude != polite, f"wrote {polite=}, and the end was {ends}")


async def _write(world: World, port: int, *, polite: bool) -> None:
    """Send a message in fragments, and two that are written to the landing that comes of it."""
    hello = Hello(40, 1, _SLOT, 64, flags=TAKES_FRAGMENTS | KNOWS_LANDINGS).pack(56)
    config = aiordma.ConnectionConfig(raw=True, slot_size=_SLOT, recv_depth=40)
    async with await aiordma.connect(ADDRESS, port, config=config, private_data=hello) as peer:

        async def say(kind: FrameKind, flags: int, left: int, size: int) -> None:
            await peer.send(FRAME.pack(kind, flags, 0, 0, left) + bytes(size))

        async def heard(flags: int) -> bytes:
            """The next frame with one of these flags; PINGs are answered."""
            while True:
                with await peer.recv() as message:
                    frame = bytes(message)
                if frame[0] == FrameKind.PING:
                    await say(FrameKind.PONG, 0, 0, 0)
                if frame[1] & flags:
                    return frame

        await say(FrameKind.CREDIT, 0, 0, 0)
        await say(FrameKind.DATA, _MORE, 1500, 1000)
        await say(FrameKind.DATA, 0, 500, 500)
        async with asyncio.timeout(1 + world.patience):  # there may be no memory for a landing
            offer = await heard(0xF8)
        _, flags, _, key, where = FRAME.unpack_from(offer)
        landing = aiordma.RemoteRegion(where, 65536, key, Access.REMOTE_WRITE)
        for size in (5000, 6000):
            head = FrameKind.DATA << 24 | (flags & 0xF8) << 16
            await peer.write(landing, bytes(size), imm=head)
            await say(FrameKind.CREDIT, 0, 0, 0)  # the write itself wakes nobody
            if polite:
                await heard(_FREE)
        if not polite:
            async with asyncio.timeout(1.0):
                await heard(0)  # until the end


_ACTS: tuple[Callable[[World], Awaitable[None]], ...] = (
    _growing, _crowded, _closing, _offered, _written,
)  # fmt: skip


async def medium(world: World) -> None:
    """One of the acts."""
    world.may_log = "the peer ended the connection", "no more slots", "a write with an immediate"
    with unless_broken(world):
        await world.one_of("act", _ACTS)(world)
