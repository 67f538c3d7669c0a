"""A peer that reads with every key that it knows: what it finds, and what it does not.

The peer's frames are the test's.  From the first large message on the queue pair allows reads; a
key, and the rights of the memory behind it, are all that is left to keep the peer out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, RemoteRegion
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, KNOWS_CHECKSUMS, RENDEZVOUS, FrameKind, Hello
from aiordma.verbs import Access
from tests.device.meeting import are_alive, paired
from tests.inside.endpoint import link_of

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

COPIED, REGISTERED = 20_000, 300_000
HELLO = Hello(64, 8, 16 * 1024, 1024, flags=KNOWS_CHECKSUMS).pack(56)
RAW = ConnectionConfig(raw=True, slot_size=256, recv_depth=64, send_depth=16)
GREETING = FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0)


class Spy:
    """A peer whose every frame is the test's, and the victim's end."""

    def __init__(self, raw: Connection, victim: Connection) -> None:
        self.raw = raw
        self.victim = victim

    async def offered(self, data: bytes) -> tuple[asyncio.Task[None], RemoteRegion, int]:
        """Have the victim send a large message: its send, the memory, and the exchange."""
        send = asyncio.create_task(self.victim.send(data))
        while (frame := bytes(await self.raw.recv()))[0] != FrameKind.RENDEZVOUS:
            pass
        addr, key, number = RENDEZVOUS.unpack_from(frame, FRAME_SIZE)
        return send, RemoteRegion(addr, len(data), key, Access.REMOTE_READ), number

    async def done(self, number: int) -> None:
        """Say that the message was read."""
        await self.raw.send(FRAME.pack(FrameKind.DONE, 0, 0, 0, number))

    async def read(self, remote: RemoteRegion) -> bytes:
        """What the victim's adapter answers."""
        into = bytearray(remote.length)
        await self.raw.read(remote, into)
        return bytes(into)


@contextlib.asynccontextmanager
async def spying(address: str, listener: aiordma.Listener) -> AsyncIterator[Spy]:
    """A spy, and its victim."""
    raw = await aiordma.connect(address, listener.port, config=RAW, private_data=HELLO)
    await raw.send(GREETING)
    victim = await listener.accept()
    try:
        yield Spy(raw, victim)
    finally:
        raw.abort()
        victim.abort()
        await asyncio.gather(raw.wait_closed(), victim.wait_closed())


async def test_a_buffer_that_stays_registered_has_messages_for_this_peer_only(address: str) -> None:
    """Also after DONE: the message that it has read, and then the next one."""
    async with aiordma.listen(address, 0) as listener, spying(address, listener) as spy:
        first, second = (bytes([number]) * COPIED for number in (1, 2))
        send, remote, number = await spy.offered(first)
        assert await spy.read(remote) == first
        await spy.done(number)
        await send
        assert await spy.read(remote) == first
        send, again, number = await spy.offered(second)
        assert (again.addr, again.rkey) == (remote.addr, remote.rkey), "it was kept"
        assert await spy.read(remote) == second
        await spy.done(number)
        await send


def arriving(victim: Connection) -> RemoteRegion:
    """Slots in which messages of the peer arrive, as if the peer had learned of them."""
    slots = link_of(victim).slots.recv
    return RemoteRegion(slots.addr, 64, slots.lkey, Access.REMOTE_READ)


def leaving(victim: Connection) -> RemoteRegion:
    """Slots from which messages are sent."""
    slots = link_of(victim).slots.send
    return RemoteRegion(slots.addr, 64, slots.lkey, Access.REMOTE_READ)


async def refused(spy: Spy, remote: RemoteRegion) -> None:
    """The read is refused, and ends the spy's connection on both sides."""
    with pytest.raises((aiordma.RemoteAccessError, aiordma.ConnectionLostError)):
        await asyncio.wait_for(spy.read(remote), 20)
    with pytest.raises(aiordma.ConnectionLostError):
        await asyncio.wait_for(spy.victim.recv(), 20)


async def test_the_memory_of_the_program_is_closed_at_done(address: str) -> None:
    data = bytes(range(250)) * (REGISTERED // 250)
    async with (
        paired(address) as bystanders,
        aiordma.listen(address, 0) as listener,
        spying(address, listener) as spy,
    ):
        send, remote, number = await spy.offered(data)
        assert await spy.read(remote) == data
        await spy.done(number)
        await send
        await refused(spy, remote)
        await are_alive(bystanders)


@pytest.mark.parametrize("memory", [arriving, leaving])
async def test_slots_are_not_read(
    address: str, memory: Callable[[Connection], RemoteRegion], *, is_siw: bool
) -> None:
    """They have no remote right; software iWARP enforces few of them: see docs/surprises.md."""
    async with (
        paired(address) as bystanders,
        aiordma.listen(address, 0) as listener,
        spying(address, listener) as spy,
    ):
        send, _, number = await spy.offered(bytes(COPIED))
        await spy.done(number)
        await send
        assert link_of(spy.victim).slots.first.access == Access.LOCAL_WRITE
        if not is_siw:
            await refused(spy, memory(spy.victim))
        await are_alive(bystanders)


async def test_a_key_of_one_connection_opens_nothing_by_way_of_another(address: str) -> None:
    async with (
        aiordma.listen(address, 0) as listener,
        spying(address, listener) as friend,
        spying(address, listener) as spy,
    ):
        send, _, number = await spy.offered(bytes(COPIED))
        await spy.done(number)
        await send  # its queue pair allows reads, too
        send, remote, number = await friend.offered(bytes(COPIED))
        await refused(spy, remote)
        assert await friend.read(remote) == bytes(COPIED)
        await friend.done(number)
        await send
