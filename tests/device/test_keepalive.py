"""Idle connections: they are asked, and every fault is noticed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig
from aiordma.cm import EventChannel
from aiordma.endpoint.config import DEFAULTS, hello_of
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.verbs import SGE, RecvWR, SendFlags, SendWR
from tests.device.foreign import DEPTHS, Foreign
from tests.inside.endpoint import state_of
from tests.native_ends import close_all, resolved

pytestmark = [pytest.mark.device, pytest.mark.virtual_time]

#: Seconds between two questions, and after which a dead peer is given up at the latest.
PERIOD_S, NOTICED_S = 20.0, 40.0
QUICK = ConnectionConfig(keepalive_s=2, idle_timeout_s=8, close_timeout_s=1)


async def connected(address: str, port: int, count: int, **options: object) -> list[Connection]:
    """So many connections."""
    return [await aiordma.connect(address, port, **options) for _ in range(count)]  # type: ignore[arg-type]


async def end_all(*ends: Connection) -> None:
    """Close them at once."""
    await asyncio.gather(*(end.close() for end in ends))


def frames(ends: list[Connection]) -> int:
    """All that these have sent."""
    return sum(state_of(end).sent for end in ends)


async def test_the_connecting_side_of_an_idle_connection_asks(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        clients = await connected(address, listener.port, 10)
        servers = [await listener.accept() for _ in clients]
        await asyncio.sleep(60)
        asked, answered = frames(clients), frames(servers)
        await asyncio.sleep(20 * PERIOD_S)
        for before, ends in ((asked, clients), (answered, servers)):
            assert 10 * 19 <= frames(ends) - before <= 10 * 21
        for client, server in zip(clients, servers, strict=True):
            await client.send(b"still there")
            (await server.recv()).release()
        await end_all(*clients, *servers)


SERVER = """
import asyncio, sys
import aiordma

async def main():
    async with aiordma.listen(sys.argv[1], 0) as listener:
        print(listener.port, flush=True)
        ends = []
        async for end in listener:
            ends.append(end)

asyncio.run(main())
"""


@asynccontextmanager
async def server_process(address: str) -> AsyncIterator[tuple[Process, int]]:
    """A process that accepts connections and does nothing, and its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, address, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process, int(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


async def test_a_process_that_is_stopped_is_noticed_on_all_connections(address: str) -> None:
    """Its adapter acknowledges all the same."""
    loop = asyncio.get_running_loop()
    async with server_process(address) as (process, port):
        ends = await connected(address, port, 20, config=QUICK)
        await asyncio.sleep(20)
        process.send_signal(signal.SIGSTOP)
        begun = loop.time()
        closing = [asyncio.create_task(end.wait_closing()) for end in ends]
        found = await asyncio.gather(*(end.recv() for end in ends), return_exceptions=True)
        took = loop.time() - begun
        await asyncio.wait(closing)
        assert loop.time() - begun < took + 0.1, "it returns when they are lost"
        await asyncio.gather(*(end.wait_closed() for end in ends))
        assert loop.time() - begun > took + 0.9, "the peer answers nothing"
        await end_all(*ends)
    for error in found:
        assert isinstance(error, aiordma.ConnectionLostError)
        assert isinstance(error.__cause__ or error, OSError)
        assert "nothing heard from the peer" in str(error)
    assert 4 < took <= 8 + 2 + 1


async def test_a_process_that_is_stopped_for_a_while_is_kept(address: str) -> None:
    async with server_process(address) as (process, port):
        ends = await connected(address, port, 20, config=QUICK)
        await asyncio.sleep(20)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(4)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(30)
        for end in ends:
            await end.send(b"still there")
            await end.flush()
        await end_all(*ends)


# Peers of the native layer, which say what the test wants


class Frames(Foreign):
    """A client that answers only if it is to."""

    answers = True
    over = False

    async def join(self) -> None:
        """Connect, and greet."""
        self.places = self.region(bytearray(32 * 64))
        self.words = self.region(bytearray(32 * 16))
        self._said = 0
        for place in range(32):
            self._receive(place)
        hello = hello_of(DEFAULTS, b"").pack(56)
        await self.cm_id.connect(DEPTHS, private_data=hello, timeout=20)
        self.say(FrameKind.CREDIT)

    def _receive(self, place: int) -> None:
        request = RecvWR(wr_id=place, sg_list=[SGE(self.places, 64 * place, 64)])
        self.qp.post_recv(request)

    def say(self, kind: FrameKind) -> None:
        """Send a frame without data."""
        at, number, self._said = 16 * (self._said % 32), self._said % 16, self._said + 1
        self.words.view[at : at + 16] = FRAME.pack(kind | number << 4, 0, 0, 0, 0)
        flags = SendFlags.SIGNALED | SendFlags.SOLICITED
        self.qp.post_send(SendWR(wr_id=100, sg_list=[SGE(self.words, at, 16)], send_flags=flags))

    def look(self) -> None:
        """Take what has come, and answer."""
        for record in self.cq.poll(32):
            if not record.ok:
                self.over = True
            elif record.wr_id < 32:
                kind = self.places.view[64 * record.wr_id] & 0x0F  # above it, the message's number
                self._receive(record.wr_id)
                if kind == FrameKind.PING and self.answers:
                    self.say(FrameKind.PONG)


@asynccontextmanager
async def served(
    address: str, count: int
) -> AsyncIterator[tuple[list[Frames], list[Connection], Callable[[float], Awaitable[None]]]]:
    """Clients, the server's ends, and a function that lets time go on."""
    with EventChannel() as events:
        async with aiordma.listen(address, 0) as listener:
            clients, servers = [], []
            for _ in range(count):
                client = Frames(await resolved(events, address, listener.port))
                clients.append(client)
                await client.join()
                servers.append(await listener.accept())

            async def go_on(seconds: float) -> None:
                for _ in range(round(2 * seconds)):
                    for client in clients:
                        if not client.over:
                            client.look()
                    await asyncio.sleep(0.5)

            try:
                for client in clients:
                    client.say(FrameKind.PING)  # each is heard itself
                await go_on(60)
                yield clients, servers, go_on
            finally:
                await asyncio.gather(
                    *(end.close() for end in servers), close_all(*clients), return_exceptions=True
                )


async def test_dead_connections_are_noticed_beside_one_that_lives(address: str) -> None:
    """Queue pairs that broke without a word, or whose program is stuck."""
    async with served(address, 5) as (clients, servers, go_on):
        for client in clients[1:]:
            client.answers = False
        await go_on(NOTICED_S + 20)
        assert not servers[0].is_closing()
        for server in servers[1:]:
            with pytest.raises(aiordma.ConnectionLostError, match="nothing heard from the peer"):
                await server.recv()
