"""pyverbs, both roles: private data, refusals, immediates, one-sided operations and atomics.

conversation.py says what is exchanged, pyverbs_peer.py is the other side.  iWARP has neither
immediates nor atomics; there both sides leave them out of the conversation, and aiordma says so.
"""

from __future__ import annotations

import errno
import struct

import pytest

import aiordma
from aiordma import (
    ConnectionConfig,
    ConnectionLostError,
    ConnectionRejectedError,
    NotSupportedError,
)
from aiordma.cm import EventType
from aiordma.verbs import SGE, Access, MemoryRegion, QPState, WCOpcode
from tests.interop import conversation as c
from tests.interop.native import PARAMETER, End, ForeignEnd, dialed, serving
from tests.interop.program import assert_bytes, until_listening
from tests.interop.pyverbs_program import DONE, pyverbs, trimmed
from tests.native_ends import close_all

RAW = ConnectionConfig(raw=True, slot_size=c.SIZE, recv_depth=4, send_depth=4)


# The high-level API


async def test_pyverbs_calls_a_raw_listener(address: str, is_siw: bool) -> None:
    async with (
        aiordma.listen(address, 0, config=RAW) as listener,
        pyverbs("echo", "client", address, listener.port) as peer,
    ):
        request = await anext(listener.requests())
        assert trimmed(request.private_data, len(c.CALL)) == c.CALL
        async with await request.accept(c.ANSWER) as connection:
            assert trimmed(connection.private_data, len(c.CALL)) == c.CALL
            for size in c.ECHOES:
                with await connection.recv() as message:
                    assert message.imm == (None if is_siw else c.IMM_ECHO + size)
                    assert_bytes(bytes(message), c.text("client", "echo", size))
                imm = None if is_siw else c.IMM_BACK + size
                await connection.send(c.text("server", "echo", size), imm=imm)
            with pytest.raises(ConnectionLostError, match="closed by the peer"):
                await connection.recv()
        assert (await peer.finish())[-1] == DONE


async def test_a_raw_connection_calls_pyverbs(address: str, port: int, is_siw: bool) -> None:
    async with pyverbs("echo", "server", address, port) as peer:
        connection = await until_listening(
            peer, port, lambda: aiordma.connect(address, port, config=RAW, private_data=c.CALL)
        )
        async with connection:
            assert trimmed(connection.private_data, len(c.ANSWER)) == c.ANSWER
            for size in c.ECHOES:
                imm = None if is_siw else c.IMM_ECHO + size
                await connection.send(c.text("client", "echo", size), imm=imm)
                with await connection.recv() as message:
                    assert message.imm == (None if is_siw else c.IMM_BACK + size)
                    assert_bytes(bytes(message), c.text("server", "echo", size))
        assert (await peer.finish())[-1] == DONE


async def test_pyverbs_is_refused(address: str) -> None:
    async with (
        aiordma.listen(address, 0, config=RAW) as listener,
        pyverbs("refuse", "client", address, listener.port) as peer,
    ):
        request = await anext(listener.requests())
        request.reject(c.REFUSAL)
        assert (await peer.finish())[-1] == DONE


async def test_pyverbs_refuses(address: str, port: int, is_siw: bool) -> None:
    async with pyverbs("refuse", "server", address, port) as peer:
        with pytest.raises(ConnectionRejectedError) as caught:
            await until_listening(peer, port, lambda: aiordma.connect(address, port, config=RAW))
        assert trimmed(caught.value.private_data, len(c.REFUSAL)) == c.REFUSAL
        assert caught.value.status == (-errno.ECONNRESET if is_siw else 28)
        assert (await peer.finish())[-1] == DONE


# The native layer


class Side:
    """aiordma's side of the conversation about memory."""

    def __init__(self, end: End, role: str, *, iwarp: bool) -> None:
        access = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
        self.end = end
        self.role = role
        self.iwarp = iwarp
        self.region = end.region(c.SIZE, access if iwarp else access | Access.REMOTE_ATOMIC)
        self.region.view[:] = c.fresh(role)
        # iWARP writes the answer of a read as if the peer wrote it.
        self.words: MemoryRegion = end.region(2 * c.SIZE, access)
        for _ in range(2):
            self.post_recv()

    def post_recv(self) -> None:
        self.end.post_recv(SGE(self.words, 0, c.SIZE))

    async def received(self, size: int, imm: int, opcode: WCOpcode = WCOpcode.RECV) -> bytes:
        completion = await self.end.received()
        assert completion.opcode == opcode
        assert completion.byte_len == size
        assert completion.imm_data == (None if self.iwarp else imm)
        data = bytes(self.words.view[:size])
        self.post_recv()
        return data

    def put(self, data: bytes) -> SGE:
        """A piece in the second half of the words, with these bytes in it."""
        self.words.view[c.SIZE : c.SIZE + len(data)] = data
        return SGE(self.words, c.SIZE, len(data))

    async def send(self, data: bytes, imm: int) -> None:
        await self.end.qp.send(self.put(data), imm=None if self.iwarp else imm)

    async def talk(self) -> None:
        """All of it, in either role."""
        shown = c.SHOWN.pack(self.region.addr, self.region.rkey, c.SIZE)
        if self.role == "client":
            await self.send(shown, c.IMM_SHOWN)
        theirs = c.SHOWN.unpack(await self.received(c.SHOWN.size, c.IMM_SHOWN))
        assert theirs[2] == c.SIZE
        if self.role == "client":
            await self.act(*theirs[:2])
            await self.endure()
        else:
            await self.send(shown, c.IMM_SHOWN)
            await self.endure()
            await self.act(*theirs[:2])

    async def act(self, base: int, rkey: int) -> None:
        qp, them = self.end.qp, c.other(self.role)
        into = self.put(c.POISON * c.READ_SIZE)
        await qp.read(into, base + c.READ, rkey)
        read = self.words.view[c.SIZE : c.SIZE + c.READ_SIZE]
        assert_bytes(read, c.text(them, "source", c.READ_SIZE))
        written = self.put(c.text(self.role, "write", c.WRITE_SIZE))
        await qp.write(written, base + c.WRITE, rkey)
        written = self.put(c.text(self.role, "immediate", c.WRITE_IMM_SIZE))
        if self.iwarp:
            await qp.write(written, base + c.WRITE_IMM, rkey)
            with pytest.raises(NotSupportedError):
                await qp.write(written, base + c.WRITE_IMM, rkey, imm=c.IMM_WRITTEN)
            with pytest.raises(NotSupportedError):
                await qp.fetch_add(self.put(bytes(8)), base + c.COUNTER, rkey, c.ADD)
        else:
            await qp.write(written, base + c.WRITE_IMM, rkey, imm=c.IMM_WRITTEN)
            await self.count(base + c.COUNTER, rkey)
        imm = None if self.iwarp else c.IMM_DONE
        await self.end.send_last(self.put(b""), imm=imm)

    async def count(self, addr: int, rkey: int) -> None:
        qp, them = self.end.qp, c.other(self.role)
        result = self.put(bytes(c.COUNTER_SIZE))

        def old() -> int:
            return int(struct.unpack_from("=Q", self.words.view, c.SIZE)[0])

        await qp.fetch_add(result, addr, rkey, c.ADD)
        assert old() == c.START[them]
        await qp.compare_swap(result, addr, rkey, c.added(them), c.SWAPPED)
        assert old() == c.added(them)
        for wrong in (c.added(them), 0):
            await qp.compare_swap(result, addr, rkey, wrong, 0)
            assert old() == c.SWAPPED

    async def endure(self) -> None:
        if not self.iwarp:
            opcode = WCOpcode.RECV_RDMA_WITH_IMM
            await self.received(c.WRITE_IMM_SIZE, c.IMM_WRITTEN, opcode)
        await self.received(0, c.IMM_DONE)
        assert_bytes(self.region.view, c.acted_on(self.role, atomics=not self.iwarp))


KINDS = pytest.mark.parametrize("kind", [End, ForeignEnd], ids=["own", "foreign"])


@KINDS
async def test_memory_with_pyverbs_as_client(address: str, is_siw: bool, kind: type[End]) -> None:
    async with (
        serving(address) as server,
        pyverbs("memory", "client", address, server.port) as peer,
    ):
        request = await server.request()
        assert trimmed(request.private_data, len(c.CALL)) == c.CALL
        assert request.connection_id is not None
        end = kind(request.connection_id)
        try:
            # A receive is posted in INIT at the earliest, where an own queue pair is already.
            if isinstance(end, ForeignEnd):
                end.move(QPState.INIT)
            side = Side(end, "server", iwarp=is_siw)
            if isinstance(end, ForeignEnd):
                await end.accept(PARAMETER, c.ANSWER)
            else:
                await end.cm_id.accept(PARAMETER, private_data=c.ANSWER)
            await side.talk()
            await server.event(EventType.DISCONNECTED)
        finally:
            await close_all(end)
        assert (await peer.finish())[-1] == DONE


@KINDS
async def test_memory_with_pyverbs_as_server(
    address: str, port: int, is_siw: bool, kind: type[End]
) -> None:
    sides: list[Side] = []

    def prepare(end: End) -> None:
        if isinstance(end, ForeignEnd):
            end.move(QPState.INIT)
        sides.append(Side(end, "client", iwarp=is_siw))

    async with (
        pyverbs("memory", "server", address, port) as peer,
        dialed(
            peer,
            address,
            port,
            prepare,
            private_data=c.CALL,
            kind=kind,
        ) as connection,
    ):
        assert trimmed(connection.answer.private_data, len(c.ANSWER)) == c.ANSWER
        await sides[-1].talk()
        await connection.end.cm_id.disconnect()
        assert (await peer.finish())[-1] == DONE
