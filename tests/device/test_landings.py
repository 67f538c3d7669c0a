"""Messages that the peer writes into a landing: order, the end of the landing, memory, attacks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, ListenerLimits, RemoteRegion
from aiordma._core import FRAME_FREE, FRAME_MORE, LANDING_SHIFT, LANDINGS
from aiordma.endpoint.config import LANDING_SIZES
from aiordma.endpoint.large import landings
from aiordma.endpoint.wire import (
    FRAME,
    KNOWS_LANDINGS,
    RENDEZVOUS,
    TAKES_BARE,
    TAKES_FRAGMENTS,
    FrameKind,
    Hello,
)
from aiordma.errors import ConnectionLostError, ProtocolError, errno_error
from aiordma.memory.governor import AHEAD, PROCESS
from aiordma.verbs import Access
from tests.device.meeting import are_alive, meet, paired
from tests.device.oracle import until
from tests.inside.endpoint import large_budget_of, link_of, pinned_beside, state_of

pytestmark = pytest.mark.device

KIB, MIB = 1 << 10, 1 << 20
#: A peer that has landings, takes checksums, and asks for none.
HELLO = Hello(64, 8, 16 * KIB, MIB, flags=TAKES_FRAGMENTS | TAKES_BARE | KNOWS_LANDINGS).pack(56)
RAW = ConnectionConfig(raw=True, slot_size=256, recv_depth=64, send_depth=16, close_timeout_s=0.5)


async def echo(client: Connection, server: Connection, size: int) -> None:
    data = os.urandom(size)
    sending = asyncio.create_task(client.send(data))
    message = await server.recv()
    await sending
    assert bytes(message) == data
    await server.send(message)
    answer = await client.recv()
    assert answer == data


async def warmed(client: Connection, server: Connection, size: int) -> None:
    """Both ends have a landing for such messages, which is free, and nothing is being written."""
    for _ in range(3):
        await echo(client, server, size)
    # The last answer may be here before the confirmation of the write that it answers.
    for end in client, server:
        await end.flush()


@pytest.mark.smoke
@pytest.mark.parametrize("size", [6000, *LANDING_SIZES[1:]])
async def test_a_message_is_a_single_request(address: str, size: int, *, is_siw: bool) -> None:
    """Software iWARP has no immediates: messages go through slots there, or are read."""
    async with paired(address) as (client, server):
        await warmed(client, server, size)
        assert bool(state_of(client).facts()["peer_landing"]) == (not is_siw)
        for sender, receiver in (client, server), (server, client):
            before, read = state_of(sender).sent, state_of(receiver).facts()["bytes_read"]
            data = os.urandom(size)
            await sender.send(data)
            assert bytes(await receiver.recv()) == data
            if not is_siw:
                assert state_of(sender).sent == before + 1
                assert state_of(receiver).facts()["bytes_read"] == read
            await are_alive((receiver, sender))  # its frame says that the landing is free


async def test_a_message_in_a_landing_outlives_its_sender(address: str) -> None:
    """The sender has closed, and the receiver's queue pair is gone."""
    async with paired(address) as (client, server):
        await warmed(client, server, 64 * KIB)
        data = os.urandom(64 * KIB)
        await client.send(data)
        await client.close()
        message = await server.recv()
        with pytest.raises(aiordma.ConnectionEndedError):
            await server.recv()
        await server.close()
        assert bytes(message) == data


async def test_a_change_behind_the_message_does_not_reach_it(address: str) -> None:
    """The next message into the same landing; and the program's own bytes after send()."""
    async with paired(address) as (client, server):
        await warmed(client, server, 64 * KIB)
        data = bytearray(os.urandom(64 * KIB))
        before = bytes(data)
        await client.send(data)
        data[:] = bytes(len(data))
        message = await server.recv()
        await are_alive((server, client))
        await client.send(b"\xff" * 64 * KIB)
        assert await server.recv() == b"\xff" * 64 * KIB
        assert message == before


async def test_without_memory_messages_go_as_before(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise errno_error(errno.ENOMEM, "ibv_reg_mr")

    monkeypatch.setattr(landings, "MemoryRegion", refuse)
    async with paired(address) as (client, server):
        for size in 10_000, 64 * KIB, 200 * KIB:
            await warmed(client, server, size)
        assert (state_of(server).facts()["landing"], state_of(client).facts()["stage_size"]) == (
            0,
            0,
        )
        assert link_of(server).buffers.account.lease(AHEAD, 1)  # nothing is left counted
        monkeypatch.undo()
        await warmed(client, server, 64 * KIB)
        assert bool(state_of(server).facts()["landing"]) == (not link_of(server).context.is_iwarp)


async def test_landings_count_in_the_budgets(address: str, *, is_siw: bool) -> None:
    """A quarter of the listener's budget is for memory that stays registered, with the stages."""
    limits = ListenerLimits(max_large_message_bytes=MIB)
    async with aiordma.listen(address, 0, limits=limits) as listener:
        ends = [await meet(listener, address) for _ in range(4)]
        for client, server in ends:
            await warmed(client, server, 60_000)
        kept = large_budget_of(listener).held(AHEAD)
        assert kept <= MIB // 4
        assert is_siw or kept >= 2 * LANDING_SIZES[1]
        assert is_siw or not all(state_of(server).facts()["landing"] for _, server in ends)
        for end in (end for pair in ends for end in pair):
            await end.close()
        await until(lambda: large_budget_of(listener).held(AHEAD) == 0, 60)
    await until(lambda: PROCESS.held(AHEAD) == 0, 60)


async def test_a_threshold_of_0_is_for_no_landing(address: str) -> None:
    config = ConnectionConfig(rendezvous_threshold=0)
    async with paired(address, config) as (client, server):
        await warmed(client, server, 20_000)
        for end in client, server:
            assert (state_of(end).facts()["landing"], state_of(end).facts()["peer_landing"]) == (
                0,
                0,
            )


async def test_a_connection_without_large_messages_has_none(address: str) -> None:
    async with paired(address) as (client, server):
        await warmed(client, server, client.config.eager_size)
        for end in client, server:
            facts = state_of(end).facts()
            assert (facts["landing"], facts["stage_size"]) == (0, 0)
            assert link_of(end).allowed == 0


# A peer that breaks the rules


@contextlib.asynccontextmanager
async def offered(
    address: str,
) -> AsyncIterator[tuple[Connection, Connection, RemoteRegion]]:
    """A peer whose every frame is the test's, the victim, and the landing that it has offered."""
    # Nothing is fetched ahead.
    config = ConnectionConfig(check_large=False, receive_buffer_size=1, close_timeout_s=0.5)
    async with aiordma.listen(address, 0, config=config) as listener:
        raw = await aiordma.connect(address, listener.port, config=RAW, private_data=HELLO)
        await raw.send(FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0))
        victim = await listener.accept()
        announced = RENDEZVOUS.pack(1 << 40, 7, 1)
        await raw.send(FRAME.pack(FrameKind.RENDEZVOUS, 0, 0, 0, 60_000) + announced)
        while True:
            frame = bytes(await raw.recv())
            kind, flags, _, key, addr = FRAME.unpack_from(frame)
            if kind == FrameKind.PING and flags >> LANDING_SHIFT:
                break
        assert flags >> LANDING_SHIFT == 1
        assert state_of(victim).facts()["asking"]
        size = LANDING_SIZES[1]
        try:
            yield raw, victim, RemoteRegion(addr, size, key, Access.REMOTE_WRITE)
        finally:
            await asyncio.gather(raw.close(), victim.close())


def word(number: int, kind: int = FrameKind.DATA, flags: int = 0) -> int:
    """The immediate of a message in a landing."""
    return kind << 24 | (number << LANDING_SHIFT | flags) << 16


WRONG = {
    "twice": [word(1), word(1)],
    "another landing": [word(2)],
    "no landing": [word(0)],
    "a landing beyond all": [word(LANDINGS + 1)],
    "another kind": [word(1, FrameKind.PING)],
    "more to come": [word(1, flags=FRAME_MORE)],
}


@pytest.mark.one_loop
@pytest.mark.parametrize("words", WRONG.values(), ids=WRONG)
async def test_a_write_that_breaks_the_rules_ends_the_connection(
    address: str, words: list[int], *, is_siw: bool
) -> None:
    if is_siw:
        return  # it has no writes with an immediate
    async with offered(address) as (raw, victim, remote):
        with contextlib.suppress(ConnectionLostError):  # the victim may end it meanwhile
            for number in words:
                await raw.write(remote, b"x" * 100, imm=number)
        await until(lambda: victim.is_closing())
        with pytest.raises(ConnectionLostError) as caught:
            await victim.send(b"?")
        assert isinstance(caught.value.__cause__ or caught.value, ProtocolError)


@pytest.mark.one_loop
async def test_a_write_behind_the_landing_reaches_nothing(address: str, *, is_siw: bool) -> None:
    if is_siw:
        return
    async with offered(address) as (raw, victim, remote):
        beyond = RemoteRegion(remote.addr, 2 * remote.length, remote.rkey, Access.REMOTE_WRITE)
        with pytest.raises(aiordma.RemoteAccessError):
            await raw.write(beyond, bytes(remote.length + 1), imm=word(1))
        await until(lambda: victim.is_closing())


@pytest.mark.one_loop
async def test_what_a_peer_offers_is_bounded(address: str, *, is_siw: bool) -> None:
    """Whatever it offers, and how often, a side makes one stage of each size."""
    if is_siw:
        return
    async with offered(address) as (raw, victim, _):
        made = pinned_beside(victim)
        for number in 1, 2, 3, 31, 0, 1, 2, 3:
            flags = number << LANDING_SHIFT | FRAME_FREE
            await raw.send(FRAME.pack(FrameKind.PING, flags, 0, 7, 1 << 40))
            while (await raw.recv())[0] != FrameKind.PONG:
                pass
        await until(lambda: state_of(victim).facts()["stage_size"] == LANDING_SIZES[-1])
        assert pinned_beside(victim) - made == LANDINGS
