"""Memory that is registered once: parts are sent, read, written and leased by many connections.

What a lease keeps a peer from depends on the adapter.  Soft-RoCE has windows without bounds,
software iWARP none; windows of type 2, as other adapters have them, are tried on Soft-RoCE, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy
import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, Memory, RemoteRegion
from aiordma.memory.governor import FIRST
from aiordma.verbs import Access, DeviceCapFlags, MemoryWindow, MWType
from tests.device.forking import in_child, outcome, refusals, silences
from tests.device.meeting import Pair, are_alive, paired
from tests.device.oracle import collect, until
from tests.device.shared import attributes, has_atomics
from tests.inside.endpoint import link_of, when_it_waits_for_the_greeting
from tests.inside.memory import domain_for, lend_by, region_of
from tests.inside.verbs import note_regions

pytestmark = pytest.mark.device

READ, WRITE, ATOMIC = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
SIZE = 4 << 20
#: Large messages are fetched when they are asked for.
ASKED_FOR = ConnectionConfig(receive_buffer_size=1)
PAGE = 4096


@asynccontextmanager
async def shared(
    address: str,
    count: int = 1,
    memory: Memory | None = None,
    config: ConnectionConfig | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Memory, list[Pair]]]:
    """A memory of this many servers, with their clients, which have domains of their own.

    `config` is the clients'.
    """
    memory = memory or Memory(SIZE, trusted=READ | WRITE | ATOMIC, **options)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(memory)
        listener = await stack.enter_async_context(aiordma.listen(address, 0, memory=memory))
        pairs = []
        for _ in range(count):
            client = await stack.enter_async_context(
                aiordma.connect(address, listener.port, config=config)
            )
            pairs.append((client, await stack.enter_async_context(await listener.accept())))
        yield memory, pairs


async def read(client: Connection, region: RemoteRegion, size: int = 64) -> bytes:
    into = bytearray(size)
    await client.read(region, into)
    return bytes(into)


async def refused(client: Connection, region: RemoteRegion, *, write: bool = False) -> None:
    """The adapter refuses an access, and the connection of the client is over."""
    access = client.write(region, b"never") if write else client.read(region, bytearray(64))
    with pytest.raises((aiordma.RemoteAccessError, aiordma.ConnectionLostError)):
        await access


def fill(memory: Memory, seed: int = 1) -> bytes:
    data = random.Random(seed).randbytes(SIZE)
    memory.view[:] = data
    return data


# The same bytes, without a registration


@pytest.mark.smoke
async def test_one_registration_for_all(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = note_regions(monkeypatch)
    async with shared(address, 3) as (memory, pairs):
        data = fill(memory)
        own = [region for region in regions if region.length >= SIZE]
        assert own == [region_of(memory)]
        async with AsyncExitStack() as stack:
            for n, (client, server) in enumerate(pairs):
                part = memory[n * PAGE : (n + 1) * PAGE]
                region = await stack.enter_async_context(server.expose(part, read=True))
                assert region.length == PAGE
                assert await read(client, region, PAGE) == data[n * PAGE : (n + 1) * PAGE]
            assert (memory.leases, memory.connections) == (3, 3)
        assert memory.leases == 0
        made = {id(region) for region in regions}
        for client, server in pairs:
            sending = asyncio.create_task(server.send(memory[: 3 << 20]))
            with await client.recv() as message:
                assert message == data[: 3 << 20]
            await sending
        domain = region_of(memory).pd
        later = [each for each in regions if id(each) not in made and each.pd is domain]
        assert not later, "a message was registered"


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 70_000, 262_144, 262_145, 1 << 20, 3_000_001])
async def test_messages_of_every_size(address: str, size: int) -> None:
    async with shared(address) as (memory, [(client, server)]):
        data = fill(memory)
        for imm in (None, 7):
            sending = asyncio.create_task(server.send(memory[13 : 13 + size], imm))
            with await client.recv() as message:
                assert message == data[13 : 13 + size]
                assert message.imm == imm
            await sending
        assert memory.leases == 0
        await are_alive((client, server))


async def test_messages_keep_their_order(address: str) -> None:
    async with shared(address) as (memory, [(client, server)]):
        data = fill(memory)
        large = (300_000, 2 << 20)
        calls = [
            server.send(memory[n : n + large[n % 2]] if n % 3 else data[n : n + large[n % 2]])
            for n in range(12)
        ]
        sending = asyncio.gather(*calls)
        for n in range(12):
            with await client.recv() as message:
                assert message == data[n : n + large[n % 2]], n
        await sending


async def test_reads_and_writes_of_parts(address: str) -> None:
    """The connecting side has the memory: its parts take part in operations as they are."""
    async with (
        Memory(SIZE, trusted=READ | WRITE) as memory,
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port, memory=memory) as client,
        await listener.accept() as server,
    ):
        data = fill(memory)
        theirs = bytearray(1 << 20)
        async with server.expose(theirs, read=True, write=True) as region:
            await client.write(region, memory[: 1 << 20])
            await client.read(region, memory[2 << 20 : 3 << 20])
            assert theirs == data[: 1 << 20] == memory.view[2 << 20 : 3 << 20]
            await client.write(region, memory[100:200], offset=8)
            assert await client.read(region, memory[-16:], offset=8) == 16
            assert memory.view[-16:] == data[100:116]


async def test_large_messages_come_without_a_landing(address: str) -> None:
    """The peers of others could write there."""
    async with shared(address) as (_, [(client, server)]):
        for _ in range(6):
            sending = asyncio.create_task(client.send(bytes(200_000)))
            with await server.recv():
                await sending
        assert not link_of(server).allowed & WRITE
    async with paired(address) as (client, server):  # it is none of a connection by itself
        for _ in range(6):
            sending = asyncio.create_task(client.send(bytes(200_000)))
            with await server.recv():
                await sending
        iwarp = link_of(server).context.is_iwarp
        assert bool(link_of(server).allowed & WRITE) is not iwarp


# Rights


async def test_each_has_its_own_rights(address: str, is_siw: bool) -> None:
    async with shared(address, 2) as (memory, [(reader, one), (writer, other)]):
        data = fill(memory)
        async with (
            one.expose(memory[:PAGE], read=True) as for_reader,
            other.expose(memory[PAGE : 2 * PAGE], read=True, write=True) as for_writer,
        ):
            await writer.write(for_writer, b"written")
            assert await read(writer, for_writer, 7) == b"written"
            with pytest.raises(PermissionError):
                await reader.write(for_reader, b"never")
            forged = RemoteRegion(for_reader.addr, PAGE, for_reader.rkey, READ | WRITE)
            if is_siw:  # the key is that of the memory
                await reader.write(forged, b"after all")
                assert await read(reader, forged, 9) == b"after all"
            else:
                await refused(reader, forged, write=True)
                assert memory.view[:PAGE] == data[:PAGE]
            assert await read(writer, for_writer, 7) == b"written"


async def test_a_lease_ends_by_itself(address: str, is_siw: bool) -> None:
    async with shared(address, 2) as (memory, [(client, one), (other, two)]):
        data = fill(memory)
        lease = one.expose(memory[:PAGE], read=True)
        async with lease as region, two.expose(memory[:PAGE], read=True) as of_other:
            assert lease.view == data[:PAGE]
            assert await read(client, region) == data[:64]
            assert "open, 4096 bytes, read" in repr(lease)
            await lease.revoke()
            with pytest.raises(aiordma.ResourceClosedError):
                _ = lease.view
            assert memory.leases == 1
            region = replace(region, owner=0)  # or the client would refuse it by itself
            if is_siw:
                assert await read(client, region) == data[:64]
            else:
                await refused(client, region)
            assert await read(other, of_other) == data[:64]
            await are_alive((other, two))
        with pytest.raises(RuntimeError, match="used once"):
            await lease.__aenter__()


async def test_a_lease_ends_in_time(address: str) -> None:
    async with (
        shared(address) as (memory, [(_, server)]),
        server.expose(memory[:PAGE], read=True, timeout=0.05) as region,
    ):
        await until(lambda: not memory.leases, 20)
        assert region.length == PAGE


@pytest.mark.parametrize("how", ["peer aborts", "abort", "close"])
async def test_the_end_of_a_connection_ends_its_rights_alone(
    address: str, how: str, is_siw: bool
) -> None:
    async with shared(address, 3) as (memory, [(client, server), (thief, two), (other, three)]):
        data = fill(memory)
        leases = [each.expose(memory[:PAGE], read=True) for each in (server, two, three)]
        old, of_thief, of_other = [await lease.__aenter__() for lease in leases]
        assert await read(client, old) == data[:64]
        if how == "close":
            await server.close()
        else:
            (client if how == "peer aborts" else server).abort()
            await asyncio.gather(client.wait_closed(), server.wait_closed())
        assert leases[0].region is None
        assert memory.leases == 2
        assert await read(thief, of_thief) == data[:64]
        if is_siw:
            assert await read(thief, old) == data[:64]
        else:
            await refused(thief, old)
        assert await read(other, of_other) == data[:64]
        await asyncio.gather(*(lease.revoke() for lease in leases))


async def test_a_large_message_ends_with_its_connection(address: str, is_siw: bool) -> None:
    """Its window, or its region, is gone when the connection is."""
    async with shared(address, 2, config=ASKED_FOR) as (memory, [(_, server), (thief, two)]):
        fill(memory)
        sending = asyncio.create_task(server.send(memory[: 2 << 20]))
        await until(lambda: bool(link_of(server).buffers.lent_parts), 20)
        (lent,) = link_of(server).buffers.lent_parts
        key = RemoteRegion(lent.addr, PAGE, lent.rkey, READ)
        async with two.expose(memory[:PAGE], read=True):
            if not memory.guarded:  # a window is of one queue pair: here the thief has it, too
                assert await read(thief, key) == memory.view[:64]
            server.abort()
            await server.wait_closed()
            with pytest.raises(aiordma.ResourceClosedError):
                await sending
            if not is_siw:
                await refused(thief, key)


async def test_a_key_serves_each_peer_of_the_memory(address: str) -> None:
    """As the documentation of `Memory` says of adapters that do not guard its parts."""
    async with shared(address, 2) as (memory, [(client, server), (other, two)]):
        data = fill(memory)
        async with (
            server.expose(memory[PAGE : 2 * PAGE], read=True) as region,
            two.expose(memory[:1], read=True),
        ):
            assert await read(client, region) == data[PAGE : PAGE + 64]
            if memory.guarded:
                await refused(other, region)
            else:
                assert await read(other, region) == data[PAGE : PAGE + 64]
                await are_alive((other, two))


async def test_windows_of_type_2(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on adapters that are no programs: a key is for the queue pair of its lease alone."""
    if not attributes().device_cap_flags & DeviceCapFlags.MEM_WINDOW_TYPE_2B:
        with pytest.raises(aiordma.NotSupportedError):
            async with shared(address) as (memory, _):
                MemoryWindow(region_of(memory).pd, MWType.TYPE_2)
        return
    lend_by(monkeypatch, MWType.TYPE_2)
    memory = Memory(SIZE)
    async with shared(address, 4, memory) as (_, pairs):
        assert memory.guarded
        data = fill(memory)
        clients, servers = zip(*pairs, strict=True)
        leases = [each.expose(memory[:PAGE], read=True) for each in servers]
        regions = [await lease.__aenter__() for lease in leases]
        for client, region in zip(clients, regions, strict=True):
            assert await read(client, region) == data[:64]
        await refused(clients[0], regions[1])  # it is open, and of another
        assert await read(clients[1], regions[1]) == data[:64]
        await leases[1].revoke()
        await refused(clients[1], regions[1])
        sending = asyncio.create_task(servers[2].send(memory[: 2 << 20]))
        with await clients[2].recv() as message:
            assert message == data[: 2 << 20]
        await sending
        await servers[2].close()
        assert await read(clients[3], regions[3]) == data[:64]
        await refused(clients[3], regions[2])
        for lease in leases:
            await lease.revoke()


async def test_atomics(address: str) -> None:
    async with shared(address, 2) as (memory, [(client, server), (other, two)]):
        if not has_atomics():
            with pytest.raises(aiordma.NotSupportedError, match="no atomic"):
                server.expose(memory[:8], atomic=True)
            return
        async with (
            server.expose(memory[:8], atomic=True) as one,
            two.expose(memory[:8], atomic=True) as same,
        ):
            await asyncio.gather(
                *(c.fetch_add(r, 1) for c, r in ((client, one), (other, same)) for _ in range(20))
            )
        assert int.from_bytes(memory.view[:8], "little") == 40


async def test_without_trust(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened beyond what was asked: messages are registered, leases are refused."""
    regions = note_regions(monkeypatch)
    async with shared(address, 1, Memory(SIZE)) as (memory, [(client, server)]):
        data = fill(memory)
        if memory.guarded:  # a window opens what it is for, and no more
            async with server.expose(memory[:PAGE], read=True) as region:
                assert await read(client, region) == data[:64]
            return
        with pytest.raises(aiordma.NotSupportedError, match="trusted with no rights") as caught:
            server.expose(memory[:PAGE], read=True)
        assert "Memory(..., trusted=" in caught.value.hint
        del regions[:]
        sending = asyncio.create_task(server.send(memory[PAGE : PAGE + (2 << 20)]))
        with await client.recv() as message:
            assert message == data[PAGE : PAGE + (2 << 20)]
        await sending
        assert [each.length for each in regions if each.access == READ] == [2 << 20]
        assert not region_of(memory).access & (READ | WRITE | ATOMIC)
    async with shared(address, 1, Memory(SIZE, trusted=READ)) as (memory, [(_, server)]):
        with pytest.raises(aiordma.NotSupportedError, match="trusted with read"):
            server.expose(memory[:PAGE], read=True, write=True)
        async with server.expose(memory[:PAGE], read=True):
            pass


async def test_iwarp_reads_into_parts_only_where_its_peers_may_write(
    address: str, is_siw: bool
) -> None:
    """To read tells the peer the key of the memory."""
    async with (
        Memory(SIZE) as memory,
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port, memory=memory) as client,
        await listener.accept() as server,
        server.expose(b"0123456789", read=True) as region,
    ):
        if is_siw:
            with pytest.raises(BufferError, match="LOCAL_WRITE"):
                await client.read(region, memory[:10])
        else:
            await client.read(region, memory[:10])
            assert bytes(memory.view[:10]) == b"0123456789"
        await are_alive((client, server))


# Mistakes


async def test_parts_that_overlap(address: str) -> None:
    async with shared(address, 2) as (memory, [(_, one), (_, other)]):
        busy = pytest.raises(aiordma.RdmaOSError, match="lent to another connection")
        async with one.expose(memory[PAGE : 3 * PAGE], write=True):
            for part in (memory[:], memory[2 * PAGE : 4 * PAGE], memory[: PAGE + 1]):
                for rights in ({"read": True}, {"write": True}):
                    with busy:
                        await other.expose(part, **rights).__aenter__()
            for part in (memory[:PAGE], memory[3 * PAGE :]):
                async with other.expose(part, read=True, write=True):
                    pass
            async with one.expose(memory[:], read=True):  # the same peer
                pass
            assert memory.leases == 1
        async with one.expose(memory[:], read=True), other.expose(memory[:], read=True):
            with busy:
                await one.expose(memory[-1:], write=True).__aenter__()
        for _ in range(3):  # the end of a lease frees its part at once
            async with other.expose(memory[:], write=True):
                pass
            async with one.expose(memory[:], write=True):
                pass
    async with (
        shared(address, 2, overlap=True) as (memory, [(_, one), (_, other)]),
        one.expose(memory[:], write=True),
        other.expose(memory[:], write=True),
    ):
        assert memory.leases == 2


async def test_parts_of_other_memory(address: str) -> None:
    async with shared(address) as (memory, [(client, server)]), Memory(PAGE) as foreign:
        with pytest.raises(ValueError, match="make the connection with memory="):
            server.expose(foreign[:], read=True)
        with pytest.raises(ValueError, match="make the connection with memory="):
            client.expose(memory[:], read=True)
        with pytest.raises(ValueError, match="make the connection with memory="):
            await client.send(memory[:])
        own = await server.register(PAGE)
        with pytest.raises(ValueError, match="make the connection with memory="):
            server.expose(own[:], read=True)
        async with server.expose(memory[:PAGE], read=True) as region:
            for part in (foreign[:64], memory[:64]):
                with pytest.raises(ValueError, match="not registered with this connection"):
                    await client.read(region, part)
        await are_alive((client, server))


async def test_parts_that_are_none(address: str) -> None:
    async with shared(address) as (memory, [(_, server)]):
        assert len(memory[:]) == len(memory) == SIZE
        assert (memory[-PAGE:].offset, len(memory[-PAGE:-1])) == (SIZE - PAGE, PAGE - 1)
        assert len(memory[SIZE:]) == len(memory[5:5]) == 0
        for start, stop in ((0, SIZE + 1), (SIZE + 1, None), (-SIZE - 1, 5)):
            with pytest.raises(ValueError, match="not inside a memory"):
                memory[start:stop]
        with pytest.raises(ValueError, match="before it begins"):
            memory[5:4]
        with pytest.raises(ValueError, match="step"):
            memory[::2]
        with pytest.raises(TypeError, match="slices"):
            memory[5]  # type: ignore[index]
        with pytest.raises(ValueError, match="at least one byte"):
            server.expose(memory[5:5], read=True)
        with pytest.raises(ValueError, match="say what the peer may do"):
            server.expose(memory[:5])
        with pytest.raises(TypeError, match="buffer"):
            await server.send([memory[:5]])  # type: ignore[list-item]


async def test_buffers_of_the_program(address: str) -> None:
    array = numpy.arange(SIZE // 8)
    async with shared(address, 1, Memory(array, trusted=READ | WRITE)) as (memory, [pair]):
        client, server = pair
        array[:4] = 7
        async with server.expose(memory[:PAGE], read=True, write=True) as region:
            assert await read(client, region, 32) == array[:4].tobytes()
            await client.write(region, b"\xff" * 8)
            await read(client, region, 8)
        assert array[0] == -1
    constant = bytes(SIZE)
    async with shared(address, 1, Memory(constant, trusted=READ)) as (memory, [pair]):
        assert memory.view.readonly
        with pytest.raises((BufferError, aiordma.NotSupportedError)):
            pair[1].expose(memory[:], write=True)
        async with pair[1].expose(memory[:], read=True) as region:
            assert await read(pair[0], region) == bytes(64)


def test_wrong_arguments() -> None:
    for value, error in (
        ("text", TypeError),
        (0, ValueError),
        (b"", ValueError),
        (None, TypeError),
    ):
        with pytest.raises(error):
            Memory(value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no right of a peer"):
        Memory(1, trusted=Access.LOCAL_WRITE)
    for wrong in ("read", True):
        with pytest.raises(TypeError, match=r"such as Access\.REMOTE_READ"):
            Memory(1, trusted=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device"):
        Memory(1, device=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="overlap"):
        Memory(1, overlap="yes")  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        Memory(b"constant", trusted=WRITE)


async def test_other_devices(address: str) -> None:
    assert address
    with pytest.raises(aiordma.DeviceNotFoundError, match="nowhere0"):
        await Memory(PAGE, device="nowhere0").open()
    (device,) = aiordma.devices()
    async with Memory(PAGE, device=device) as memory:
        assert memory.device == device.name
        with device.open() as context, pytest.raises(OSError, match="registered with") as caught:
            domain_for(memory, context)
        assert caught.value.errno == errno.EXDEV
    await context.wait_closed()


# Life


async def test_before_it_is_open_and_after_its_end(address: str) -> None:
    memory = Memory(PAGE)
    assert (repr(memory), memory.device) == ("<Memory not open>", None)
    uses: Iterable[Any] = (
        lambda: memory[:], lambda: memory.view, lambda: len(memory), lambda: memory.guarded,
        lambda: aiordma.connect(address, 1, memory=memory),
        lambda: aiordma.listen(address, 0, memory=memory),
        lambda: aiordma.serve(print, address, 0, memory=memory),  # type: ignore[arg-type]
    )  # fmt: skip
    for use in uses:
        with pytest.raises(RuntimeError, match="is not open"):
            use()
    await memory.open()
    await memory.open()
    part = memory[:]
    await memory.close()
    await memory.close()
    assert repr(memory) == "<Memory closed>"
    for use in (*uses, lambda: part.mr.view):
        with pytest.raises(aiordma.ResourceClosedError):
            use()
    for again in (memory, Memory(PAGE)):
        await again.close()
        with pytest.raises(aiordma.ResourceClosedError):
            await again.open()
    with pytest.raises(TypeError, match="memory has to be a Memory"):
        aiordma.connect(address, 1, memory=bytearray(5))  # type: ignore[arg-type]


async def test_it_is_not_closed_while_it_is_used(address: str) -> None:
    async with (
        Memory(SIZE, trusted=READ) as memory,
        aiordma.listen(address, 0, memory=memory) as listener,
        aiordma.connect(address, listener.port) as client,
    ):
        server = await listener.accept()
        lease = server.expose(memory[:PAGE], read=True)
        region = await lease.__aenter__()
        with pytest.raises(aiordma.RdmaOSError, match="1 connections share it"):
            await memory.close()
        assert await read(client, region) == bytes(64)  # nothing was done
        server.abort()
        await memory.close()  # waits for its end
        await server.wait_closed()
        assert memory.connections == 0
        await lease.revoke()
        with pytest.raises(ConnectionError):
            await client.recv()


async def test_an_exception_ends_everything(address: str) -> None:
    sends: list[asyncio.Task[None]] = []

    async def program() -> None:
        async with Memory(SIZE, trusted=READ) as memory:
            listener = await aiordma.listen(address, 0, memory=memory)
            clients.append(await aiordma.connect(address, listener.port, config=ASKED_FOR))
            server = await listener.accept()
            region = await server.expose(memory[:PAGE], read=True).__aenter__()
            sends.append(asyncio.create_task(server.send(memory[:])))
            assert await read(clients[0], region) == bytes(64)
            listener.close()
            raise LookupError

    clients: list[Connection] = []
    with pytest.raises(LookupError):
        await program()
    with contextlib.suppress(ConnectionError):
        await clients[0].recv()
    await clients[0].close()
    with pytest.raises(aiordma.ResourceClosedError):
        await asyncio.wait_for(sends[0], 30)


async def test_a_handshake_under_way_is_given_up(address: str, monkeypatch: Any) -> None:
    """The memory is closed while a client has not confirmed yet."""
    held = asyncio.Event()
    memory = Memory(PAGE)
    await memory.open()
    when_it_waits_for_the_greeting(monkeypatch, held.set)
    async with aiordma.listen(address, 0, memory=memory) as listener:
        connecting = asyncio.create_task(aiordma.connect(address, listener.port))
        async with asyncio.timeout(30):
            await held.wait()
            await memory.close()
            (outcome,) = await asyncio.gather(connecting, return_exceptions=True)
            if isinstance(outcome, Connection):  # the client had its answer before
                with pytest.raises(aiordma.ConnectionLostError):
                    await outcome.recv()
                await outcome.close()
            else:
                assert isinstance(outcome, OSError)


async def test_cancellation(address: str) -> None:
    """At each step of an exposure, and of a send: nothing stays lent."""
    async with shared(address) as (memory, [(client, server)]):
        for steps in range(12):
            lease = server.expose(memory[:PAGE], read=True, write=True)
            entering = asyncio.ensure_future(lease.__aenter__())
            for _ in range(steps):
                await asyncio.sleep(0)
            entering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await entering
            await lease.revoke()
            await until(lambda: not memory.leases, 20)
        received = 0
        for steps in range(12):
            sending = asyncio.ensure_future(server.send(memory[: 2 << 20]))
            for _ in range(steps):
                await asyncio.sleep(0)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
        await server.send(b"last")
        while (message := await client.recv()) != b"last":
            assert len(message) == 2 << 20
            message.release()
            received += 1
        assert received <= 12
        await are_alive((client, server))


async def test_many_leases_at_once(address: str) -> None:
    """More than there are places for requests."""
    async with shared(address) as (memory, [(client, server)]), AsyncExitStack() as stack:
        data = fill(memory)
        leases = [server.expose(memory[n * 64 : n * 64 + 64], read=True) for n in range(100)]
        regions = await asyncio.gather(*(stack.enter_async_context(each) for each in leases))
        for n in (0, 50, 99):
            assert await read(client, regions[n]) == data[n * 64 : n * 64 + 64]
        assert memory.leases == 100


async def test_pools_requests_and_the_choice_of_a_server(address: str) -> None:
    async with Memory(SIZE, trusted=READ | WRITE) as memory:

        async def handler(request: aiordma.Request) -> bytes:
            return bytes(request.body)

        async with (
            aiordma.serve_requests(handler, address, 0, memory=memory) as server,
            aiordma.Pool(address, server.port, memory=memory) as pool,
        ):
            assert bytes(await pool.request(b"?")) == b"?"
            assert memory.connections == 2
        async with aiordma.listen(address, 0, memory=memory) as listener:
            assert listener.memory is memory
            requests = listener.requests()
            for choice in (..., None, memory):
                connecting = asyncio.create_task(aiordma.connect(address, listener.port))
                options: dict[str, Any] = {} if choice is ... else {"memory": choice}
                async with await (await anext(requests)).accept(**options) as end, await connecting:
                    assert (link_of(end).shared is memory) is (choice is not None)


async def test_its_bytes_count_with_those_of_connections(address: str) -> None:
    assert address
    before = FIRST.pinned
    async with Memory(SIZE):
        assert FIRST.pinned == before + SIZE
    assert FIRST.pinned == before


async def test_a_forgotten_memory(address: str) -> None:
    assert address
    memory: Any = Memory(PAGE)
    memory.cycle = memory  # for the collector
    await memory.open()
    region = region_of(memory)
    del memory
    with pytest.warns(ResourceWarning, match="unclosed <Memory open, 4096 bytes of"):
        collect()
    await region.wait_closed(20)
    await region.pd.wait_closed(20)


async def test_in_a_forked_child(address: str) -> None:
    async with shared(address) as (memory, [(client, server)]):
        waiting = server.expose(memory[:PAGE], read=True)
        async with server.expose(memory[:PAGE], read=True) as region:

            def child() -> Iterable[str]:
                yield from refusals(memory, waiting)
                yield from silences(memory, waiting)
                for call in (memory.__aenter__, lambda: memory[:], lambda: len(memory)):
                    if (said := outcome(call)) != "ForkedError":
                        yield f"{call}: {said}"

            await in_child(child)
            assert await read(client, region) == bytes(64)


async def test_another_loop(address: str, new_loop: Any) -> None:
    async with Memory(PAGE) as memory:

        def elsewhere() -> None:
            async def program() -> None:
                assert len(memory.view) == len(memory) == PAGE  # bytes are bytes
                for call in (memory.open, memory.close):
                    with pytest.raises(RuntimeError, match="another event loop"):
                        await call()
                with pytest.raises(RuntimeError, match="another event loop"):
                    async with aiordma.listen(address, 0) as listener:
                        await aiordma.connect(address, listener.port, memory=memory)

            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(program())

        await asyncio.to_thread(elsewhere)
