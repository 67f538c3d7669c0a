"""Rows N and S7 of the matrix: what a bad wire does to programs; test_matrix.py runs this file."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

import aiordma
from aiordma import Broadcast, ConnectionConfig, RemoteRegion, StreamConfig
from aiordma.cm import EventType
from aiordma.endpoint.config import plan_of
from aiordma.streams.plan import plan_of as stream_plan_of
from aiordma.testing import faults
from aiordma.verbs import AsyncEventType
from tests.device.meeting import Pair, are_alive, meet, paired, part, talk_both_ways
from tests.device.noting import write_and_tell
from tests.device.shared import *  # noqa: F403  # nothing is left behind
from tests.device.streaming import noted, stream_pair
from tests.device.test_stream_tls import NAME, Contexts
from tests.device.test_stream_tls import contexts as contexts
from tests.fabric.knobs import ALWAYS, MS, raised_by_manager, set_addresses, set_link, wire

HERE = os.environ["AIORDMA_FABRIC_ADDR"]
LIMIT_S = 30
#: A timeout of the adapter is 16 ms: after about 0.1 s without an answer it gives up.
QUICK = ConnectionConfig(ack_timeout=12, close_timeout_s=1)
#: The same of streams, whose adapter has its own timeout.
STREAM = StreamConfig(close_timeout_s=1)
SIZES = (1, 4000, 20_000, 100_000)
#: In a million: what each row asks for.
LOSSES = [10_000, 50_000, 200_000]
BAD = [
    pytest.param({"duplicate": 100_000}, id="10% twice"),
    pytest.param({"delay": 250_000, "delay_ns": 2 * MS}, id="25% out of order"),
    pytest.param({"delay": ALWAYS, "delay_ns": 10 * MS}, id="all late"),
]


async def talk(ends: Pair, count: int = 30) -> None:
    """Messages of all ways of transport, both ways at once."""
    await talk_both_ways(ends, count, lambda rng: rng.choice(SIZES))


async def stream_through(total: int = 500_000) -> None:
    """A stream there and back; every byte is compared."""
    data = os.urandom(total)
    async with stream_pair(HERE, STREAM) as ((reader, writer), (theirs, answers)):

        async def send(to: asyncio.StreamWriter) -> None:
            for at in range(0, total, 30_000):
                to.write(data[at : at + 30_000])
                await to.drain()
            to.write_eof()

        got = await asyncio.gather(theirs.read(), reader.read(), send(writer), send(answers))
        assert got[0] == got[1] == data


# N1 to N5


@pytest.mark.parametrize("loss", LOSSES)
async def test_n01_lost_packets_are_sent_again(loss: int) -> None:
    """At 20% the adapter may give up, and then the program is told."""
    async with asyncio.timeout(LIMIT_S), paired(HERE, QUICK) as ends:
        with wire({"loss": loss}):
            try:
                await talk(ends, 100)
            except* aiordma.ConnectionLostError:
                assert loss == max(LOSSES)


async def test_n01_lost_packets_of_a_stream() -> None:
    async with asyncio.timeout(LIMIT_S):
        with wire({"loss": 50_000}):
            await stream_through()


@pytest.mark.parametrize("fault", BAD)
async def test_n02_n03_n05_packets_come_twice_in_another_order_and_late(
    fault: dict[str, int],
) -> None:
    async with asyncio.timeout(LIMIT_S), paired(HERE) as ends:
        with wire(fault):
            await talk(ends)
            await stream_through()


@pytest.mark.parametrize("fault", [pytest.param({"loss": 50_000}, id="5% lost"), *BAD])
async def test_n01_n02_n03_n05_no_note_overtakes_its_data(fault: dict[str, int]) -> None:
    async with asyncio.timeout(LIMIT_S), paired(HERE) as ends:
        with wire(fault):
            await write_and_tell(ends, 200)


@asynccontextmanager
async def named(ends: Pair, memory: bytearray, **rights: bool) -> AsyncIterator[RemoteRegion]:
    """Memory of the server, as the client knows it from a message."""
    client, server = ends
    async with server.expose(memory, **rights) as region:
        await server.send(region.to_bytes())
        yield RemoteRegion.from_bytes(bytes(await client.recv()))


@pytest.mark.parametrize("fault", [pytest.param({"loss": 50_000}, id="5% lost"), *BAD])
async def test_n01_n02_n03_n05_a_batch_is_whole(fault: dict[str, int]) -> None:
    theirs = bytearray(os.urandom(64_000))
    async with asyncio.timeout(LIMIT_S), paired(HERE) as ends:
        client, _ = ends
        async with named(ends, theirs, read=True, write=True) as remote:
            with wire(fault):
                for turn in range(3):
                    before, mine = bytes(theirs), os.urandom(32_000)
                    async with client.batch() as batch:
                        for at in range(0, 32_000, 64):
                            batch.read(remote, offset=at, size=64)
                            batch.write(remote, mine[at : at + 64], offset=32_000 + at)
                    assert b"".join(batch.results[::2]) == before[:32_000], turn
                    assert theirs[32_000:] == mine
                    theirs[:32_000] = os.urandom(32_000)
        await are_alive(ends)


@pytest.mark.parametrize("fault", [pytest.param({"loss": 50_000}, id="5% lost"), *BAD])
async def test_n01_n02_n03_n05_the_end_of_a_lease_is_known(fault: dict[str, int]) -> None:
    """What tells of it comes before each message that was sent later."""
    async with asyncio.timeout(LIMIT_S), paired(HERE) as ends:
        client, server = ends
        with wire(fault):
            for number in range(20):
                into, value = bytearray(8), number.to_bytes(8)
                async with named(ends, bytearray(value), read=True) as remote:
                    await client.read(remote, into)
                    assert into == value
                await server.send(b"over")
                await client.recv()
                with pytest.raises(aiordma.StaleRegionError):
                    await client.read(remote, into)
        await are_alive(ends)


@pytest.mark.parametrize("fault", [pytest.param({"loss": 50_000}, id="5% lost"), *BAD])
@pytest.mark.parametrize("slow", ["wait", "latest"])
async def test_n01_n02_n03_n05_a_broadcast_keeps_its_word(
    fault: dict[str, int], slow: Literal["wait", "latest"]
) -> None:
    """All of it in order, or no message behind a newer one, and the last."""
    count = 200
    config = ConnectionConfig(recv_depth=1 if slow == "latest" else 4)
    async with (
        asyncio.timeout(LIMIT_S),
        paired(HERE, config) as (a, one),
        paired(HERE, config) as (b, two),
    ):

        async def receive(conn: aiordma.Connection) -> list[int]:
            got: list[int] = []
            while not got or got[-1] < count:
                got.append(int.from_bytes(bytes(await conn.recv())))
            return got

        with wire(fault):
            readers = [asyncio.create_task(receive(conn)) for conn in (one, two)]
            cast = Broadcast([a, b], slow=slow)
            for number in range(1, count + 1):
                await cast.send(number.to_bytes(8))
                await asyncio.sleep(0)
            for got in await asyncio.gather(*readers):
                assert got == sorted({*got})
                assert slow == "latest" or len(got) == count


async def encrypted(contexts: Contexts, fault: dict[str, int]) -> None:
    """TLS over a stream whose bytes somebody changes on their way."""
    data = os.urandom(100_000)
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65_536):
                got.extend(piece)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async with await aiordma.start_server(serve, HERE, 0, ssl=contexts.server) as server:
        _, writer = await aiordma.open_connection(
            HERE, server.port, ssl=contexts.client, server_hostname=NAME
        )
        with wire(fault), contextlib.suppress(OSError):
            for at in range(0, len(data), 10_000):
                writer.write(data[at : at + 10_000])
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert len(got) < len(data)
    assert bytes(got) == data[: len(got)]


@pytest.mark.parametrize("fault", ["corrupt", "forge"])
async def test_n04_s07_tls_delivers_no_byte_that_was_changed(
    contexts: Contexts,
    fault: str,
) -> None:
    """The sum of the packet is right: the adapter takes it for a true one."""
    async with asyncio.timeout(LIMIT_S):
        await encrypted(contexts, {fault: ALWAYS})


@pytest.mark.parametrize("fault", ["corrupt", "forge"])
async def test_n04_s07_messages_are_whole_or_the_connection_ends(fault: str) -> None:
    """Without TLS a byte may be wrong; the protocol's own fields are checked."""
    async with asyncio.timeout(LIMIT_S):
        for _ in range(20):
            async with paired(HERE, QUICK) as (client, server):
                with wire({fault: ALWAYS}), contextlib.suppress(aiordma.RdmaError):
                    await client.send(bytes(100))
                    with await server.recv() as message:
                        assert len(message) == 100
                client.abort()
                server.abort()
        async with paired(HERE) as ends:
            await talk(ends)


async def test_n06_a_slow_wire_holds_the_writer() -> None:
    """4 MB/s, and a queue of 20 ms behind which packets are lost."""
    total = 600_000
    async with asyncio.timeout(LIMIT_S), noted(HERE, STREAM) as both:
        with wire({"rate": 4_000_000, "queue_ns": 20 * MS}):
            client, server = both.client, both.server
            data = os.urandom(total)
            for at in range(0, total, 50_000):
                client.transport.write(data[at : at + 50_000])
            assert client.paused
            held = client.transport.get_write_buffer_size()
            assert 0 < held <= total
            assert await server.received(total) == data
            assert not client.paused


# N7 to N9


@pytest.mark.parametrize("busy", [True, False], ids=["sending", "idle"])
async def test_n07_both_ends_notice_a_dead_wire(*, busy: bool) -> None:
    """Who sends, after the adapter's retries; who is idle, by the sign of life that it asks for."""
    config = QUICK if busy else dataclasses.replace(QUICK, keepalive_s=0.1, idle_timeout_s=0.6)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT_S), paired(HERE, config) as (client, server):
        waiting = [asyncio.create_task(end.recv()) for end in (client, server)]
        await asyncio.sleep(0)
        begun = loop.time()
        with faults.partition():
            if busy:
                await asyncio.gather(client.send(b"x"), server.send(b"x"))
            await asyncio.wait(waiting)
        for task in waiting:
            assert isinstance(task.exception(), aiordma.ConnectionLostError)
        assert loop.time() - begun < 10


async def test_n07_no_end_retries_for_ever() -> None:
    """Seven would mean that on some adapters."""
    plans = plan_of(ConnectionConfig()), stream_plan_of(StreamConfig(), iwarp=False)
    for each in plans:
        assert each.policy.max_retry_count == 6


async def test_n08_a_wire_that_heals_in_time_costs_nothing() -> None:
    async with asyncio.timeout(LIMIT_S), paired(HERE) as ends:
        talking = asyncio.create_task(talk(ends, 100))
        await asyncio.sleep(0)
        with faults.partition():
            await asyncio.sleep(0.3)  # how long the break is
            assert not talking.done()
        await talking


#: The manager's own time to repeat is seconds.
SOON = {"cm_response_ns": 50 * MS}
MESSAGES = ["REQ", "REP", "RTU", "DREQ", "DREP", "REJ"]


async def visit() -> None:
    """Connect, talk, and close."""
    async with paired(HERE, QUICK) as ends:
        await are_alive(ends)


async def refused() -> None:
    """A connect that is refused."""
    with pytest.raises(aiordma.ConnectionRejectedError):
        await aiordma.connect(HERE, 1, config=QUICK, timeout=LIMIT_S)


@pytest.mark.parametrize("message", MESSAGES)
async def test_n09_a_lost_message_of_the_manager_is_repeated(message: str) -> None:
    with wire(SOON | {f"lost {message}": 1}):
        async with asyncio.timeout(LIMIT_S):
            await (refused() if message == "REJ" else visit())


@pytest.mark.parametrize("message", ["REQ", "REP"])
async def test_n09_a_connect_that_is_never_answered_ends_in_time(message: str) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0, config=QUICK) as listener:
        begun = loop.time()
        with wire(SOON | {f"lost {message}": -1}), pytest.raises(aiordma.ConnectTimeoutError):
            await aiordma.connect(HERE, listener.port, config=QUICK, timeout=1)
        assert loop.time() - begun < 3
        ends = await meet(listener, HERE, config=QUICK)
        await are_alive(ends)
        await part(*ends)


async def test_n09_data_confirms_a_connection_whose_confirmation_is_lost() -> None:
    with wire({"lost RTU": -1}):
        async with asyncio.timeout(LIMIT_S), paired(HERE, QUICK) as ends:
            await are_alive(ends)


@pytest.mark.parametrize("message", ["DREQ", "DREP"])
async def test_n09_a_close_that_is_never_answered_ends_in_time(message: str) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT_S):
        async with paired(HERE, QUICK) as (client, server):
            with wire({f"lost {message}": -1}):
                begun = loop.time()
                await asyncio.gather(client.close(), server.close())
                assert loop.time() - begun < 4


# N10 to N14


@pytest.fixture
def link() -> Iterator[None]:
    """The link of the first device is up again afterwards."""
    yield
    set_link(0, up=True)


@pytest.mark.usefixtures("link")
async def test_n10_a_cable_that_is_out_for_a_moment() -> None:
    """Idle it is not noticed, but told; and the connection goes on."""
    async with asyncio.timeout(LIMIT_S), paired(HERE) as (client, server):
        with client.events() as events:
            set_link(0, up=False)
            assert (await anext(events)).type == AsyncEventType.PORT_ERR
            sending = asyncio.create_task(client.send(b"held"))
            await asyncio.sleep(0.1)  # how long it is out
            set_link(0, up=True)
            assert (await anext(events)).type == AsyncEventType.PORT_ACTIVE
            await sending
            with await server.recv() as message:
                assert bytes(message) == b"held"


@pytest.mark.usefixtures("link")
async def test_n10_n11_a_port_that_stays_down_ends_who_sends_and_no_listener() -> None:
    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0, config=QUICK) as listener:
        client, server = await meet(listener, HERE, config=QUICK)
        set_link(0, up=False)
        with pytest.raises(aiordma.ConnectionLostError):  # noqa: PT012
            await client.send(b"x")
            await client.flush()
        with pytest.raises(aiordma.RdmaError):
            await aiordma.connect(HERE, listener.port, config=QUICK, timeout=1)
        set_link(0, up=True)
        client.abort()
        server.abort()
        ends = await meet(listener, HERE, config=QUICK)
        await are_alive(ends)
        await part(*ends)


async def test_n12_addresses_that_go_end_who_sends_and_come_back() -> None:
    """Who sends meanwhile is told that the connection is lost; new ones wait for the address."""
    async with asyncio.timeout(LIMIT_S), aiordma.listen(HERE, 0, config=QUICK) as listener:
        client, server = await meet(listener, HERE, config=QUICK)
        with client.events() as events:
            set_addresses(0, present=False)
            try:
                assert (await anext(events)).type == AsyncEventType.GID_CHANGE
                with pytest.raises(aiordma.ConnectionLostError):  # noqa: PT012
                    await client.send(b"x")
                    await client.flush()
                with pytest.raises(aiordma.RdmaError):
                    await aiordma.connect(HERE, listener.port, config=QUICK, timeout=1)
            finally:
                set_addresses(0, present=True)
            assert (await anext(events)).type == AsyncEventType.GID_CHANGE
        client.abort()
        server.abort()
        ends = await meet(listener, HERE, config=QUICK)
        await are_alive(ends)
        await part(*ends)


async def test_n14_another_address_of_the_neighbor_ends_the_connection_once() -> None:
    """The kernel tells UNREACHABLE of a connection that is established."""
    async with asyncio.timeout(LIMIT_S):
        async with paired(HERE, QUICK) as (client, server):
            waiting = [asyncio.create_task(end.recv()) for end in (client, server)]
            await asyncio.sleep(0)
            raised_by_manager(EventType.UNREACHABLE, 0, -110)
            await asyncio.wait(waiting)
            for task in waiting:
                assert isinstance(task.exception(), aiordma.ConnectionLostError)
        async with noted(HERE, STREAM) as both:
            raised_by_manager(EventType.UNREACHABLE, 0, -110)
            for end in (both.client, both.server):
                assert isinstance(await end.ended(), ConnectionError)
                assert end.calls.count("lost") == 1
        await visit()
