"""What queue pairs say that were brought up by hand, and the programs at the other end.

Each side tells the other over TCP, in a line of text, where its queue pair and its region are.
Then, the client first, each acts on the other's region: it reads, writes, adds, compares and swaps,
and writes with an immediate, which takes a receive.  What a region must hold afterwards is that of
conversation.py; pyverbs_by_hand.py and by_hand.c are the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiordma.verbs import MTU, SGE, Access, BringUp, QPAddress, QPState, WCOpcode
from tests.device.bringing_up import HandMade
from tests.interop import conversation as c
from tests.interop.program import Program, assert_bytes
from tests.native_ends import begun

REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
RIGHTS = Access.LOCAL_WRITE | REMOTE
READY, DONE = b"ready\n", b"done\n"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Told:
    """What a side tells of itself."""

    qp: QPAddress
    addr: int
    rkey: int

    def line(self) -> bytes:
        """As it travels: number, PSN, path MTU, GID, address, key."""
        qp = self.qp
        text = f"{qp.qp_num:x} {qp.psn:x} {qp.path_mtu:d} {qp.gid.hex()} {self.addr:x}"
        return f"{text} {self.rkey:x}\n".encode()

    @classmethod
    def parse(cls, line: bytes) -> Told:
        number, psn, mtu, gid, addr, rkey = line.decode().split()
        qp = QPAddress(
            qp_num=int(number, 16), psn=int(psn, 16), gid=bytes.fromhex(gid),
            path_mtu=MTU(int(mtu)), reads=1,
        )  # fmt: skip
        return cls(qp, int(addr, 16), int(rkey, 16))


class Side:
    """aiordma's side; its operations are those of the end's queue pair, or of a stand-in."""

    def __init__(self, end: HandMade, role: str, qp: Any = None) -> None:
        self.end = end
        self.qp: Any = qp or end.qp
        self.role = role
        self.region = end.region(bytearray(c.fresh(role)), RIGHTS)
        self.words = end.region(c.SIZE, RIGHTS)

    async def talk(self, stream: Stream) -> None:
        """All of it."""
        reader, writer = stream
        up = self.end.bring_up(access=REMOTE)
        receiving = await begun(self.qp.recv(SGE(self.words, 0, 0)))
        writer.write(Told(up.address, self.region.addr, self.region.rkey).line())
        theirs = Told.parse(await reader.readline())
        await up.connect(theirs.qp)
        await self.say(stream, READY)
        if self.role == "client":
            await self.act(theirs)
            await self.endure(receiving)
        else:
            await self.endure(receiving)
            await self.act(theirs)
        await self.say(stream, DONE)

    async def say(self, stream: Stream, word: bytes) -> None:
        """Say the word, and wait for it."""
        stream[1].write(word)
        assert await stream[0].readline() == word

    def put(self, data: bytes) -> SGE:
        """A piece of the words, with these bytes in it."""
        self.words.view[: len(data)] = data
        return SGE(self.words, 0, len(data))

    async def act(self, theirs: Told) -> None:
        qp, them, base, rkey = self.qp, c.other(self.role), theirs.addr, theirs.rkey
        await qp.read(self.put(c.POISON * c.READ_SIZE), base + c.READ, rkey)
        assert_bytes(self.words.view[: c.READ_SIZE], c.text(them, "source", c.READ_SIZE))
        written = self.put(c.text(self.role, "write", c.WRITE_SIZE))
        await qp.write(written, base + c.WRITE, rkey)
        old = self.put(bytes(c.COUNTER_SIZE))

        def number() -> int:
            return int(struct.unpack_from("=Q", self.words.view)[0])

        await qp.fetch_add(old, base + c.COUNTER, rkey, c.ADD)
        assert number() == c.START[them]
        await qp.compare_swap(old, base + c.COUNTER, rkey, c.added(them), c.SWAPPED)
        assert number() == c.added(them)
        written = self.put(c.text(self.role, "immediate", c.WRITE_IMM_SIZE))
        await qp.write(written, base + c.WRITE_IMM, rkey, imm=c.IMM_WRITTEN)

    async def endure(self, receiving: asyncio.Task[Any]) -> None:
        completion = await receiving
        assert completion.opcode == WCOpcode.RECV_RDMA_WITH_IMM
        assert completion.imm_data == c.IMM_WRITTEN
        assert completion.byte_len == c.WRITE_IMM_SIZE
        assert_bytes(self.region.view, c.acted_on(self.role, atomics=True))


@contextlib.asynccontextmanager
async def dialed(port: int) -> AsyncIterator[Stream]:
    """A TCP connection to the program that listens there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


class Answering:
    """A TCP server for the one program that is to call.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, server: asyncio.Server, caller: asyncio.Future[Stream]) -> None:
        self.port: int = server.sockets[0].getsockname()[1]
        self._caller = caller

    async def caller(self, program: Program) -> Stream:
        """The stream of the program that calls; fails if the program ends without a call."""
        # As futures alone: to cancel a task that waits for the program would end its reader.
        either: list[asyncio.Future[Any]] = [self._caller, program.reader]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        assert self._caller.done(), "it ended without a call"
        return self._caller.result()


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[Answering]:
    """A TCP server for the time of the block."""
    caller: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller.set_result((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        try:
            yield Answering(server, caller)
        finally:
            if caller.done():
                caller.result()[1].close()


def options_of(end: HandMade) -> tuple[str, str]:
    """Name of the device and index of its GID, for a program on the same device."""
    up = BringUp(end.qp)
    end.qp.modify(qp_state=QPState.RESET)
    return end.context.name, str(up.gid_index)
