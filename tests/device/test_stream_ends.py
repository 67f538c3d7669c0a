"""Every clean way to end a stream, on both sides at once: all bytes arrive, without an error.

The rsockets protocol says SHUTDOWN or DISCONNECT according to what the other side has said, and the
two may cross on the wire; tests/unit/rsocket/test_ending.py has the rows.
"""

from __future__ import annotations

import asyncio
import os
from random import Random
from typing import Any

import pytest

import aiordma
from aiordma import StreamConfig
from tests.device.streaming import Note, noted

pytestmark = pytest.mark.device

SEED = os.environ.get("AIORDMA_TEST_SEED", "20241121")
ROUNDS = 8
SIZES = (0, 1, 5000, 100_000, 400_000)
SMALL = StreamConfig(receive_buffer_size=8192, send_buffer_size=8192)


class Side(Note):
    """What each side says is given to it by `begin`; the other one's end may come before."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False

    def begin(self, data: bytes) -> None:
        self.begun = True
        self.say(data)

    def say(self, data: bytes) -> None:
        self.transport.write(data)
        if "eof" in self.calls:
            self.transport.close()

    def eof_received(self) -> bool:
        super().eof_received()
        if self.begun:
            self.transport.close()
        return True


class Eager(Side):
    """Says its part, then that it is done; closes when the other one is done, too."""

    def say(self, data: bytes) -> None:
        self.transport.write(data)
        self.transport.write_eof()
        if "eof" in self.calls:
            self.transport.close()


class Polite(Side):
    """Listens to the end, then says its part and closes."""

    answer = b""

    def say(self, data: bytes) -> None:
        self.answer = data
        if "eof" in self.calls:
            self.close()

    def eof_received(self) -> bool:
        Note.eof_received(self)
        if self.begun:
            self.close()
        return True

    def close(self) -> None:
        self.transport.write(self.answer)
        self.transport.close()


class Plain(Side):
    """Says its part; what it does at the other one's end is asyncio's default: it closes."""

    def eof_received(self) -> bool:
        Note.eof_received(self)
        return not self.begun


@pytest.mark.parametrize("config", [None, SMALL], ids=["default", "small"])
@pytest.mark.parametrize(
    ("client", "server"),
    [(Eager, Eager), (Eager, Polite), (Polite, Eager), (Eager, Plain), (Plain, Eager)],
)
async def test_clean_ends(
    address: str, client: type[Side], server: type[Side], config: StreamConfig | None
) -> None:
    rng = Random(f"{SEED}/{client.__name__}/{server.__name__}")
    for number in range(ROUNDS):
        async with noted(address, config, client=client, server=server) as both:
            parts = [rng.randbytes(rng.choice(SIZES)) for _ in range(2)]
            sides = [both.client, both.server]
            for index in rng.sample((0, 1), 2):
                sides[index].begin(parts[index])
                for _ in range(rng.choice((0, 0, 1, 5))):
                    await asyncio.sleep(0)
            ends = [await side.ended() for side in sides]
        note = f"seed {SEED}, round {number}: {[len(part) for part in parts]} bytes"
        assert ends == [None, None], note
        assert both.server.data == parts[0], note
        assert both.client.data == parts[1], note
        for side in sides:
            calls = [call for call in side.calls if call not in ("pause", "resume", "data")]
            assert calls == ["made", "eof", "lost"], (calls, note)
            assert side.calls[-1] == "lost", note


class Deferring(Note):
    """Does its work in tasks, as a protocol that keeps its callbacks short."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[asyncio.Task[None]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._begin("set up")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._begin("worked")

    def _begin(self, what: str) -> None:
        async def work() -> None:
            self.calls.append(what)

        self.tasks.append(asyncio.ensure_future(work()))


async def test_h06_each_callback_has_a_turn(address: str) -> None:
    """As over TCP, a task that a callback begins runs before the next kind of callback.

    What is written and closed at once arrives together, and with the connection itself.
    """

    class Brief(Note):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.write(b"x")
            self.transport.close()

    wanted = ["made", "set up", "data", "worked", "eof", "lost"]
    for side in ("client", "server"):
        ends: dict[str, Any] = {"client": Brief, "server": Brief, side: Deferring}
        for _ in range(8):
            async with noted(address, **ends) as both:
                judged = getattr(both, side)
                await both.client.ended()
                await both.server.ended()
                assert judged.calls == wanted
                await asyncio.gather(*judged.tasks)


@pytest.mark.parametrize("end", ["write_eof", "close"])
@pytest.mark.parametrize("method", ["readline", "readuntil", "readexactly"])
async def test_a_peer_ends_in_the_middle_of_what_a_reader_awaits(
    address: str, end: str, method: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"go\n"
        writer.write(b"one\nrest")
        await writer.drain()
        assert await reader.readline() == b"waiting\n"
        getattr(writer, end)()
        await reader.read()
        writer.close()

    async with asyncio.timeout(20), await aiordma.start_server(serve, address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await aiordma.open_connection(address, port)
        writer.write(b"go\n")
        assert await reader.readline() == b"one\n"
        awaited = reader.readexactly(10) if method == "readexactly" else getattr(reader, method)()
        task = asyncio.ensure_future(awaited)
        await asyncio.sleep(0)  # it waits, with the rest in the ring or on its way
        writer.write(b"waiting\n")
        if method == "readline":
            assert await task == b"rest"
        else:
            with pytest.raises(asyncio.IncompleteReadError) as caught:
                await task
            assert caught.value.partial == b"rest"
        writer.close()
