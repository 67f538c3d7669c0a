"""Noted writes: a note arrives with its data, in order, and beside everything else."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from dataclasses import replace

import pytest

import aiordma
from aiordma import (
    Connection,
    ConnectionConfig,
    ConnectionLostError,
    Memory,
    RemoteRegion,
    ResourceClosedError,
)
from aiordma._core import REFUSED_REVOKED
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.wire import NOTE, FrameKind
from aiordma.verbs import Access
from tests.device.meeting import Pair, are_alive, paired
from tests.device.noting import first, noted, write_and_tell
from tests.device.oracle import until
from tests.device.test_stale_regions import admission
from tests.inside.endpoint import sender_of, state_of

pytestmark = pytest.mark.device

#: A message, one that is written to a landing or sent in fragments, and pieces of 1 MiB.
SIZES = (1, 64, 4096, 65_536, 100_000, 2_500_000)


@pytest.mark.smoke
async def test_a_note_arrives_with_its_data(pair: Pair) -> None:
    client, _server = pair
    theirs = bytearray(max(SIZES) + 10)
    async with noted(pair, theirs) as (lease, remote):
        assert remote.notes
        for number, size in enumerate((*SIZES, *SIZES)):  # the second time by C, where that can
            data = random.Random(number).randbytes(size)
            assert await client.write(remote, data, offset=7, imm=number) == size
            note = await first(lease)
            assert (note.imm, note.offset, note.length) == (number, 7, size)
            assert note.data == data
        async with await client.register(4096) as region:
            region.view[:4] = b"here"
            await client.write(remote[3:], region, imm=0xFFFFFFFF)
            note = await first(lease)
            assert (note.imm, note.offset, note.length) == (0xFFFFFFFF, 3, 4096)
            assert bytes(note.data[:4]) == b"here"
    await are_alive(pair)


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("memory", [4096, bytearray(4096)], ids=["fresh", "own"])
async def test_notes_that_have_arrived_outlast_the_connection(
    pair: Pair, memory: int | bytearray, how: str
) -> None:
    """With their bytes, until the block of the lease is left."""
    client, server = pair
    async with noted(pair, memory) as (lease, remote):
        for number in range(10):
            await client.write(remote, b"%02d" % number, offset=2 * number, imm=number)
        await client.flush()
        if how == "close":
            await client.close()
        else:
            client.abort()
        await server.wait_closed()
        found = []
        with contextlib.suppress(ConnectionLostError):
            async for note in lease.notes():
                found.append((note.imm, bytes(note.data)))
        assert found == [(number, b"%02d" % number) for number in range(10)]
        assert bytes(lease.view[:4]) == b"0001"
    with pytest.raises(ResourceClosedError):
        _ = note.data


async def test_writes_without_a_number_and_numbers_without_data(pair: Pair) -> None:
    client, _server = pair
    async with noted(pair, bytearray(64)) as (lease, remote):
        await client.write(remote, b"silent")
        await client.write(remote, b"", offset=64, imm=5)
        note = await first(lease)
        assert (note.imm, note.offset, note.length, bytes(note.data)) == (5, 64, 0, b"")
        with pytest.raises(ValueError, match="not inside"):
            await client.write(remote, b"", offset=65, imm=5)
        for wrong in (-1, 1 << 32):
            with pytest.raises(ValueError, match="imm"):
                await client.write(remote, b"x", imm=wrong)
    await are_alive(pair)


async def test_many_notes_of_many_tasks(pair: Pair) -> None:
    await write_and_tell(pair)


async def test_notes_pass_messages_that_nobody_receives(pair: Pair) -> None:
    client, server = pair
    async with noted(pair, bytearray(64)) as (lease, remote):
        for number in range(2):
            await client.send(b"%d" % number)
            await client.write(remote, b"%d" % number, imm=number)
        for number in range(2):
            assert (await first(lease)).imm == number
        for number in range(2):
            assert bytes(await server.recv()) == b"%d" % number


async def test_notes_beside_requests(pair: Pair) -> None:
    client, server = pair

    async def serve() -> None:
        async for request in server.requests():
            await request.reply(bytes(request.body)[::-1])

    async with asyncio.TaskGroup() as group:
        async with noted(pair, bytearray(64)) as (lease, remote):
            serving = group.create_task(serve())
            for number in range(50):
                with await client.request(b"ab") as answer:
                    assert bytes(answer) == b"ba"
                await client.write(remote, b"%02d" % number, imm=number)
                note = await first(lease)
                assert (note.imm, bytes(note.data)) == (number, b"%02d" % number)
            plain = RemoteRegion(remote.addr, remote.length, remote.rkey, remote.rights)
            with pytest.raises(RuntimeError, match="without notes"):
                await client.write(plain, b"x", imm=1)
        await client.close()
        await serving


async def test_a_program_that_reads_no_notes_slows_its_peer(address: str) -> None:
    config = ConnectionConfig(recv_depth=4)
    async with paired(address, config) as pair:
        client, server = pair
        async with noted(pair, bytearray(64)) as (lease, remote):

            async def write() -> None:
                for number in range(40):
                    await client.write(remote, b"x", imm=number)

            writing = asyncio.create_task(write())
            await until(lambda: not state_of(client).credits and state_of(client).queued > 0)
            sending = asyncio.create_task(client.send(b"behind"))
            await until(lambda: state_of(client).queued == 2)
            assert [(await first(lease)).imm for _ in range(40)] == list(range(40))
            await writing
            await sending
            assert bytes(await server.recv()) == b"behind"


async def test_the_end_of_a_lease_ends_its_notes(address: str) -> None:
    """What was not read is dropped, and the peer gets its credits back."""
    async with paired(address, ConnectionConfig(recv_depth=4)) as pair:
        client, _server = pair
        async with noted(pair, bytearray(64)) as (lease, remote):
            waiting = asyncio.create_task(first(lease))
            await client.write(remote, b"x", imm=1)
            assert (await waiting).imm == 1
            for number in range(3):
                await client.write(remote, b"x", imm=number)
            assert (await first(lease)).imm == 0
        assert [note async for note in lease.notes()] == []
        for _ in range(20):
            await are_alive(pair)
        async with noted(pair, bytearray(64)) as (lease, remote):
            ended = asyncio.create_task(anext(lease.notes(), None))
            await asyncio.sleep(0)
            await lease.revoke()
            assert await ended is None


async def test_each_lease_has_its_notes(pair: Pair) -> None:
    client, _server = pair
    async with (
        noted(pair, bytearray(64)) as (one, remote_of_one),
        noted(pair, bytearray(64)) as (two, remote_of_two),
    ):
        for number in range(10):
            await client.write(remote_of_two, b"x", imm=number)
            await client.write(remote_of_one, b"x", offset=number, imm=100 + number)
        assert [(await first(one)).imm for _ in range(10)] == list(range(100, 110))
        assert [(await first(two)).imm for _ in range(10)] == list(range(10))


async def test_a_canceled_wait_loses_no_note(pair: Pair) -> None:
    client, _server = pair
    async with noted(pair, bytearray(64)) as (lease, remote):
        for number in range(20):
            waiting = asyncio.create_task(anext(lease.notes()))
            await asyncio.sleep(0)
            writing = asyncio.create_task(client.write(remote, b"x", imm=number))
            if number % 2:
                await writing
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert (await waiting).imm == number
                continue
            await writing
            assert (await first(lease)).imm == number


async def test_one_reader(pair: Pair) -> None:
    client, _server = pair
    async with noted(pair, bytearray(64)) as (lease, remote):
        waiting = asyncio.create_task(anext(lease.notes()))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(lease.notes())
        await client.write(remote, b"x", imm=3)
        assert (await waiting).imm == 3


async def test_what_is_refused(pair: Pair) -> None:
    client, server = pair
    with pytest.raises(ValueError, match="write=True"):
        server.expose(bytearray(8), read=True, notes=True)
    with pytest.raises(ValueError, match="notes=True"):
        server.expose(bytearray(8), write=True).notes()
    lease = server.expose(bytearray(8), write=True, notes=True)
    with pytest.raises(aiordma.ResourceClosedError, match="not open"):
        await anext(lease.notes())
    async with lease as region:
        assert RemoteRegion.from_bytes(region.to_bytes()) == region
        assert region[2:4].notes
    async with server.expose(bytearray(8), write=True) as region:
        assert not region.notes
        await client.write(region, b"x", imm=9)
        assert (await server.recv()).imm == 9


@pytest.mark.parametrize("how", ["close", "send_eof", "abort"])
async def test_the_peer_goes(pair: Pair, how: str) -> None:
    """Notes that have arrived are read first."""
    client, server = pair
    lost = how == "abort"
    async with noted(pair, bytearray(64)) as (lease, remote):
        for number in range(3):
            await client.write(remote, b"x", imm=number)
        if how == "abort":
            client.abort()
        elif how == "close":
            await client.close()
        else:
            await client.send_eof()
        if lost:
            await until(server.is_closing)
        assert [(await first(lease)).imm for _ in range(3)] == [0, 1, 2]
        with pytest.raises(aiordma.ConnectionLostError if lost else StopAsyncIteration):
            await first(lease)


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("by_peer", [True, False])
async def test_the_end_reaches_a_reader_that_waits(pair: Pair, how: str, by_peer: bool) -> None:
    client, server = pair
    async with noted(pair, bytearray(64)) as (lease, _):
        waiting = asyncio.create_task(anext(lease.notes(), "over"))
        await asyncio.sleep(0)
        end: Connection = client if by_peer else server
        if how == "abort":
            end.abort()
        else:
            await end.close()
        if by_peer and how == "abort":
            with pytest.raises(aiordma.ConnectionLostError):
                await waiting
        else:
            assert await waiting == "over"


async def test_a_write_to_memory_that_is_withdrawn_sends_no_note(pair: Pair) -> None:
    """Whether C posts it or Python; and the connection goes on."""
    client, server = pair
    async with noted(pair, bytearray(8192)) as (lease, remote):
        await client.write(remote, b"x", imm=1)
        await first(lease)
    await until(lambda: admission(client, remote) == REFUSED_REVOKED)
    before = client.stats
    async with await client.register(64) as mine:
        for data in (b"x", b"", mine, bytearray(8192)):
            with pytest.raises(aiordma.StaleRegionError, match="ended the exposure"):
                await client.write(remote, data, imm=2)
    assert client.stats == before
    assert [note async for note in lease.notes()] == []
    await are_alive(pair)
    assert state_of(server).facts()["unused"] == state_of(client).credits


async def test_a_write_that_is_refused_sends_no_note(pair: Pair, is_siw: bool) -> None:
    """The lease has ended: the write breaks the connection, and nothing is told."""
    client, _server = pair
    async with noted(pair, bytearray(64)) as (lease, remote):
        await client.write(remote, b"x", imm=1)
        await first(lease)
    remote = replace(remote, owner=0)  # or this side would refuse it by itself
    if is_siw:  # which may report success before the peer has looked
        with contextlib.suppress(aiordma.ConnectionLostError):
            await client.write(remote, b"x", imm=2)
    else:
        with pytest.raises(aiordma.RemoteAccessError):
            await client.write(remote, b"x", imm=2)
    for end in pair:
        with pytest.raises(aiordma.ConnectionLostError):
            await end.recv()
    assert [note async for note in lease.notes()] == []
    await until(lambda: state_of(client).facts()["operating"] == 0)


async def test_leases_of_one_memory(address: str) -> None:
    """Where the adapter has no windows, they share a key."""
    async with (
        Memory(8192, trusted=Access.REMOTE_READ | Access.REMOTE_WRITE) as memory,
        aiordma.listen(address, 0, memory=memory) as listener,
        aiordma.connect(address, listener.port) as client,
        await listener.accept() as server,
    ):
        pair = client, server
        async with (
            noted(pair, memory[0:64]) as (one, remote_of_one),
            noted(pair, memory[4096:4160]) as (two, remote_of_two),
        ):
            for number in range(5):
                await client.write(remote_of_two, b"two", offset=3 * number, imm=number)
                await client.write(remote_of_one, b"one", offset=3 * number, imm=100 + number)
            for number in range(5):
                note = await first(one)
                assert (note.imm, note.offset, bytes(note.data)) == (
                    100 + number,
                    3 * number,
                    b"one",
                )
                note = await first(two)
                assert (note.imm, note.offset, bytes(note.data)) == (number, 3 * number, b"two")


async def test_slots_of_a_pool(address: str) -> None:
    """Slots come and go while notes are under way, and Python gets what C leaves to it."""
    config = ConnectionConfig(shared_slots=120, slot_size=1024, recv_depth=32, send_depth=16)
    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(aiordma.listen(address, 0, config=config))
        pairs = []
        for _ in range(4):
            client = await stack.enter_async_context(
                aiordma.connect(address, listener.port, config=config)
            )
            pairs.append((client, await stack.enter_async_context(await listener.accept())))
        leases = [await stack.enter_async_context(noted(each, bytearray(64))) for each in pairs]

        async def write(client: Connection, remote: RemoteRegion, writer: int) -> None:
            for number in range(writer, 400, 8):
                await client.write(remote, b"x", imm=number)

        async def read(lease: Lease) -> None:
            found = [(await first(lease)).imm for _ in range(400)]
            assert sorted(found) == list(range(400))

        for _ in range(2):  # all at once, and then one after the other
            async with asyncio.TaskGroup() as group:
                for (client, _server), (lease, remote) in zip(pairs, leases, strict=True):
                    group.create_task(read(lease))
                    for writer in range(8):
                        group.create_task(write(client, remote, writer))
            for each in pairs:
                await are_alive(each)


async def hostile(pair: Pair, argument: int, body: bytes, imm: int | None = 5) -> None:
    """The client sends a NOTE as no library does."""
    client, _ = pair
    assert state_of(client).send_in_turn(FrameKind.NOTE, body, argument, imm) == 0


async def test_a_note_of_other_memory_is_dropped(pair: Pair) -> None:
    """It may be late: its lease has just ended."""
    client, _server = pair
    async with noted(pair, bytearray(64)) as (lease, remote):
        for addr, key, length in (
            (remote.addr + 60, remote.rkey, 5),
            (remote.addr - 1, remote.rkey, 1),
            (remote.addr, remote.rkey, 65),
            (remote.addr, remote.rkey, 1 << 62),
            (0, remote.rkey, 0),
            (remote.addr, remote.rkey ^ 0x100, 1),
        ):
            for _ in range(20):  # more than there are credits: each comes back
                await sender_of(client).note(key, addr, length, 6)
        await client.write(remote, b"x", imm=1)
        assert (await first(lease)).imm == 1
    await are_alive(pair)
    await sender_of(client).note(remote.rkey, remote.addr, 1, 6)  # the lease has ended
    await are_alive(pair)


@pytest.mark.parametrize(
    ("argument", "body", "imm"),
    [
        (0, NOTE.pack(1, 0)[:-1], 5),
        (0, NOTE.pack(1, 0) + b"x", 5),
        (0, b"", 5),
        (0, NOTE.pack(1, 0), None),
        ((1 << 64) - 1, NOTE.pack(1, 1), 5),
        (5, NOTE.pack(1, (1 << 64) - 5), 5),
    ],
)
async def test_a_note_of_another_form_is_a_violation(
    pair: Pair, argument: int, body: bytes, imm: int | None
) -> None:
    client, server = pair
    async with noted(pair, bytearray(64)) as (lease, _):
        await hostile(pair, argument, body, imm)
        with pytest.raises(aiordma.ProtocolError, match="note"):
            await first(lease)
        with pytest.raises(aiordma.ProtocolError):
            await server.recv()
        with pytest.raises(aiordma.ConnectionLostError):
            await client.recv()


async def test_a_note_that_nobody_has_asked_for_is_a_violation(pair: Pair) -> None:
    client, server = pair
    async with server.expose(bytearray(64), write=True) as region:
        await sender_of(client).note(region.rkey, region.addr, 1, 6)
        with pytest.raises(aiordma.ProtocolError, match="kind 8"):
            await server.recv()


async def test_a_raw_connection_has_no_notes(address: str) -> None:
    async with paired(address, ConnectionConfig(raw=True)) as (_, server):
        with pytest.raises(aiordma.NotSupportedError, match="raw"):
            server.expose(bytearray(64), write=True, notes=True)


KILLED = """
import asyncio, os, signal, sys
import aiordma

async def main():
    async with aiordma.connect(sys.argv[1], int(sys.argv[2])) as conn:
        remote = aiordma.RemoteRegion.from_bytes(bytes(await conn.recv()))
        for number in range(20):
            await conn.write(remote, number.to_bytes(2, "big") * 4, offset=8 * number, imm=number)
        await conn.flush()  # the notes have arrived, too
        tasks = [asyncio.ensure_future(conn.write(remote, b"y", imm=99)) for _ in range(30)]
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_writer_that_is_killed(address: str) -> None:
    """What it has written and told is read, and then its end raises."""
    config = ConnectionConfig(idle_timeout_s=4, keepalive_s=1)
    async with aiordma.listen(address, 0, config=config) as listener:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, address, str(listener.port)
        )
        server = await listener.accept()
        lease = server.expose(bytearray(256), write=True, notes=True)
        async with lease as region:
            await server.send(region.to_bytes())
            found = []

            async def read() -> None:
                async for note in lease.notes():
                    found.append(note.imm)
                    if note.imm < 20:
                        assert note.data == note.imm.to_bytes(2, "big") * 4

            with pytest.raises(aiordma.ConnectionLostError):
                await read()
        assert found[:20] == list(range(20))
        assert set(found[20:]) <= {99}
        assert await child.wait() == -signal.SIGKILL
        server.abort()
        await server.wait_closed()
