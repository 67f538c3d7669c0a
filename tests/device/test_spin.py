"""Connections and streams whose waits begin with polling: `wait` and `spin_us`.

The machine of the tests has a single processor.  Both ends are of one loop, so that neither has to
wait for the other's processor; the tests say that there are two.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, StreamConfig
from aiordma._core import Poller
from tests.device.meeting import Pair, paired, talk_both_ways
from tests.device.oracle import until
from tests.device.stepping import Steps, for_every_step, run_canceled
from tests.device.streaming import Note, noted
from tests.inside.link import count_processors, lengthen_spins, poller_of, queue_of, spins_of
from tests.inside.streams import port_of

pytestmark = pytest.mark.device

#: Of a spin that is to last as long as the test, and for how long it does: a test may stand still.
LONG_US, LONG_S = 1_000_000, 20.0
WAITS = ("event", "adaptive", "spin")


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    count_processors(monkeypatch, 2, 2)
    lengthen_spins(monkeypatch, LONG_S)


def spinning(spin_us: float = LONG_US, **values: Any) -> ConnectionConfig:
    return ConnectionConfig(wait="spin", spin_us=spin_us, **values)


@asynccontextmanager
async def polled(address: str, spin_us: float = LONG_US) -> AsyncIterator[Pair]:
    """Two ends, of which only the client's waits begin with polling."""
    async with (
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port, config=spinning(spin_us)) as client,
        await listener.accept() as server,
    ):
        yield client, server


def poller(connection: Connection) -> Poller:
    found = poller_of(connection)
    assert found is not None
    return found


@contextlib.asynccontextmanager
async def waiting(connection: Connection) -> AsyncIterator[asyncio.Task[bytes]]:
    """A task that waits for a message, and is polled for."""

    async def receive() -> bytes:
        return bytes(await connection.recv())

    task = asyncio.create_task(receive())
    try:
        await until(lambda: poller(connection).waiting > 0)
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def exchange(ends: Pair, count: int) -> None:
    client, server = ends

    async def answer() -> None:
        for _ in range(count):
            await server.send(await server.recv())

    async with asyncio.TaskGroup() as group:
        group.create_task(answer())
        for number in range(count):
            await client.send(number.to_bytes(4, "big"))
            assert int.from_bytes(await client.recv(), "big") == number


@pytest.mark.parametrize("processors", [1, 2])
@pytest.mark.parametrize("wait", WAITS)
async def test_messages_both_ways(
    address: str, wait: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_processors(monkeypatch, processors, 2)
    config = ConnectionConfig(wait=wait, spin_us=2000)
    async with paired(address, config) as ends:
        await exchange(ends, 100)
        await talk_both_ways(ends, 30, lambda rng: rng.choice((1, 20_000, 300_000)))


async def test_a_configuration_without_a_word_polls_nothing(pair: Pair) -> None:
    await exchange(pair, 3)
    assert poller_of(pair[0]) is None
    assert not queue_of(pair[0]).closed


async def test_on_the_only_processor_of_the_machine_all_waits_are_by_event(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_processors(monkeypatch, 1, 1)
    for wait in WAITS:
        async with paired(address, ConnectionConfig(wait=wait)) as ends:
            await exchange(ends, 3)
            assert not spins_of(ends[0])
            assert poller_of(ends[0]) is None


async def test_on_a_processor_that_others_may_share_adaptive_is_by_event_and_a_spin_yields(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_processors(monkeypatch, 1, 2)
    async with paired(address, ConnectionConfig(wait="adaptive")) as ends:
        assert not spins_of(ends[0])
        assert poller_of(ends[0]) is None
    async with paired(address, spinning()) as ends:
        assert poller(ends[0]).yields
    count_processors(monkeypatch, 2, 2)
    async with paired(address, spinning()) as ends:
        assert not poller(ends[0]).yields


async def test_a_silent_peer_costs_nothing_after_the_bound(address: str) -> None:
    async with polled(address, 1000) as ends, waiting(ends[0]) as task:
        await until(lambda: not poller(ends[0]).asked)
        used = time.process_time()
        _, pending = await asyncio.wait([task], timeout=0.5)
        assert pending
        assert time.process_time() - used < 0.25, "the loop does not sleep"
        assert not poller(ends[0]).asked
        await ends[1].send(b"at last")
        assert await task == b"at last"


async def test_a_timer_fires_in_the_midst_of_a_spin(address: str) -> None:
    async with polled(address) as ends, waiting(ends[0]):
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, bool]] = []

        def fire(due: float) -> None:
            fired.append((loop.time() - due, poller(ends[0]).asked))

        for number in range(1, 4):
            due = loop.time() + number / 100
            loop.call_at(due, fire, due)
        await until(lambda: len(fired) == 3, LONG_S)
        assert all(asked for _, asked in fired), "the spin was over"
        assert all(late < LONG_S / 2 for late, _ in fired)


async def test_a_wait_that_is_canceled_at_every_step_loses_nothing(
    address: str, late: bool
) -> None:
    # All slots at once: more of them would be taken for what a canceled call has left.
    config = spinning(500, recv_depth=8, send_depth=8, slot_size=1024)
    async with paired(address, config) as (client, server):
        sent = 0
        received: list[int] = []

        async def receive() -> None:
            received.append(int.from_bytes(await client.recv(), "big"))

        async def scenario(steps: Steps) -> None:
            nonlocal sent
            asyncio.get_running_loop().call_soon(asyncio.create_task, server.send(bytes([sent])))
            sent += 1
            await run_canceled(receive(), steps)

        await for_every_step(scenario, late=late)
        async with asyncio.timeout(60):
            while len(received) < sent:
                await receive()
        assert received == list(range(sent))


@pytest.mark.parametrize("end", ["close", "abort", "peer closes", "peer aborts"])
async def test_the_end_in_the_midst_of_a_spin(address: str, end: str) -> None:
    async with polled(address) as ends:
        async with waiting(ends[0]) as task:
            one = ends[1] if "peer" in end else ends[0]
            if "close" in end:
                await one.close()
            else:
                one.abort()
            done, _ = await asyncio.wait([task], timeout=60)
            assert done
            assert isinstance(task.exception(), aiordma.RdmaError)
        left = poller_of(ends[0])
        assert left is None or left.waiting == 0


@pytest.mark.parametrize("wait", WAITS[1:])
async def test_operations(address: str, wait: str) -> None:
    async with paired(address, ConnectionConfig(wait=wait, spin_us=5000)) as (client, server):
        memory = bytearray(b"0123456789")
        async with server.expose(memory, read=True, write=True) as region:
            await server.send(region.to_bytes())
            remote = aiordma.RemoteRegion.from_bytes(bytes(await client.recv()))
            for number in range(30):
                into = bytearray(2)
                await client.read(remote, into, offset=number % 8)
                assert into == memory[number % 8 : number % 8 + 2]
                await client.write(remote, str(number % 10).encode(), offset=number % 8)
            await client.flush()
            assert poller(client).waiting == 0


async def test_a_queue_of_its_own_and_a_pool(address: str) -> None:
    for values in ({"shared_queues": False}, {"shared_slots": 200}):
        async with paired(address, spinning(1000, **values)) as ends:
            await exchange(ends, 20)


# Streams


@pytest.mark.parametrize("processors", [1, 2])
@pytest.mark.parametrize("wait", WAITS)
async def test_lines_over_streams(
    address: str, wait: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_processors(monkeypatch, processors, 2)
    config = StreamConfig(wait=wait, spin_us=2000)

    async def answer(reader: Any, writer: Any) -> None:
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()
        writer.close()

    async with await aiordma.start_server(answer, address, 0, config=config) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await aiordma.open_connection(address, port, config=config)
        for number in range(60):
            writer.write(b"line %d\n" % number)
            assert await reader.readline() == b"LINE %d\n" % number
        spins = spins_of(port_of(writer.transport))
        assert all(spin.waiting == 0 for spin in spins), "no task waits"
        assert bool(spins) == (wait == "spin" or (wait == "adaptive" and processors == 2))
        writer.close()
        await writer.wait_closed()


class Echo(Note):
    """Sends everything back."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.write(data)


@pytest.mark.parametrize("wait", WAITS[1:])
async def test_protocols(address: str, wait: str) -> None:
    config = StreamConfig(wait=wait, spin_us=5000)
    async with noted(address, config, server=Echo) as both:
        for number in range(1, 40):
            both.client.transport.write(b"x")
            await both.client.received(number)
        polled = poller_of(port_of(both.client.transport))
        assert polled is not None
        assert polled.waiting == 2, "both protocols always wait"
        await until(lambda: not polled.asked)


async def test_a_stream_ends_while_its_reader_is_polled_for(address: str) -> None:
    async def leave(reader: Any, writer: Any) -> None:
        await reader.readline()
        writer.close()

    config = StreamConfig(wait="spin", spin_us=LONG_US)
    async with await aiordma.start_server(leave, address, 0, config=config) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await aiordma.open_connection(address, port, config=config)
        writer.write(b"go\n")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


# The ends of programs


def test_a_loop_is_run_again_and_ends_in_the_midst_of_a_spin(
    address: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Ctrl-C ends `asyncio.run`, and what it cancels waits no more."""
    interrupted: list[float] = []

    async def program() -> None:
        async with polled(address) as ends, waiting(ends[0]) as task:
            asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)
            interrupted.append(time.monotonic())
            try:
                await task
            finally:
                interrupted.append(time.monotonic())

    with asyncio.Runner(loop_factory=new_loop) as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.run(program())
        begun, ended = interrupted
        assert ended - begun < LONG_S / 2, "the signal has waited for the end of the spin"

        async def again() -> None:
            async with paired(address, spinning(500)) as ends:
                await exchange(ends, 5)

        runner.run(again())
