"""examples/kv.py: arrays by RDMA READ, and never parts of two of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import aiordma
from examples import kv
from tests.device.oracle import until
from tests.device.running import LIMIT_S, Program

pytestmark = [pytest.mark.device, pytest.mark.program]

PORT = 18520
NUMBERS = 25_000
VERSIONS = 150

HAMMERS = """
import asyncio, sys
from examples import kv

async def main(host, port):
    async with kv.connect(host, int(port)) as client:
        while True:
            await client.get("big")
            print("read", flush=True)

try:
    asyncio.run(main(*sys.argv[1:]))
except OSError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class Watched(kv.Store):
    """Counts the values that were replaced while a client read them."""

    replaced_while_read = 0

    def publish(self, key: str, value: kv.Value) -> None:
        free = self.free_bytes
        had = key in self.values
        super().publish(key, value)
        self.replaced_while_read += had and self.free_bytes == free


class Careless(kv.Store):
    """Does not keep the places of clients that read."""

    def hold(self, value: kv.Value) -> None:
        pass


@contextlib.asynccontextmanager
async def serving(store: kv.Store, address: str) -> AsyncIterator[int]:
    config = kv.config_for(len(store.memory))
    async with (
        asyncio.timeout(LIMIT_S),
        kv.shared(store) as memory,
        aiordma.serve(
            functools.partial(kv.talk, store, memory), address, 0, config=config, memory=memory
        ) as server,
    ):
        yield server.port
        await until(lambda: not server.connections, LIMIT_S)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float64).reshape(3, 4),
        np.array(7, np.int16),
        np.zeros((0, 3), np.float32),
        np.array(["a", "longer"]),
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        np.random.default_rng(1).normal(size=400_000),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
async def test_an_array_comes_back_as_it_was(array: Any, address: str) -> None:
    store = kv.Store(4 << 20)
    async with serving(store, address) as port, kv.connect(address, port) as client:
        assert await client.put("key", array) == 1
        found = await client.get("key")
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert np.array_equal(found, array)
        assert await client.keys() == ["key"]
        await client.delete("key")
        assert await client.keys() == []
        assert store.free_bytes == 4 << 20


async def test_what_cannot_be_done_says_so_and_harms_nothing(address: str) -> None:
    store = kv.Store(64 << 10)
    async with serving(store, address) as port, kv.connect(address, port) as client:
        await client.put("key", [1, 2])
        with pytest.raises(kv.StoreError, match="no key 'other'"):
            await client.get("other")
        with pytest.raises(kv.StoreError, match="no key 'other'"):
            await client.delete("other")
        await client.put("key", np.zeros(8000))
        with pytest.raises(kv.StoreError, match="the store is full: 64000 bytes do not fit"):
            await client.put("key", np.zeros(8000))
        with pytest.raises(aiordma.MessageTooLargeError):
            await client.put("key", np.zeros(80_000))
        with pytest.raises(kv.StoreError, match="1 to 1000 characters"):
            await client.put("", [1])
        with pytest.raises(TypeError, match="object cannot be stored"):
            await client.put("key", np.array([object()]))
        assert (await client.get("key") == np.zeros(8000)).all()


async def test_no_value_is_ever_torn(address: str) -> None:
    """A writer replaces an array of equal numbers while six tasks of three clients read it."""
    store = Watched(1 << 20)
    over = asyncio.Event()

    async def write(client: kv.Client) -> None:
        for number in range(2, VERSIONS):
            await client.put("key", np.full(NUMBERS, number, np.int32))
        over.set()

    async def read(client: kv.Client) -> int:
        last, count = 1, 0
        while not over.is_set():
            array = await client.get("key")
            assert (array == array[0]).all()
            assert array[0] >= last
            last, count = array[0], count + 1
        return count

    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(store, address))
        writer, *readers = [
            await stack.enter_async_context(kv.connect(address, port)) for _ in range(4)
        ]
        await writer.put("key", np.full(NUMBERS, 1, np.int32))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(reader)) for reader in readers * 2]
            group.create_task(write(writer))
        assert all(task.result() for task in tasks)
        # So it was a race, and was won by the places that were held.
        assert store.replaced_while_read > 3
        await writer.delete("key")
        # A reader says that it has read, and waits for no answer.
        await until(lambda: store.free_bytes == 1 << 20, LIMIT_S)


@pytest.mark.parametrize("kind", [kv.Store, Careless])
async def test_a_place_is_kept_until_the_client_has_read(
    kind: type[kv.Store], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is replaced twice between the answer and the read."""
    store = kind(1 << 20)
    async with (
        serving(store, address) as port,
        kv.connect(address, port) as reader,
        kv.connect(address, port) as writer,
    ):
        await writer.put("key", np.full(NUMBERS, 1, np.int32))
        real = aiordma.Connection.read

        async def late(self: aiordma.Connection, *args: Any, **options: Any) -> int:
            for number in (2, 3):
                await writer.put("key", np.full(NUMBERS, number, np.int32))
            return await real(self, *args, **options)

        monkeypatch.setattr(aiordma.Connection, "read", late)
        if kind is Careless:
            with pytest.raises(kv.StoreError, match="checksum"):
                await reader.get("key")
            return
        assert (await reader.get("key") == 1).all()
        monkeypatch.undo()
        assert (await reader.get("key") == 3).all()


async def test_a_canceled_get_disturbs_no_other(address: str) -> None:
    """Whenever it is canceled, the next answer belongs to the next question."""
    store = kv.Store(1 << 20)
    async with serving(store, address) as port, kv.connect(address, port) as client:
        await client.put("a", np.full(1000, 1))
        await client.put("b", np.full(1000, 2))
        for turns in range(30):
            task = asyncio.create_task(client.get("a"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            assert (await client.get("b") == 2).all()
            await asyncio.gather(task, return_exceptions=True)
        await client.delete("a")
        await client.delete("b")
        assert await client.keys() == []
        assert store.free_bytes == 1 << 20


async def test_garbage_ends_in_an_answer(address: str) -> None:
    async with (
        serving(kv.Store(1 << 20), address) as port,
        aiordma.connect(address, port) as conn,
    ):
        await conn.recv()
        for garbage in (b"", b"{", b"[]", b'{"number": 1}', b"\xff" * 100_000, b'{"do": "done"}'):
            await conn.send(garbage)
            with await conn.recv() as answer:
                assert b"error" in answer


# Programs of their own, whatever the tests' loop.


@pytest.fixture
def server(address: str) -> Iterator[Program]:
    with Program("kv.py", "serve", "--host", address, "--memory", "1") as program:
        assert program.line() == f"listening on {address} {PORT}"
        yield program


@pytest.mark.one_loop
async def test_a_killed_client_leaves_its_place(server: Program, address: str) -> None:
    """All of the memory is free again: a value fills it."""
    async with kv.connect(address, PORT) as client:
        await client.put("big", np.arange(100_000, dtype=np.int32))
        with Program("-c", HAMMERS, address, str(PORT)) as hammer:
            assert await asyncio.to_thread(hammer.line) == "read"
            hammer.end(signal.SIGKILL)
        await client.delete("big")
        async with asyncio.timeout(LIMIT_S):
            while True:  # the server hears of the end a moment later
                try:
                    await client.put("all", np.zeros(1 << 20, np.uint8))
                    break
                except kv.StoreError:
                    assert await client.keys() == []
        assert (await client.get("all") == 0).all()
    assert server.end(signal.SIGINT) == (0, "")


@pytest.mark.one_loop
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
async def test_a_server_that_ends(how: signal.Signals, server: Program, address: str) -> None:
    async with kv.connect(address, PORT) as client:
        await client.put("big", np.zeros(1000))
    with Program("-c", HAMMERS, address, str(PORT)) as hammer:
        assert hammer.line() == "read"
        assert server.end(how) == (0 if how == signal.SIGINT else -9, "")
        status, error = hammer.end()
        assert status == 1
        gone = ["ConnectionLostError: ", "ConnectionEndedError: ", "RemoteAccessError: "]
        if how == signal.SIGINT:  # a server that ends says first that its memory is not lent
            gone.append("StaleRegionError: ")
        assert error.startswith(tuple(gone))
    with Program("kv.py", "get", "big", "--host", address) as late:
        status, error = late.end()
        assert status == 1
        assert error.startswith("kv: ")
        assert "no program listens on that port" in error
