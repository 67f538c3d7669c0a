"""Queue pairs brought up by hand, with programs that know nothing of aiordma.

The pingpong programs of rdma-core in all three services, a program of pyverbs, and a program of C;
each in both roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aiordma import CompletionError, FlushedError
from aiordma.verbs import GRH, SGE, AddressHandle, BringUp, QPAddress, QPType, WCFields
from tests.device.bringing_up import HandMade, hand_made
from tests.interop import by_hand, pingpong
from tests.interop.by_hand import Side, Stream, answering, options_of
from tests.interop.polled import polled
from tests.interop.preload import build
from tests.interop.program import Program, assert_bytes, running
from tests.interop.pyverbs_program import PYTHON, ROOT
from tests.native_ends import begun

DONE = "all as it must be"
PYVERBS = (PYTHON, "-X", "dev", "-m", "tests.interop.pyverbs_by_hand")
SERVICES = {"rc": QPType.RC, "uc": QPType.UC, "ud": QPType.UD}


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> str:
    """by_hand.c, compiled."""
    source = Path(__file__).parent / "by_hand.c"
    return build(source, tmp_path_factory.mktemp("by_hand"), "-libverbs")


@pytest.fixture(params=["pyverbs", "C"])
def program(request: pytest.FixtureRequest, in_c: str) -> tuple[str, ...]:
    """The command of the other side, without its arguments."""
    return PYVERBS if request.param == "pyverbs" else (in_c,)


async def test_a_program_calls(program: tuple[str, ...]) -> None:
    async with hand_made(1) as (end,), answering() as server:
        command = (*program, "client", *options_of(end), str(server.port))
        async with running(*command, PYTHONPATH=str(ROOT)) as peer:
            await Side(end, "server").talk(await server.caller(peer))
            assert (await peer.finish())[-1] == DONE


async def test_an_extended_completion_queue(program: tuple[str, ...]) -> None:
    """Completions of all kinds, polled by hand."""
    async with hand_made(1, fields=WCFields(0)) as (end,), polled(end) as qp, answering() as server:
        command = (*program, "client", *options_of(end), str(server.port))
        async with running(*command, PYTHONPATH=str(ROOT)) as peer:
            await Side(end, "server", qp).talk(await server.caller(peer))
            assert (await peer.finish())[-1] == DONE


async def test_a_program_is_called(program: tuple[str, ...]) -> None:
    async with hand_made(1) as (end,):
        command = (*program, "server", *options_of(end), "0")
        async with running(*command, PYTHONPATH=str(ROOT)) as peer:
            port = int(await peer.line("listening "))
            async with by_hand.dialed(port) as stream:
                await Side(end, "client").talk(stream)
            assert (await peer.finish())[-1] == DONE


async def test_a_program_that_is_killed_ends_the_stream(in_c: str) -> None:
    """The stream tells; the queue pair alone would wait for ever."""
    async with hand_made(1) as (end,):
        command = (in_c, "server", *options_of(end), "0")
        async with running(*command) as peer:
            port = int(await peer.line("listening "))
            async with by_hand.dialed(port) as (reader, writer):
                side = Side(end, "client")
                up = end.bring_up(access=by_hand.REMOTE)
                receiving = await begun(end.qp.recv(SGE(side.words, 0, 0)))
                told = by_hand.Told(up.address, side.region.addr, side.region.rkey)
                writer.write(told.line())
                theirs = by_hand.Told.parse(await reader.readline())
                await up.connect(theirs.qp)
                await side.say((reader, writer), by_hand.READY)
                peer.kill()
                # A word that it has not read makes a reset of its end.
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
                end.qp.to_error()
                with pytest.raises(FlushedError):
                    await receiving


# Pingpong


class Player:
    """aiordma's side of a game."""

    def __init__(self, end: HandMade, kind: str) -> None:
        self.end = end
        self.up: BringUp = end.bring_up(path_mtu=pingpong.PATH_MTU, qkey=pingpong.QKEY)
        self.is_datagram = kind == "ud"
        self.size = pingpong.DATAGRAM if self.is_datagram else pingpong.SIZE
        self.head = GRH.SIZE if self.is_datagram else 0
        self.target = end.region(self.head + self.size)
        self.source = end.region(self.size)
        self.to: dict[str, Any] = {}

    async def connect(self, peer: QPAddress, stack: contextlib.AsyncExitStack) -> None:
        if not self.is_datagram:
            await self.up.connect(peer)
            return
        await self.up.connect()
        ah = await AddressHandle.create(self.end.pd, self.up.way_to(peer))
        stack.callback(ah.close)
        self.to = {"ah": ah, "remote_qpn": peer.qp_num, "remote_qkey": pingpong.QKEY}

    async def receive(self) -> asyncio.Task[Any]:
        """The receive of the next message, which is posted."""
        return await begun(self.end.qp.recv(self.target))

    async def send(self, *, last: bool = False) -> None:
        # After the last message the program may be gone before its adapter has acknowledged it.
        gone = (CompletionError, FlushedError) if last else ()
        with contextlib.suppress(*gone):
            await self.end.qp.send(self.source, **self.to)

    def assert_received(self, data: bytes) -> None:
        assert_bytes(self.target.view[self.head :], data)


@contextlib.asynccontextmanager
async def player(kind: str) -> AsyncIterator[tuple[Player, tuple[str, str]]]:
    async with hand_made(1, qp_type=SERVICES[kind]) as (end,):
        options = options_of(end)
        yield Player(end, kind), options


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("events", [(), ("-e",)], ids=["polls", "sleeps"])
async def test_pingpong_calls(kind: str, events: tuple[str, ...]) -> None:
    async with player(kind) as (us, options), answering() as server:
        command = pingpong.command(kind, *options, server.port, *events, "127.0.0.1")
        async with running(*command) as program, contextlib.AsyncExitStack() as stack:
            reader, writer = await server.caller(program)
            await us.connect(await pingpong.read_line(reader), stack)
            receiving = await us.receive()
            writer.write(pingpong.line(us.up.address))
            assert await reader.readexactly(len(pingpong.DONE)) == pingpong.DONE
            data = pingpong.FRESH * us.size
            for turn in range(pingpong.ROUNDS):
                await receiving
                us.assert_received(data)
                last = turn + 1 == pingpong.ROUNDS
                if not last:
                    receiving = await us.receive()
                data = bytes([turn]) * us.size  # it sends back what it has received
                us.source.view[:] = data
                await us.send(last=last)
            await program.finish()


@pytest.mark.parametrize("kind", SERVICES)
async def test_pingpong_is_called(kind: str, port: int) -> None:
    async with player(kind) as (us, options):
        command = pingpong.command(kind, *options, port)
        async with running(*command) as program, contextlib.AsyncExitStack() as stack:
            reader, writer = await called(program, port)
            stack.callback(writer.close)
            writer.write(pingpong.line(us.up.address))
            await us.connect(await pingpong.read_line(reader), stack)
            writer.write(pingpong.DONE)
            for turn in range(pingpong.ROUNDS):
                receiving = await us.receive()
                data = bytes([turn]) * us.size
                us.source.view[:] = data
                await us.send()
                await receiving
                us.assert_received(data)
            await program.finish()


async def called(program: Program, port: int) -> Stream:
    """Call the program as soon as it listens, which it does not tell."""
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            assert not program.ended, "it ended without listening"
            await asyncio.sleep(0.01)


async def test_the_example_with_pyverbs() -> None:
    """As its page has it."""
    async with hand_made(1) as (end,):
        options = options_of(end)
    examples = ROOT / "examples"
    command = (sys.executable, "-W", "error", str(examples / "by_hand.py"), "127.0.0.1", "0")
    async with running(*command) as server:
        port = (await server.line("listening on 127.0.0.1 ")).strip()
        program = str(examples / "by_hand_pyverbs.py")
        for _ in range(2):
            async with running(
                PYTHON, program, "127.0.0.1", port, *options, "hello", "and again"
            ) as client:
                assert await client.finish() == ["HELLO", "AND AGAIN"]
            await server.line("a client has left")
        server.kill()
