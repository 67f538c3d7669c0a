"""`send` of several buffers: a message that is never joined before it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.endpoint.wire import Hello
from aiordma.verbs import Access
from tests.device.meeting import Pair, are_alive, paired
from tests.device.oracle import settle, until
from tests.device.stepping import Steps, for_every_step, run_canceled
from tests.inside.endpoint import exposer_of
from tests.inside.verbs import count_regions, note_regions

pytestmark = pytest.mark.device

KIB, MIB = 1 << 10, 1 << 20
FETCHED = ConnectionConfig(rendezvous_threshold=0)
#: Sizes of the buffers of a message.
SHAPES: dict[str, list[int]] = {
    "none": [],
    "empty": [0, 0],
    "header and body": [64, 1000],
    "a slot, exactly": [16, 4064],
    "fragments": [10, 9000, 0, 1, 5000],
    "many": [7] * 100,
    "landing": [64, 200 * KIB],
    "landing, many": [3 * KIB] * 100,
    "large": [64, 3 * MIB],
    "large first and last": [MIB, 5, 6, 0, MIB + 1],
    "large with small": [64, 300 * KIB, 10, 70 * KIB],
    "large next to each other": [300 * KIB, 300 * KIB, 300 * KIB],
    "large, of small": [60 * KIB] * 40,
    "large, of more than can be told": [70 * KIB, 1] * 20,
}


def buffers(shape: list[int], seed: int) -> list[Any]:
    """Of several kinds."""
    kinds = (bytes, bytearray, memoryview, lambda data: np.frombuffer(data, "u1"))
    rng = random.Random(seed)
    return [kinds[n % 4](rng.randbytes(size)) for n, size in enumerate(shape)]


def joined(parts: list[Any]) -> bytes:
    return b"".join(map(bytes, parts))


@pytest.mark.smoke
@pytest.mark.parametrize("config", [None, FETCHED], ids=["defaults", "fetched"])
async def test_shapes(address: str, config: ConnectionConfig | None) -> None:
    async with paired(address, config) as (client, server):
        for seed, shape in enumerate((*SHAPES.values(), *SHAPES.values())):
            parts = buffers(shape, seed)
            sending = asyncio.create_task(client.send(tuple(parts) if seed % 2 else parts))
            with await server.recv() as message:
                assert message == joined(parts), shape
            await sending
            sending = asyncio.create_task(client.send(parts, imm=seed))
            with await server.recv() as message:
                assert message == joined(parts), shape
                assert message.imm == seed
            await sending
        assert client.stats.messages_sent == server.stats.messages_received
        assert client.stats.bytes_sent == server.stats.bytes_received
        assert not len(exposer_of(client))
        await are_alive((client, server))


@pytest.mark.smoke
async def test_large_buffers_are_read_where_they_lie(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the small buffers between them are copied."""
    client, server = pair
    first, last = bytearray(random.Random(1).randbytes(2 * MIB)), np.arange(100_000.0)
    parts: list[Any] = [b"head", first, b"between", memoryview(b"them"), last]
    target = bytearray(sum(memoryview(part).nbytes for part in parts))
    await asyncio.gather(client.send(b"?"), server.recv_into(target))
    for _ in range(2):
        regions = note_regions(monkeypatch, Access.REMOTE_READ)
        size, _ = await asyncio.gather(server.recv_into(target), client.send(parts))
        assert size == len(target)
        assert target == joined(parts)
        own = [region for region in regions if region.length > 64 * KIB]  # others are copied
        assert [region.length for region in own] == [len(first), last.nbytes]
        assert own[1].addr == last.ctypes.data
        assert all(region.closed for region in own)
    first.append(0)  # it is not exported


async def test_a_peer_that_knows_no_pieces(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a library without the flag of the hello: the message has one piece, which is a copy."""
    real = Hello.pack

    def pack(hello: Hello, room: int) -> bytes:
        packed = bytearray(real(hello, room))
        packed[6] &= ~0x40
        return bytes(packed)

    monkeypatch.setattr(Hello, "pack", pack)
    # Settings of its own: the hello of settings that were used before is kept.
    config = ConnectionConfig(rendezvous_threshold=0, close_timeout_s=7.5)
    async with paired(address, config) as (client, server):
        for seed, shape in enumerate(SHAPES.values()):
            parts = buffers(shape, seed)
            regions = note_regions(monkeypatch, Access.REMOTE_READ)
            sending = asyncio.create_task(client.send(parts))
            with await server.recv() as message:
                assert message == joined(parts)
            await sending
            assert len(regions) <= 1


async def test_that_a_task_waits_for_room(address: str) -> None:
    """The bytes are those of the call, and the order is that of the calls."""
    async with paired(address, ConnectionConfig(recv_depth=4)) as (client, server):
        parts: list[list[Any]] = [[bytearray([n]), bytes([n]) * 10] for n in range(100)]
        tasks = [asyncio.create_task(client.send(each)) for each in parts]
        await asyncio.sleep(0)
        for n in range(100):
            with await server.recv() as message:
                assert message == bytes([n]) * 11
        await asyncio.gather(*tasks)


BAD: dict[str, tuple[list[Any], type[BaseException], str]] = {
    "text": ([b"", "text"], TypeError, "item 1 of a message"),
    "number": ([5], TypeError, "item 0 of a message"),
    "nested": ([b"", [b""]], TypeError, "item 1 of a message"),
    "strided": ([b"", np.zeros(8)[::2]], ValueError, "item 1 of a message"),
    "objects": ([np.zeros(8, object)], TypeError, "references"),
    "strided, large": ([bytes(MIB), np.zeros(MIB)[::2]], ValueError, "item 1 of a message"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_what_is_no_buffer(pair: Pair, bad: str) -> None:
    """It is refused at the call, and the others are not exported afterwards."""
    client, server = pair
    parts, kind, text = BAD[bad]
    other = bytearray(5)
    with pytest.raises(kind, match=text):
        await client.send([other, *parts][1:] if bad == "number" else parts)
    other.append(0)
    assert client.stats.messages_sent == 0
    await are_alive((client, server))


async def test_a_released_message_among_them(pair: Pair) -> None:
    client, server = pair
    await client.send(b"back")
    message = await server.recv()
    await server.send([b"a", message, b"z"])
    assert await client.recv() == b"abackz"
    message.release()
    with pytest.raises(ValueError, match="released"):
        await server.send([b"a", message])
    await are_alive((client, server))


async def test_a_message_is_sent_on_and_released(address: str) -> None:
    """It lends its bytes: a large message may be released before the peer has read it."""
    async with paired(address, FETCHED) as (client, server):
        data = random.Random(2).randbytes(MIB)
        sending = asyncio.create_task(client.send(data))
        message = await server.recv()
        await sending
        back = asyncio.create_task(server.send([b"head", message]))
        with await client.recv() as got:
            assert got == b"head" + data
        await back
        message.release()


@pytest.mark.parametrize("name", ["landing, many", "large, of small", "large first and last"])
async def test_canceled_at_every_step(
    address: str, monkeypatch: pytest.MonkeyPatch, late: bool, name: str
) -> None:
    """The message is sent, or not; no buffer stays registered when the peer has read it."""
    regions = note_regions(monkeypatch, Access.REMOTE_READ)
    async with paired(address, FETCHED) as (client, server):

        async def scenario(steps: Steps) -> None:
            parts = buffers(SHAPES[name], steps.at)
            got: list[bytes] = []

            async def receive() -> None:
                while got[-1:] != [b"last"]:
                    with await server.recv() as message:
                        got.append(bytes(message))

            receiving = asyncio.create_task(receive())
            await run_canceled(client.send(parts), steps)
            await client.send(b"last")
            await receiving
            assert got in ([joined(parts), b"last"], [b"last"])
            await until(lambda: not len(exposer_of(client)), 30)
            own = [region for region in regions if region.length >= MIB]
            await until(lambda: all(region.closed for region in own), 30)

        assert await for_every_step(scenario, late=late, complete=False) >= 1


@pytest.mark.parametrize("side", [0, 1], ids=["this side", "the peer"])
@pytest.mark.parametrize(
    "name", ["landing, many", "large, of small", "large first and last", "large with small"]
)
async def test_aborted_at_every_step(
    address: str, monkeypatch: pytest.MonkeyPatch, late: bool, name: str, side: int
) -> None:
    """No buffer stays exported and no region registered; also of a message that is announced."""
    regions = count_regions(monkeypatch)
    config = ConnectionConfig(rendezvous_threshold=0, check_large=True)
    done: list[bool] = []

    async def scenario(steps: Steps) -> None:
        parts: list[Any] = [bytearray(size) for size in SHAPES[name]]
        async with paired(address, config) as ends:
            steps.act = ends[side].abort
            sending = asyncio.create_task(steps.drive(ends[0].send(parts)))
            receiving = asyncio.create_task(ends[1].recv())
            kinds = [
                type(it) for it in await asyncio.gather(sending, receiving, return_exceptions=True)
            ]
        del sending, receiving, ends
        steps.act = None  # it has the connection
        assert set(kinds) <= {
            type(None),
            aiordma.Message,
            aiordma.ConnectionLostError,
            aiordma.ResourceClosedError,
        }, kinds
        done.append(kinds[0] is type(None))
        await settle()
        for part in parts:
            part.append(0)
        with contextlib.suppress(TimeoutError):
            await until(lambda: not regions(), 10)
        assert not regions(), "memory is still registered"

    assert await for_every_step(scenario, late=late) >= 1
    assert done[-1]
    assert late or not all(done)


async def test_an_end_while_the_peer_does_not_read(address: str) -> None:
    config = ConnectionConfig(rendezvous_threshold=0, receive_buffer_size=1, close_timeout_s=0.3)
    async with paired(address, config) as (client, server):
        parts: list[Any] = [bytearray(MIB), b"between", bytearray(MIB)]
        sending = asyncio.create_task(client.send(parts))
        await until(lambda: len(exposer_of(client)) == 1, 30)
        with pytest.raises(BufferError):
            parts[0].append(0)
        server.abort()
        with pytest.raises(aiordma.ConnectionLostError):
            await sending
        await client.close()
        parts[0].append(0)
        parts[2].append(0)
