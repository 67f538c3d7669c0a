"""rping, both roles: SEND of addresses and keys, RDMA READ of the ping, RDMA WRITE of the pong.

The client shows where its ping lies; the server reads it, says so, is shown where the pong shall
go, writes it there, and says so.  `rping -V` compares the pong with the ping byte by byte.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiordma.cm import EventType
from aiordma.verbs import SGE, Access
from tests.interop.native import PARAMETER, POISON, Dialed, End, Server, dialed, serving
from tests.interop.program import Program, assert_bytes, running
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
from tests.native_ends import close_all


class Pings:
    """What both roles need: an end, a place for the peer's words and one for its bytes."""

    def __init__(self, end: End, size: int) -> None:
        self.end = end
        self.words = end.region(2 * INFO.size)
        self.data = end.region(
            size + 8, Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
        )
        self.end.post_recv(SGE(self.words, 0, INFO.size))

    async def say(self, addr: int, rkey: int, size: int) -> None:
        self.words.view[INFO.size :] = INFO.pack(addr, rkey, size)
        await self.end.qp.send(SGE(self.words, INFO.size, INFO.size))

    async def go_ahead(self, *, last: bool) -> None:
        """Say that it is done; what the message holds is of no importance."""
        piece = SGE(self.words, INFO.size, INFO.size)
        await (self.end.send_last if last else self.end.qp.send)(piece)

    async def hear(self) -> tuple[int, int, int]:
        assert (await self.end.received()).byte_len == INFO.size
        addr, rkey, size = INFO.unpack_from(self.words.view)
        self.end.post_recv(SGE(self.words, 0, INFO.size))
        return addr, rkey, size

    def poison(self) -> None:
        self.data.view[:] = POISON * len(self.data)


# aiordma serves


async def answer(pings: Pings, number: int, size: int, *, spoil: bool = False) -> None:
    """One ping as the server: read it, compare it, write it back.

    Args:
        pings: The connection.
        number: Of the ping.
        size: Of its text.
        spoil: Write it back with one bit changed; rping hangs up then.
    """
    qp, data = pings.end.qp, pings.data
    addr, rkey, length = await pings.hear()
    assert length == size
    pings.poison()
    await qp.read(SGE(data, 0, size), addr, rkey)
    assert_bytes(data.view, ping(number, size) + POISON * 8)
    await pings.go_ahead(last=False)
    addr, rkey, length = await pings.hear()
    assert length == size
    data.view[size // 2] ^= spoil
    await qp.write(SGE(data, 0, size), addr, rkey)
    await pings.go_ahead(last=spoil or number == COUNT - 1)


@asynccontextmanager
async def accepted(server: Server, size: int) -> AsyncIterator[Pings]:
    request = await server.request()
    assert request.connection_id is not None
    end = End(request.connection_id)
    try:
        pings = Pings(end, size)
        await end.cm_id.accept(PARAMETER)
        yield pings
    finally:
        await close_all(end)


@pytest.mark.parametrize("size", SIZES)
async def test_aiordma_serves_rping(address: str, size: int) -> None:
    async with (
        serving(address) as server,
        running(*rping_client(address, server.port, size)) as rping,
        accepted(server, size) as pings,
    ):
        for number in range(COUNT):
            await answer(pings, number, size)
        await server.event(EventType.DISCONNECTED)
        await ended_well(rping)
    assert_shown(rping, "ping data: ", size)


async def test_rping_notices_a_wrong_byte(address: str) -> None:
    """The comparison on which the other tests rely is one."""
    size = 64
    async with (
        serving(address) as server,
        running(*rping_client(address, server.port, size)) as rping,
        accepted(server, size) as pings,
    ):
        await answer(pings, 0, size)
        await answer(pings, 1, size, spoil=True)
        # Its end is not waited for: that of its thread for completions may not come.
        await rping.line("data mismatch!")


async def test_rping_with_a_queue_pair_of_its_own_making(address: str, is_siw: bool) -> None:
    """`-q`: the queue pair is not the connection manager's, as in aiordma itself."""
    size = 64
    async with (
        serving(address) as server,
        running(*rping_client(address, server.port, size, "-q")) as rping,
        accepted(server, size) as pings,
    ):
        if is_siw:
            # On iWARP the client is connected without a word of its own; rping gives it all the
            # same, takes the refusal for a failure, and waits for the end of the connection.
            await rping.line("rdma_establish: Invalid argument")
            await pings.end.cm_id.disconnect()
            await rping.finish(255)
            return
        for number in range(COUNT):
            await answer(pings, number, size)
        await ended_well(rping)
    assert_shown(rping, "ping data: ", size)


# rping serves


async def ask(pings: Pings, text: bytes) -> None:
    """One ping as the client: the server reads `text` and writes it back."""
    data, size = pings.data, len(text)
    pings.poison()
    data.view[:size] = text
    await pings.say(data.addr, data.rkey, size)
    await pings.hear()  # it has been read
    pings.poison()
    await pings.say(data.addr, data.rkey, size)
    await pings.hear()  # it has been written
    assert_bytes(data.view, text + POISON * 8)


@asynccontextmanager
async def calling(
    server: Program, address: str, port: int, size: int
) -> AsyncIterator[tuple[Dialed, Pings]]:
    made: list[Pings] = []
    async with dialed(
        server, address, port, lambda end: made.append(Pings(end, size))
    ) as connection:
        yield connection, made[-1]


@pytest.mark.parametrize("size", SIZES)
async def test_rping_serves_aiordma(address: str, port: int, size: int) -> None:
    async with (
        running(*rping_server(address, port, size, "-v")) as rping,
        calling(rping, address, port, size) as (connection, pings),
    ):
        for number in range(COUNT):
            await ask(pings, ping(number, size))
        await connection.end.cm_id.disconnect()
        await ended_well(rping)
    assert_shown(rping, "server ping data: ", size)


async def test_many_at_a_time(address: str, port: int) -> None:
    """`-P`: one server process, a thread for each of its clients.

    They connect one after the other: rping keeps a request in a variable that the next one
    overwrites.
    """
    size = 1000
    command = rping_server(address, port, size, "-P")
    async with running(*command) as rping, contextlib.AsyncExitStack() as stack:
        clients = [
            (await stack.enter_async_context(calling(rping, address, port, size)))[1]
            for _ in range(8)
        ]

        async def talk(pings: Pings, first: int) -> None:
            for number in range(COUNT):
                await ask(pings, ping(first + number, size))

        await asyncio.gather(*(talk(pings, 10 * n) for n, pings in enumerate(clients)))
