"""The high-level Connection and foreign peers that use its memory: rping and pyverbs.

`raw=True` leaves the messages as they are.  A `RemoteRegion` can be made of what a foreign peer
says, and the one that `expose` gives has the numbers that a foreign peer wants to hear.
"""

from __future__ import annotations

import pytest

import aiordma
from aiordma import (
    Connection,
    ConnectionConfig,
    Message,
    NotSupportedError,
    RemoteRegion,
)
from aiordma.verbs import Access
from tests.interop import conversation as c
from tests.interop.program import assert_bytes, ended_by_peer, running, until_listening
from tests.interop.pyverbs_program import DONE, pyverbs, trimmed
from tests.interop.rping import (
    COUNT,
    INFO,
    SIZES,
    assert_shown,
    ended_well,
    ping,
    rping_client,
    rping_server,
)

RAW = ConnectionConfig(raw=True, slot_size=256, recv_depth=4, send_depth=4)
BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE


def described(message: Message) -> RemoteRegion:
    """The memory that a message of rping, or of pyverbs_peer.py, names."""
    with message:
        addr, rkey, size = INFO.unpack(message)
    return RemoteRegion(addr, size, rkey, BOTH | Access.REMOTE_ATOMIC)


@pytest.mark.parametrize("size", SIZES)
async def test_a_connection_serves_rping(address: str, size: int) -> None:
    async with (
        aiordma.listen(address, 0, config=RAW) as listener,
        running(*rping_client(address, listener.port, size)) as rping,
        await listener.accept() as connection,
    ):
        for number in range(COUNT):
            text = bytearray(size)
            await connection.read(described(await connection.recv()), text)
            assert_bytes(bytes(text), ping(number, size))
            await connection.send(bytes(INFO.size))
            await connection.write(described(await connection.recv()), text)
            await connection.send(bytes(INFO.size))
        await ended_by_peer(connection)
        await ended_well(rping)
    assert_shown(rping, "ping data: ", size)


@pytest.mark.parametrize("size", SIZES)
async def test_a_connection_calls_rping(address: str, port: int, size: int) -> None:
    source, sink = bytearray(size), bytearray(size)
    async with running(*rping_server(address, port, size, "-v")) as rping:
        connection = await until_listening(
            rping, port, lambda: aiordma.connect(address, port, config=RAW)
        )
        async with (
            connection,
            connection.expose(source, read=True) as there,
            connection.expose(sink, write=True) as back,
        ):
            for number in range(COUNT):
                source[:], sink[:] = ping(number, size), bytes(size)
                for region in (there, back):
                    await connection.send(INFO.pack(region.addr, region.rkey, size))
                    with await connection.recv() as done:
                        assert len(done) == INFO.size
                assert_bytes(bytes(sink), ping(number, size))
        await ended_well(rping)
    assert_shown(rping, "server ping data: ", size)


class Side:
    """The conversation about memory, as a Connection has it."""

    def __init__(self, connection: Connection, role: str, *, iwarp: bool) -> None:
        self.connection = connection
        self.role = role
        self.iwarp = iwarp
        self.memory = bytearray(c.fresh(role))

    async def received(self, size: int, imm: int) -> Message:
        message = await self.connection.recv()
        assert len(message) == size
        assert message.imm == (None if self.iwarp else imm)
        return message

    async def send(self, data: bytes, imm: int) -> None:
        await self.connection.send(data, imm=None if self.iwarp else imm)

    async def talk(self) -> None:
        connection, atomic = self.connection, not self.iwarp
        lease = connection.expose(self.memory, read=True, write=True, atomic=atomic)
        async with lease as mine:
            shown = c.SHOWN.pack(mine.addr, mine.rkey, c.SIZE)
            if self.role == "client":
                await self.send(shown, c.IMM_SHOWN)
            theirs = described(await self.received(c.SHOWN.size, c.IMM_SHOWN))
            if self.role == "client":
                await self.act(theirs)
                await self.endure()
            else:
                await self.send(shown, c.IMM_SHOWN)
                await self.endure()
                await self.act(theirs)
                await ended_by_peer(connection)

    async def act(self, theirs: RemoteRegion) -> None:
        connection, them = self.connection, c.other(self.role)
        read = bytearray(c.READ_SIZE)
        await connection.read(theirs, read, offset=c.READ)
        assert_bytes(bytes(read), c.text(them, "source", c.READ_SIZE))
        await connection.write(theirs, c.text(self.role, "write", c.WRITE_SIZE), offset=c.WRITE)
        text = c.text(self.role, "immediate", c.WRITE_IMM_SIZE)
        if self.iwarp:
            await connection.write(theirs, text, offset=c.WRITE_IMM)
            with pytest.raises(NotSupportedError, match="iWARP"):
                await connection.write(theirs, text, offset=c.WRITE_IMM, imm=c.IMM_WRITTEN)
            with pytest.raises(NotSupportedError, match="atomic"):
                await connection.fetch_add(theirs, c.ADD)
        else:
            await connection.write(theirs, text, offset=c.WRITE_IMM, imm=c.IMM_WRITTEN)
            now, swap = c.added(them), connection.compare_swap
            assert await connection.fetch_add(theirs, c.ADD, offset=c.COUNTER) == c.START[them]
            assert await swap(theirs, now, c.SWAPPED, offset=c.COUNTER) == now
            assert await swap(theirs, now, 0, offset=c.COUNTER) == c.SWAPPED
            assert await swap(theirs, 0, 0, offset=c.COUNTER) == c.SWAPPED
        await self.send(b"", c.IMM_DONE)

    async def endure(self) -> None:
        if not self.iwarp:
            # Of a write the message tells the immediate alone; the bytes are where they belong.
            (await self.received(0, c.IMM_WRITTEN)).release()
        (await self.received(0, c.IMM_DONE)).release()
        assert_bytes(bytes(self.memory), c.acted_on(self.role, atomics=not self.iwarp))


async def test_memory_of_a_connection_that_pyverbs_calls(address: str, is_siw: bool) -> None:
    async with (
        aiordma.listen(address, 0, config=RAW) as listener,
        pyverbs("memory", "client", address, listener.port) as peer,
    ):
        request = await anext(listener.requests())
        async with await request.accept(c.ANSWER) as connection:
            await Side(connection, "server", iwarp=is_siw).talk()
        assert (await peer.finish())[-1] == DONE


async def test_memory_of_a_connection_that_calls_pyverbs(
    address: str, port: int, is_siw: bool
) -> None:
    async with pyverbs("memory", "server", address, port) as peer:
        connection = await until_listening(
            peer, port, lambda: aiordma.connect(address, port, config=RAW, private_data=c.CALL)
        )
        async with connection:
            assert trimmed(connection.private_data, len(c.ANSWER)) == c.ANSWER
            await Side(connection, "client", iwarp=is_siw).talk()
        assert (await peer.finish())[-1] == DONE
