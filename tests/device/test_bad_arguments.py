"""Arguments are looked at before anything is taken: a table of public calls and what they refuse.

After each bad call the connection still moves more messages than it has credits and slots, so that
what a call took and did not give back would stop it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, RemoteRegion, StreamConfig
from aiordma.verbs import Access
from tests.device.bad_arguments import (
    LIMIT_S,
    NO_32_BITS,
    NO_64_BITS,
    NO_BUFFER,
    NO_BYTES,
    NO_DEADLINE,
    NO_INT_OR_NONE,
    NO_OFFSET,
    NO_REGION,
    NO_SECONDS,
    STRIDED,
    Bad,
    Mistakes,
    no_mistakes,
)  # fmt: skip
from tests.device.meeting import meet, part
from tests.inside.endpoint import exposer_of, memory_of

pytestmark = pytest.mark.device

SMALL = ConnectionConfig(recv_depth=3, send_depth=3, slot_size=512, rendezvous_window=2)
ROUNDS = 4  # more than a depth
NO_MEMORY: list[Any] = [*NO_BUFFER, STRIDED, True, -1, 0, 1 << 64]
LARGE = bytes(SMALL.slot_size * 2)


@pytest.fixture
def mistakes() -> Iterator[Mistakes]:
    """Bad calls that were taken."""
    with no_mistakes() as made:
        yield made


async def works(ends: tuple[Connection, Connection], payload: bytes = b"ping") -> None:
    client, server = ends
    async with asyncio.timeout(LIMIT_S):
        for number in range(ROUNDS):
            await client.send(payload, imm=number)
            with await server.recv() as message:
                assert (bytes(message), message.imm) == (payload, number)
            await server.send(payload)
            with await client.recv() as message:
                assert bytes(message) == payload


def account(connection: Connection) -> tuple[int, ...]:
    """What a call may take, beside slots: exchanges of large messages, and memory."""
    return exposer_of(connection).window.free, len(memory_of(connection))


async def test_g05_messages_and_memory(address: str, mistakes: Mistakes) -> None:
    async with aiordma.listen(address, 0, config=SMALL) as listener:
        client, server = await meet(listener, address, config=SMALL)
        async with server.expose(4096, read=True, write=True) as there:
            region = await client.register(4096)
            local = bytearray(8)
            batch = client.batch()
            table: list[Bad] = [
                ("send", client.send, [*NO_BYTES, STRIDED]),
                ("send(imm)", lambda x: client.send(b"x", imm=x), NO_32_BITS),
                ("send(large, imm)", lambda x: client.send(LARGE, imm=x), NO_32_BITS),
                ("send(view, imm)", lambda x: client.send(bytearray(8), imm=x), NO_32_BITS),
                ("read(remote)", lambda x: client.read(x, local), NO_REGION),
                ("read(into)", lambda x: client.read(there, x), [*NO_BYTES, b"read-only"]),
                ("read(offset)", lambda x: client.read(there, local, offset=x), NO_OFFSET),
                (
                    "read(region, offset)",
                    lambda x: client.read(there, region, offset=x),
                    [*NO_OFFSET, 1],
                ),
                ("write(remote)", lambda x: client.write(x, b"12345678"), NO_REGION),
                ("write(data)", lambda x: client.write(there, x), [*NO_BYTES, STRIDED]),
                ("write(offset)", lambda x: client.write(there, b"12345678", offset=x), NO_OFFSET),
                ("write(imm)", lambda x: client.write(there, b"1", imm=x), NO_32_BITS),
                ("batch.read(remote)", lambda x: batch.read(x, size=8), NO_REGION),
                ("batch.read(into)", lambda x: batch.read(there, x), [*NO_BYTES, b"read-only"]),
                ("batch.read(offset)", lambda x: batch.read(there, local, offset=x), NO_OFFSET),
                ("batch.read(size)", lambda x: batch.read(there, size=x), [*NO_INT_OR_NONE, -1]),
                ("batch.write(remote)", lambda x: batch.write(x, b"12345678"), NO_REGION),
                ("batch.write(data)", lambda x: batch.write(there, x), [*NO_BYTES, STRIDED]),
                ("batch.write(offset)", lambda x: batch.write(there, b"1", offset=x), NO_OFFSET),
                ("fetch_add(value)", lambda x: client.fetch_add(there, x), NO_INT_OR_NONE),
                ("fetch_add(remote)", lambda x: client.fetch_add(x, 1), NO_REGION),
                (
                    "fetch_add(offset)",
                    lambda x: client.fetch_add(there, 1, offset=x),
                    NO_OFFSET,
                ),
                ("compare_swap", lambda x: client.compare_swap(there, x, 1), NO_64_BITS),
                ("compare_swap(desired)", lambda x: client.compare_swap(there, 1, x), NO_64_BITS),
                ("register", client.register, NO_MEMORY),
                (
                    "register(access)",
                    lambda x: client.register(64, x),
                    [*NO_INT_OR_NONE, -1, 1 << 40],
                ),
                (
                    "expose",
                    lambda x: client.expose(x, read=True),
                    [*NO_BUFFER, STRIDED, True, -1, 0],
                ),
                ("expose(write)", lambda x: client.expose(x, write=True), [b"read-only"]),
                (
                    "expose(timeout)",
                    lambda x: client.expose(64, read=True, timeout=x),
                    NO_DEADLINE,
                ),
            ]
            await works((client, server))
            await works((client, server), LARGE)
            await client.flush()
            for name, call, refused in table:
                for wrong in refused:
                    before = account(client)
                    await mistakes.of_wait(name, call, wrong)
                    if account(client) != before:
                        mistakes.append(f"{name} keeps something of {wrong!r}")
                await works((client, server))
            await works((client, server), LARGE)
            assert await client.read(there, local) == 8
        await part(client, server)


NETWORKS = [5, "10.0.0.0/8", ["nonsense"], ["10.0.0.1/8"], [5], [None], ["fe80::/10%eth0"]]


async def test_what_send_takes_is_told(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        refused: list[tuple[Any, str]] = [("x", r"not str; encode it"), ({"x": 1}, "not dict")]
        for value, words in refused:
            for imm in (None, 1):
                with pytest.raises(TypeError, match=f"a message has to be bytes, .*{words}"):
                    await client.send(value, imm=imm)
        region = RemoteRegion(0, 8, 0x41424344, Access.REMOTE_READ)
        with pytest.raises(TypeError, match=r"RemoteRegion\.from_bytes") as caught:
            await client.read(region.to_bytes(), bytearray(8))
        assert "ABCD" not in str(caught.value)
        with pytest.raises(BufferError, match="use a writable one"):
            client.expose(b"abc", write=True)
        await part(client, server)


async def test_g05_connecting_and_listening(address: str, mistakes: Mistakes) -> None:
    async with aiordma.listen(address, 0, config=SMALL) as listener:
        port = listener.port
        pairs: list[Any] = [b"x", 5, ("a",), ("a", "b"), (1, 2), (None, 1), ("127.0.0.1", 1.5)]
        table: list[Bad] = [
            ("connect(host)", lambda x: aiordma.connect(x, port), [5, None, b"h", object(), 1.5]),
            (
                "connect(port)",
                lambda x: aiordma.connect(address, x),
                [*NO_INT_OR_NONE, 0, -1, 65536],
            ),
            (
                "connect(config)",
                lambda x: aiordma.connect(address, port, config=x),
                [5, "x", StreamConfig()],
            ),
            (
                "connect(private_data)",
                lambda x: aiordma.connect(address, port, private_data=x),
                [*NO_BYTES, bytes(37)],
            ),
            (
                "connect(local_addr)",
                lambda x: aiordma.connect(address, port, local_addr=x),
                pairs,
            ),
            (
                "connect(delay)",
                lambda x: aiordma.connect(address, port, happy_eyeballs_delay=x),
                NO_SECONDS,
            ),
            ("connect(timeout)", lambda x: aiordma.connect(address, port, timeout=x), NO_DEADLINE),
            ("listen(host)", lambda x: aiordma.listen(x, 0), [5, b"h", object(), 1.5]),
            ("listen(port)", lambda x: aiordma.listen(address, x), [*NO_INT_OR_NONE, -1, 65536]),
            ("listen(backlog)", lambda x: aiordma.listen(address, 0, backlog=x), NO_INT_OR_NONE),
            (
                "listen(config)",
                lambda x: aiordma.listen(address, 0, config=x),
                [5, "x", StreamConfig()],
            ),
            ("listen(allow)", lambda x: aiordma.listen(address, 0, allow=x), NETWORKS),
            ("listen(deny)", lambda x: aiordma.listen(address, 0, deny=x), [None, *NETWORKS]),
            (
                "listen(authorize)",
                lambda x: aiordma.listen(address, 0, authorize=x),
                [5, "x", True],
            ),
            ("Keys", aiordma.Keys, [None, 5, b"x" * 16, {}, {"a": b"short"}, {5: b"x" * 16}]),
        ]
        mistakes.of_calls(table)
        ends = await meet(listener, address, config=SMALL)
        await works(ends)
        await part(*ends)


async def test_g05_requests(address: str, mistakes: Mistakes) -> None:
    async with aiordma.listen(address, 0, config=SMALL) as listener:
        requests = listener.requests()

        async def knock() -> Connection:
            return await aiordma.connect(address, listener.port, config=SMALL)

        knocking = asyncio.create_task(knock())
        async with asyncio.timeout(LIMIT_S):
            request = await anext(requests)
        for wrong in [*NO_BYTES, STRIDED, bytes(177)]:
            await mistakes.of_wait("accept", request.accept, wrong)
        for wrong in [5, "x", StreamConfig(), ConnectionConfig(raw=True)]:
            await mistakes.of_wait("accept(config)", lambda x: request.accept(config=x), wrong)
        for wrong in [*NO_BYTES, bytes(149)]:
            await mistakes.of_wait("reject", request.reject, wrong)
        server = await request.accept()
        client = await knocking
        await works((client, server))
        await part(client, server)


def test_g05_names_of_memory(mistakes: Mistakes) -> None:
    region = RemoteRegion(4096, 64, 1, Access.REMOTE_READ)
    table: list[Bad] = [
        ("addr", lambda x: RemoteRegion(x, 8, 1), NO_64_BITS),
        ("length", lambda x: RemoteRegion(8, x, 1), NO_64_BITS),
        ("rkey", lambda x: RemoteRegion(8, 8, x), NO_64_BITS),
        ("rights", lambda x: RemoteRegion(8, 8, 1, x), [*NO_INT_OR_NONE, -1, 1 << 40]),
        ("from_bytes", RemoteRegion.from_bytes, [*NO_BYTES, b"", bytes(24)]),
        ("offset", lambda x: region.check(x, 8, Access.REMOTE_READ), [*NO_OFFSET, 65]),
        ("slice", lambda x: region[x], [5, "x", None, slice(0, 8, 2), slice(1.5, 2)]),
    ]
    mistakes.of_calls(table)
