"""A peer that does wrong harms its own connection, which ends with the error that names it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, RemoteRegion
from aiordma.cm import EventChannel
from aiordma.endpoint.wire import (
    FRAME,
    KNOWS_CHECKSUMS,
    TAKES_BARE,
    TAKES_FRAGMENTS,
    FrameKind,
    Hello,
)
from aiordma.verbs import SGE, Access, QPAttrMask
from tests.device.foreign import Foreign, ForeignListener, foreign_client, foreign_listener
from tests.device.meeting import are_alive
from tests.device.shared import has_atomics
from tests.inside.endpoint import link_of

pytestmark = pytest.mark.device

RAW = ConnectionConfig(raw=True, slot_size=512, recv_depth=4, rnr_retry_count=1)


IS_SIW = os.environ.get("AIORDMA_SOFTROCE_DEVICE") == "siw"
# Software iWARP ends the connection of an access that it refuses, and tells the requester
# nothing: what is awaited is flushed.
REFUSED: type[OSError] = aiordma.ConnectionLostError if IS_SIW else aiordma.RemoteAccessError


def refused(words: str) -> Any:
    """The requester's exception; on iWARP the hint says what may have happened."""
    return pytest.raises(REFUSED, match=None if IS_SIW else words)


@dataclass
class Two:
    """Two connections to one listener: the one that suffers, and a bystander."""

    client: Connection
    server: Connection
    bystander: tuple[Connection, Connection]

    async def ends(self) -> None:
        """The connection is over on both sides, for that reason; the bystander is not."""
        async with asyncio.timeout(20):
            with pytest.raises(aiordma.ConnectionLostError) as lost:
                await self.client.send(b"x")
            if not IS_SIW:
                assert isinstance(lost.value.__cause__, aiordma.RemoteAccessError)
            with pytest.raises(aiordma.ConnectionLostError):
                await self.server.recv()
        await are_alive(self.bystander)


@pytest.fixture
async def two(address: str) -> AsyncIterator[Two]:
    async with (
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port) as client,
        await listener.accept() as server,
        aiordma.connect(address, listener.port) as other_client,
        await listener.accept() as other_server,
    ):
        yield Two(client, server, (other_client, other_server))


async def test_a_wrong_key(two: Two) -> None:
    async with two.server.expose(bytearray(64), read=True) as region:
        wrong = RemoteRegion(region.addr, 64, region.rkey ^ 0x5A00, Access.REMOTE_READ)
        with refused("rkey"):
            await two.client.read(wrong, bytearray(64))
        await two.ends()


def unowned(region: RemoteRegion) -> RemoteRegion:
    """As a peer that is older, or that means no good, knows it: only the adapter refuses it."""
    return RemoteRegion.from_bytes(region.to_bytes(version=1))


async def test_a_lease_that_has_ended(two: Two) -> None:
    async with two.server.expose(bytearray(b"secret"), read=True) as region:
        into = bytearray(6)
        await two.client.read(region, into)
        assert into == b"secret"
    with refused("lease") as error:
        await two.client.read(unowned(region), into)
    assert "refuse" in error.value.hint or "lease" in error.value.hint
    await two.ends()


async def test_a_lease_whose_time_is_up(two: Two) -> None:
    lease = two.server.expose(bytearray(b"secret"), read=True, write=True, timeout=0.05)
    async with lease as region:
        expired = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.05, expired.set_result, None)
        await expired
        await lease.revoke()
        with refused("lease"):
            await two.client.read(unowned(region), bytearray(6))
    await two.ends()


async def test_a_read_on_a_connection_that_allows_none(two: Two) -> None:
    """The memory is registered for reading, the key is right; only no lease is open."""
    region = await two.server.register(64, Access.REMOTE_READ)
    remote = RemoteRegion(region.addr, 64, region.rkey, Access.REMOTE_READ)
    assert not link_of(two.server).allowed & Access.REMOTE_READ
    if IS_SIW:  # which enforces few rights: docs/surprises.md
        return
    with pytest.raises(aiordma.RemoteAccessError, match="does not allow"):
        await two.client.read(remote, bytearray(64))
    await two.ends()


async def test_a_reader_that_only_sends(address: str) -> None:
    """It never takes a message: its peer's sends end in time, and its own still arrive."""
    config = ConnectionConfig(recv_depth=2, stall_timeout_s=2, slot_size=512)
    async with (
        aiordma.listen(address, 0, config=config) as listener,
        aiordma.connect(address, listener.port, config=config) as client,
        await listener.accept() as server,
        aiordma.connect(address, listener.port, config=config) as other_client,
        await listener.accept() as other_server,
    ):
        sent = 0

        async def talk() -> None:
            nonlocal sent
            while True:
                await server.send(b"are you listening?")
                sent += 1
                await client.send(b"I only send")
                with await server.recv() as message:
                    assert bytes(message) == b"I only send"

        with pytest.raises(TimeoutError, match="the peer took nothing"):
            await asyncio.wait_for(talk(), 20)
        assert sent >= config.recv_depth
        with pytest.raises(TimeoutError, match="the peer took nothing"):
            await server.send(bytes(300_000))  # a large one would have to be fetched
        await are_alive((other_client, other_server))
        for _ in range(sent):  # nothing of what was accepted is lost
            with await client.recv() as message:
                assert bytes(message) == b"are you listening?"


async def open_raw(address: str, port: int) -> Connection:
    return await aiordma.connect(address, port, config=RAW)


@pytest.fixture
async def stranger(address: str) -> AsyncIterator[tuple[Connection, Foreign, ForeignListener]]:
    """A raw connection, its peer of the native layer, and where to connect another."""
    async with foreign_listener(address) as listener:
        connecting = asyncio.create_task(open_raw(address, listener.port))
        foreign = await listener.accept()
        client = await connecting
        yield client, foreign, listener
        await client.close()
        foreign.close()


async def ended(client: Connection) -> None:
    await client.flush()
    # Software iWARP may call a message sent, and end the connection for it afterwards.
    await client.recv()


async def flush_fails(client: Connection) -> BaseException | None:
    """What ended the connection."""
    with pytest.raises(aiordma.ConnectionLostError) as lost:
        await asyncio.wait_for(ended(client), 20)
    return lost.value.__cause__


Stranger = tuple[Connection, Foreign, ForeignListener]


async def test_a_peer_that_never_posts_a_receive(stranger: Stranger, address: str) -> None:
    client, _, listener = stranger
    connecting = asyncio.create_task(open_raw(address, listener.port))
    attentive = await listener.accept()
    bystander = await connecting
    await client.send(b"is there a place for this?")  # copied: no error yet
    cause = await flush_fails(client)
    # iWARP has no "receiver not ready": the message ends the connection, without a reason.
    assert isinstance(cause, type(None) if IS_SIW else aiordma.CompletionError), repr(cause)
    receiving = asyncio.create_task(attentive.qp.recv(attentive.mr))
    await asyncio.sleep(0)
    await bystander.send(b"yes")
    assert (await receiving).byte_len == 3
    await bystander.close()
    attentive.close()


async def test_a_message_larger_than_the_receive(stranger: Stranger) -> None:
    client, foreign, _ = stranger
    receiving = asyncio.create_task(foreign.qp.recv(SGE(foreign.mr, 0, 16)))
    await asyncio.sleep(0)
    await client.send(b"seventeen bytes !")
    # Soft-RoCE answers REM_OP_ERR where the standard has REM_INV_REQ_ERR, and reports
    # LOC_QP_OP_ERR where it has LOC_LEN_ERR; the hint of each names the length.
    cause = await flush_fails(client)
    if IS_SIW:
        assert cause is None
    else:
        assert isinstance(cause, aiordma.RemoteAccessError), repr(cause)
        assert re.search("longer than the posted receive|receive was too small", str(cause))
    with pytest.raises(aiordma.CompletionError, match="longer than the posted receive"):
        await receiving
    assert not any(foreign.mr.view)


async def test_an_atomic_on_unaligned_memory(stranger: Stranger) -> None:
    """Refused here, at the call; what a foreign program's device says is in tests/interop."""
    _, foreign, listener = stranger
    result = SGE(foreign.mr, 0, 8)
    if not has_atomics():
        with pytest.raises(aiordma.NotSupportedError, match="atomic"):
            await foreign.qp.fetch_add(result, 8, 1, 1)
        return
    events = EventChannel()
    accepting = asyncio.create_task(listener.accept())
    requester = await foreign_client(events, *listener.address)
    responder = await accepting
    responder.qp.modify(QPAttrMask.ACCESS_FLAGS, qp_access_flags=Access.REMOTE_ATOMIC)
    result = SGE(requester.mr, 0, 8)
    key = responder.mr.rkey
    responder.mr.view[:8] = (41).to_bytes(8, "little")
    for wrong in (
        requester.qp.fetch_add(result, responder.mr.addr + 4, key, 1),
        requester.qp.compare_swap(result, responder.mr.addr + 1, key, 41, 1),
    ):
        with pytest.raises(ValueError, match="multiple of 8"):
            await wrong
    await requester.qp.fetch_add(result, responder.mr.addr, key, 1)
    assert int.from_bytes(responder.mr.view[:8], "little") == 42
    requester.close()
    responder.close()
    events.close()


async def test_a_peer_that_takes_bare_messages_without_having_immediates(
    address: str, is_siw: bool
) -> None:
    """On iWARP the victim's adapter has none either: its messages have their headers."""
    hello = Hello(8, 1, 1024, 1024, flags=KNOWS_CHECKSUMS | TAKES_FRAGMENTS | TAKES_BARE).pack(56)
    config = ConnectionConfig(raw=True, slot_size=1024)
    data = b"bare or not"
    async with (
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port, config=config, private_data=hello) as peer,
    ):
        await peer.send(FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0))
        async with await listener.accept() as victim:
            await victim.send(data)
            while bytes((message := await peer.recv())[:1]) == bytes([FrameKind.CREDIT]):
                message.release()
            assert (
                message
                == (FRAME.pack(FrameKind.DATA, 0, 0, 0, len(data)) if is_siw else b"") + data
            )
            assert (message.imm is None) is is_siw
            message.release()
            victim.abort()
