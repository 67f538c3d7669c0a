"""`request(into=)`: answers in memory of the program, cancellation, and servers that do harm."""

from __future__ import annotations

import asyncio
import errno
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma import ConnectionConfig
from aiordma.memory import large_memory
from aiordma.requests.wire import ANSWER_BODY, Kind, error_frame, frame
from aiordma.verbs import Access, MemoryRegion
from aiordma.verbs.mr import make_region
from tests.device.meeting import Pair
from tests.device.oracle import until
from tests.device.request_server import answer_to, handler, question
from tests.device.stepping import every_step, run_canceled
from tests.device.test_recv_into import note_reads
from tests.inside.endpoint import fetches_of, hold_reads, link_of, take_frames_as_messages
from tests.inside.requests import exchange_of, held_by
from tests.inside.verbs import note_regions

pytestmark = pytest.mark.device

FETCHED = ConnectionConfig(rendezvous_threshold=0)
KIB, MIB = 1 << 10, 1 << 20
#: Beside the header of a frame; a body; in a landing; announced, and copied; read into place.
SIZES = (0, 1, 3000, 5000, 200 * KIB, 300 * KIB, 5 * MIB + 3)
LIMIT_S = 60.0
NOTHING = (0, 0, 0)
SERVER = Path(__file__).with_name("request_server.py")


@asynccontextmanager
async def asking(
    address: str, config: ConnectionConfig | None = FETCHED, handle: Any = handler
) -> AsyncIterator[Pair]:
    """A client, and the connection of its server."""
    async with (
        aiordma.serve_requests(handle, address, 0, config=config) as server,
        aiordma.connect(address, server.port, config=config) as client,
    ):
        assert await client.request(question(0, 1, 0, 0)) == answer_to(0, 1)
        (other,) = server.connections
        yield client, other


async def is_idle(client: aiordma.Connection) -> None:
    """No number is taken, nothing is fetched, and the next request is answered."""
    calls = exchange_of(client).calls
    await until(lambda: held_by(calls) == NOTHING, LIMIT_S)
    await until(lambda: not fetches_of(client), LIMIT_S)
    assert await client.request(question(5, 9, 0, 0), timeout=LIMIT_S) == answer_to(5, 9)


@pytest.mark.smoke
@pytest.mark.parametrize("config", [None, FETCHED], ids=["defaults", "fetched"])
async def test_sizes(address: str, config: ConnectionConfig | None) -> None:
    array = np.zeros(max(SIZES) + 8, "u1")
    async with asking(address, config) as (client, _):
        before = client.stats.bytes_received
        for seed, size in enumerate((*SIZES, *SIZES)):
            array[:] = 0xEE
            assert await client.request(question(seed, size, 0, 0), into=array) == size
            assert array[:size].tobytes() == answer_to(seed, size)
            assert (array[size:] == 0xEE).all()
        assert client.stats.bytes_received - before >= 2 * sum(SIZES)
        await is_idle(client)


@pytest.mark.one_loop
@pytest.mark.smoke
async def test_a_large_answer_lands_in_the_array(
    address: str, monkeypatch: pytest.MonkeyPatch, *, is_siw: bool
) -> None:
    """Every byte is read into it, none into other memory; on iWARP the bytes are copied."""
    size = 20 * MIB + 5
    array = np.zeros(size, "u1")
    async with asking(address) as (client, _):
        local = note_regions(monkeypatch, Access.LOCAL_WRITE)
        reads = note_reads(client, monkeypatch)
        for seed in range(2):
            got = await client.request(question(seed, size, 0, 0), into=array, timeout=LIMIT_S)
            assert got == size
            assert array.tobytes() == answer_to(seed, size)
            assert sum(length for _, length in reads) == size
            start = array.ctypes.data
            inside = [start <= at and at + n <= start + size for at, n in reads]
            assert all(inside) != is_siw
            assert any(inside) != is_siw
            reads.clear()
        large = [region for region in local if region.length >= MIB]
        assert is_siw or [region.length for region in large] == [size] * 2
        assert is_siw or all(region.closed for region in large)
        await is_idle(client)


async def test_many_at_a_time(address: str) -> None:
    """Answers of all sizes come in any order, each into its own part of one array."""
    rng = random.Random(4)
    sizes = [rng.choice((1, 5000, 100 * KIB, 300 * KIB, 2 * MIB)) for _ in range(40)]
    array = np.zeros((len(sizes), max(sizes)), "u1")

    async def ask(client: aiordma.Connection, number: int) -> None:
        size = sizes[number]
        asked = question(number, size, number % 3 / 50, 0)
        if number % 4:
            assert await client.request(asked, into=array[number]) == size
            assert array[number, :size].tobytes() == answer_to(number, size)
        else:
            with await client.request(asked) as answer:
                assert answer == answer_to(number, size)

    async with asking(address) as (client, _):
        await asyncio.gather(*(ask(client, number) for number in range(len(sizes))))
        assert not array[::4].any()
        await is_idle(client)


async def test_several_are_read_at_a_time(address: str, *, is_siw: bool) -> None:
    """An answer that is not there yet does not keep others from being read into their memory."""
    size = 3 * MIB
    arrays = [np.zeros(size, "u1") for _ in range(3)]
    async with asking(address) as (client, _):
        with hold_reads(client) as held:
            tasks = [
                asyncio.create_task(client.request(question(n, size, 0, 0), into=array))
                for n, array in enumerate(arrays)
            ]
            await until(lambda: fetches_of(client) == 3, LIMIT_S)
            if not is_siw:
                await until(lambda: len(held) > 3, LIMIT_S)  # more than one answer has
        assert await asyncio.gather(*tasks) == [size] * 3
        for number, array in enumerate(arrays):
            assert array.tobytes() == answer_to(number, size)
        await is_idle(client)


@pytest.mark.parametrize("size", [100, 60 * KIB, 3 * MIB])
async def test_too_small(address: str, size: int) -> None:
    """The answer is not lost: the exception has it."""
    async with asking(address) as (client, _):
        buffer = bytearray(b"\xee" * (size - 1))
        with pytest.raises(aiordma.MessageTooLargeError, match=f"{size} bytes, the buffer") as info:
            await client.request(question(1, size, 0, 0), into=buffer)
        assert info.value.size == size
        with info.value.answer as answer:
            assert answer == answer_to(1, size)
        assert buffer == b"\xee" * (size - 1)
        buffer.append(0)
        await is_idle(client)


async def test_a_request_that_is_too_large_has_no_answer(address: str) -> None:
    config = ConnectionConfig(max_message_size=1 << 20)
    async with asking(address, config) as (client, _):
        with pytest.raises(aiordma.MessageTooLargeError) as info:
            await client.request(bytes(2 << 20), into=bytearray(8))
        assert (info.value.size, info.value.answer) == (0, None)
        await is_idle(client)


async def test_what_is_no_memory_is_refused_at_the_call(address: str) -> None:
    refused: list[tuple[Any, type[BaseException]]] = [
        (b"read-only", BufferError), ("text", TypeError), (5, TypeError),
        (np.zeros((4, 4))[:, ::2], ValueError), (np.zeros(2, object), TypeError),
        (bytearray(), ValueError), (np.zeros((0, 3)), ValueError),
    ]  # fmt: skip
    async with asking(address) as (client, server):
        before = server.stats.messages_received
        for into, kind in refused:
            with pytest.raises(kind):
                await client.request(question(1, 1, 0, 0), into=into)
        await is_idle(client)
        assert server.stats.messages_received == before + 1


@pytest.mark.parametrize("size", [10, 60 * KIB, 3 * MIB])
async def test_canceled_at_every_await(address: str, late: bool, size: int) -> None:
    """Nothing is written to the buffer of a call that has ended, and it is not exported."""
    async with asking(address) as (client, _):
        for seed, steps in enumerate(every_step(late=late)):
            buffer = bytearray(size)
            got = await run_canceled(client.request(question(seed, size, 0, 0), into=buffer), steps)
            if got is None:
                buffer[:] = b"\xee" * size
                buffer.append(0)
                await is_idle(client)
                assert buffer == b"\xee" * size + b"\0"
            else:
                assert buffer == answer_to(seed, size)
        assert steps.at > 1
        await is_idle(client)


async def test_the_answer_of_a_call_that_has_left_is_not_read(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers although the call was canceled, as it does if the two cross."""
    take_frames_as_messages(monkeypatch)

    async def serve(connection: aiordma.Connection) -> None:
        async for message in connection:
            number = int.from_bytes(message[4:8], "big")
            if message[2] == Kind.CANCEL:
                await connection.send(bytes(3 * MIB), number | ANSWER_BODY)
            elif message[16:] != b"wait":
                await connection.send(frame(Kind.ANSWER, number) + b"now")

    async with (
        aiordma.serve(serve, address, 0, config=FETCHED) as server,
        aiordma.connect(address, server.port, config=FETCHED) as client,
    ):
        reads = note_reads(client, monkeypatch)
        for into in (bytearray(3 * MIB), None):
            calling = asyncio.create_task(client.request(b"wait", into=into))
            assert await client.request(b"?") == b"now"
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            calls = exchange_of(client).calls
            await until(lambda calls=calls: held_by(calls) == NOTHING, LIMIT_S)  # type: ignore[misc]
        assert await client.request(b"?") == b"now"
        assert client.stats.bytes_received > 6 * MIB  # as the server has sent
        assert reads == []


async def test_memory_that_the_kernel_does_not_register(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes as a message, and is copied; also where no more memory is registered."""
    async with asking(address) as (client, _):
        link, array = link_of(client), np.zeros(4 * MIB, "u1")
        real = type(link).register
        monkeypatch.setattr(large_memory, "SHORT_S", 0.2)
        for number in (errno.EFAULT, errno.ENOMEM):

            async def register(self: Any, buffer: Any, access: Access, number: int = number) -> Any:
                if self is link:
                    raise OSError(number, "ibv_reg_mr")
                return await real(self, buffer, access)

            with monkeypatch.context() as patch:
                patch.setattr(type(link), "register", register)
                got = await client.request(question(number, array.size, 0, 0), into=array)
            assert got == array.size
            assert array.tobytes() == answer_to(number, array.size)
        await is_idle(client)


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("side", [0, 1])
async def test_an_end_in_the_middle(
    address: str, monkeypatch: pytest.MonkeyPatch, how: str, side: int
) -> None:
    config = ConnectionConfig(rendezvous_threshold=0, close_timeout_s=0.5)
    async with asking(address, config) as ends:
        client = ends[0]
        reads = note_reads(client, monkeypatch)
        buffer = bytearray(12 * MIB)
        calling = asyncio.create_task(client.request(question(3, len(buffer), 0, 0), into=buffer))
        await until(lambda: len(reads) > 3, LIMIT_S)
        if how == "abort":
            ends[side].abort()
        else:
            await ends[side].close()
        (result,) = await asyncio.gather(calling, return_exceptions=True)
        if result != len(buffer):  # an end in good order may wait for it
            assert isinstance(result, aiordma.ConnectionLostError | aiordma.ResourceClosedError)
        buffer.append(0)


@pytest.mark.parametrize("side", [0, 1])
async def test_an_end_while_the_buffer_is_registered(
    address: str, monkeypatch: pytest.MonkeyPatch, side: int, *, is_siw: bool
) -> None:
    """The call does not end before the buffer is free, which takes a thread some time."""
    async with asking(address) as ends:
        client = ends[0]
        buffer = bytearray(3 * MIB)
        real = make_region

        async def ends_meanwhile(*args: Any, **options: Any) -> Any:
            region = await real(*args, **options)
            if isinstance(region, MemoryRegion) and not region.access & Access.REMOTE_READ:
                ends[side].abort()
                await until(lambda: link_of(client).closed, LIMIT_S)
            return region

        monkeypatch.setattr("aiordma.endpoint.link.make_region", ends_meanwhile)
        if is_siw:  # the answer is read into memory of the library: the buffer is not registered
            await client.request(question(3, len(buffer), 0, 0), into=buffer)
            assert not link_of(client).closed
        else:
            with pytest.raises((aiordma.ConnectionLostError, aiordma.ResourceClosedError)):
                await client.request(question(3, len(buffer), 0, 0), into=buffer)
        buffer.append(0)


@pytest.mark.one_loop
async def test_a_server_that_is_killed_in_the_middle(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends when the adapter has let go of the buffer; a pool has the same end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), address, "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), LIMIT_S))
        async with aiordma.connect(address, port) as client:
            reads = note_reads(client, monkeypatch)
            buffer = bytearray(48 * MIB)
            calling = asyncio.create_task(
                client.request(question(3, len(buffer), 0, 0), into=buffer)
            )
            await until(lambda: len(reads) > 10, LIMIT_S)
            process.kill()
            with pytest.raises(aiordma.ConnectionLostError) as info:
                await calling
            assert info.value.request_sent
            buffer.append(0)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_pool(address: str) -> None:
    buffer = bytearray(5 * MIB)
    async with (
        aiordma.serve_requests(handler, address, 0) as server,
        aiordma.Pool(address, server.port) as pool,
    ):
        for seed, size in enumerate((10, 5000, 5 * MIB)):
            asked = question(seed, size, 0, 0)
            assert await pool.request(asked, into=buffer, timeout=LIMIT_S) == size
            assert buffer[:size] == answer_to(seed, size)
        with pytest.raises(aiordma.MessageTooLargeError) as info:
            await pool.request(question(7, 6 * MIB, 0, 0), into=buffer)
        assert info.value.answer == answer_to(7, 6 * MIB)
        info.value.answer.release()


LIES: dict[str, str] = {
    "twice": "waits for none",
    "error first": "waits for none",
    "short first": "waits for none",
    "another number": "waits for none",
}


async def ask_on(client: aiordma.Connection) -> None:
    while True:
        await client.request(b"?", into=bytearray(1))


@pytest.mark.parametrize("lie", LIES)
async def test_a_server_that_lies(address: str, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its connection, and the memory of the program is not written to afterwards."""
    take_frames_as_messages(monkeypatch)
    body = bytes(3 * MIB)

    async def serve(connection: aiordma.Connection) -> None:
        async for message in connection:
            number = int.from_bytes(message[4:8], "big")
            sends = [asyncio.ensure_future(connection.send(body, number | ANSWER_BODY))]
            if lie == "twice":
                sends += [asyncio.ensure_future(connection.send(body, number | ANSWER_BODY))]
            elif lie == "error first":
                sends.insert(
                    0, asyncio.ensure_future(connection.send(error_frame(number, 1, "", "no")))
                )
            elif lie == "short first":
                short = frame(Kind.ANSWER, number) + b"short"
                sends.insert(0, asyncio.ensure_future(connection.send(short)))
            else:
                sends[0].cancel()
                wrong = number + 1 | ANSWER_BODY
                sends += [asyncio.ensure_future(connection.send(body, wrong))]
            await asyncio.gather(*sends, return_exceptions=True)

    async with (
        aiordma.serve(serve, address, 0, config=FETCHED) as server,
        aiordma.connect(address, server.port, config=FETCHED) as client,
        asyncio.timeout(LIMIT_S),
    ):
        buffer = bytearray(b"\xee" * len(body))
        first: int | BaseException
        try:
            first = await client.request(b"?", into=buffer)
        except (aiordma.RequestError, aiordma.ConnectionLostError, aiordma.ProtocolError) as exc:
            first = exc
        if lie == "twice":
            assert first == len(body)
        elif lie == "short first":
            assert first == 5
        elif lie == "error first":
            assert isinstance(first, aiordma.RequestError)
        buffer[:] = b"\xee" * len(body)
        buffer.append(0)
        with pytest.raises(aiordma.ProtocolError, match=LIES[lie]):
            await ask_on(client)
        assert buffer == b"\xee" * len(body) + b"\0"


async def test_messages_first(address: str) -> None:
    """`recv_into` before the first request does not change what becomes of the answers."""
    served = asyncio.Event()

    async def serve(connection: aiordma.Connection) -> None:
        await connection.send(b"hello")
        await connection.send(bytes(2 * MIB))
        served.set()
        await aiordma.handle_requests(connection, handler)

    async with (
        aiordma.serve(serve, address, 0, config=FETCHED) as server,
        aiordma.connect(address, server.port, config=FETCHED) as client,
    ):
        buffer = bytearray(2 * MIB)
        assert await client.recv_into(buffer) == 5
        with hold_reads(client):  # the message may be here before the task waits for it
            receiving = asyncio.create_task(client.recv_into(buffer))
            await asyncio.sleep(0)
            await until(lambda: bool(fetches_of(client)), LIMIT_S)
            with pytest.raises(RuntimeError, match="a task waits"):
                await client.request(b"?")
        assert await receiving == 2 * MIB
        await asyncio.wait_for(served.wait(), LIMIT_S)
        for seed in range(3):
            got = await client.request(question(seed, 2 * MIB, 0, 0), into=buffer)
            assert got == 2 * MIB
            assert buffer == answer_to(seed, 2 * MIB)
            with await client.request(question(seed, MIB, 0, 0)) as answer:
                assert answer == answer_to(seed, MIB)
        await is_idle(client)
