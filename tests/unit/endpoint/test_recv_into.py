"""`recv_into` over the fake adapter: copies, READs into memory of the program, the tasks' order."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import mmap
import random
from typing import Any

import pytest

from aiordma.endpoint.config import ConnectionConfig
from aiordma.errors import (
    ConnectionEndedError,
    ConnectionLostError,
    MessageTooLargeError,
    RdmaTimeoutError,
    ResourceClosedError,
)
from tests.inside.endpoint import (
    copy_in_steps,
    copy_up_to,
    limit_fetches,
    limit_revoking,
    read_in_chunks,
)

from ..conftest import cancel_at_every_turn, settle
from ..memory.fake_memory import FakeRegion
from .fabric import FakeLink, Wire, use_fake_regions

CONFIG = ConnectionConfig(
    slot_size=64,
    recv_depth=8,
    send_depth=8,
    rendezvous_window=4,
    rendezvous_threshold=0,
    check_large=True,
)
LARGE = 1000  # it is announced
CHUNK = 300


@pytest.fixture(autouse=True)
def large_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each announced message may be read into the program's memory, in a few pieces."""
    use_fake_regions(monkeypatch)
    copy_up_to(monkeypatch, 0)
    read_in_chunks(monkeypatch, CHUNK)


def some(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


async def opened(config: ConnectionConfig = CONFIG) -> Wire:
    wire = Wire(config, config)
    await wire.open()
    return wire


def no_copies(link: FakeLink) -> None:
    """Fail where the library takes memory of its own for a message."""

    async def take(size: int) -> Any:
        raise AssertionError("a buffer of the library")

    link.pool.take = take


async def until_read(wire: Wire, count: int) -> None:
    """Have frames travel until so many READs are under way, of which none is served."""
    for _ in range(1000):
        if len(wire.links[1].reads) == count:
            return
        for step in wire.steps():
            if step[0] != "read":
                wire.step(step)
                break
        await settle(1)
    raise AssertionError(f"{len(wire.links[1].reads)} READs, not {count}")


async def in_the_middle(
    config: ConnectionConfig = CONFIG,
) -> tuple[Wire, bytearray, asyncio.Task[int], asyncio.Task[None]]:
    """A large message of which some READs are under way: its buffer, and the tasks of both ends."""
    wire = await opened(config)
    buffer = bytearray(LARGE)
    receiving = asyncio.create_task(wire.ends[1].recv_into(buffer))
    sending = asyncio.create_task(wire.ends[0].send(some(LARGE)))
    await until_read(wire, 4)
    return wire, buffer, receiving, sending


async def test_a_large_message_needs_no_memory_of_the_library() -> None:
    wire = await opened()
    no_copies(wire.links[1])
    buffer = bytearray(LARGE)
    for number in range(3):
        receiving = asyncio.create_task(wire.ends[1].recv_into(buffer))
        sending = asyncio.create_task(wire.ends[0].send(some(LARGE, number)))
        await wire.run()
        assert await receiving == LARGE
        assert buffer == some(LARGE, number)
        await sending
    await wire.close()


async def test_none_is_fetched_ahead_until_a_recv() -> None:
    wire = await opened()
    sends = [asyncio.create_task(wire.ends[0].send(some(LARGE, n))) for n in range(6)]
    await wire.run()
    assert sum(send.done() for send in sends) == 6, "they were fetched ahead"
    buffer = bytearray(LARGE)
    for number in range(6):
        assert await wire.ends[1].recv_into(buffer) == LARGE  # by a copy
        assert buffer == some(LARGE, number)
    sends = [asyncio.create_task(wire.ends[0].send(some(LARGE, n))) for n in range(3)]
    await wire.run()
    assert not any(send.done() for send in sends)
    receiving = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    assert (await receiving).tobytes() == some(LARGE, 0)
    assert all(send.done() for send in sends)
    await wire.close()


@pytest.mark.parametrize("size", [10, 200, LARGE])
@pytest.mark.parametrize("ahead", [True, False])
async def test_a_buffer_that_is_too_small_takes_nothing(size: int, ahead: bool) -> None:
    wire = await opened(dataclasses.replace(CONFIG, rendezvous_threshold=500))
    small, buffer = bytearray(size - 1), bytearray(size)
    first = None
    if not ahead:
        first = asyncio.create_task(wire.ends[1].recv_into(small))
        await settle()
    sending = asyncio.create_task(wire.ends[0].send(some(size)))
    await wire.run()
    for receiving in (first, wire.ends[1].recv_into(small), wire.ends[1].recv_into(small)):
        if receiving is not None:
            with pytest.raises(MessageTooLargeError, match=f"{size} bytes, the buffer {size - 1}"):
                await receiving
    assert small == bytes(size - 1)
    receive = asyncio.create_task(wire.ends[1].recv_into(buffer))
    await wire.run()
    assert await receive == size
    assert buffer == some(size)
    await sending
    await wire.close()


async def test_the_next_task_gets_a_message_that_was_too_large() -> None:
    wire = await opened()
    small, buffer = bytearray(5), bytearray(LARGE)
    first = asyncio.create_task(wire.ends[1].recv_into(small))
    await settle()
    second = asyncio.create_task(wire.ends[1].recv_into(buffer))
    third = asyncio.create_task(wire.ends[1].recv())
    await settle()
    sends = [asyncio.create_task(wire.ends[0].send(some(LARGE, n))) for n in range(2)]
    await wire.run()
    with pytest.raises(MessageTooLargeError):
        await first
    assert await second == LARGE
    assert buffer == some(LARGE, 0)
    assert (await third).tobytes() == some(LARGE, 1)
    await asyncio.gather(*sends)
    await wire.close()


@pytest.mark.parametrize("seed", range(40))
async def test_tasks_in_line_get_the_messages_in_their_order(seed: int) -> None:
    """Whatever kind of task waits, and whatever size comes; some tasks are canceled."""
    rng = random.Random(seed)
    wire = await opened()
    got: list[bytes] = []

    async def receive(into: bool) -> None:
        if into:
            buffer = bytearray(LARGE)
            size = await wire.ends[1].recv_into(buffer)
            got.append(bytes(buffer[:size]))
        else:
            got.append((await wire.ends[1].recv()).tobytes())

    sizes = [rng.choice((0, 3, 48, 100, LARGE)) for _ in range(12)]
    tasks: list[asyncio.Task[None]] = []

    async def send() -> None:
        for number, size in enumerate(sizes):
            await wire.ends[0].send(some(size, number))

    sending = asyncio.create_task(send())
    while len(got) < len(sizes):
        tasks = [task for task in tasks if not task.done()]
        if len(tasks) < 4:
            tasks.append(asyncio.create_task(receive(rng.random() < 0.6)))
        await settle(rng.randrange(3))
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
        for _ in range(2):
            if steps := wire.steps():
                wire.step(rng.choice(steps))
            await settle(1)
    assert got == [some(size, number) for number, size in enumerate(sizes)]
    await wire.run()
    await sending
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wire.close()
    assert FakeRegion.regions == {}


@pytest.mark.parametrize("served", [0, 1, 2])
async def test_a_canceled_read_is_waited_for_and_done_anew(served: int) -> None:
    wire, buffer, receiving, sending = await in_the_middle()
    for _ in range(served):
        wire.links[1].read()
        await settle()
    receiving.cancel()
    await settle(20)
    assert not receiving.done(), "READs are under way"
    receiving.cancel()
    await settle(20)
    assert not receiving.done()
    with pytest.raises(BufferError):
        buffer.append(0)
    while wire.links[1].reads:
        wire.links[1].read()
    await settle(20)
    assert receiving.cancelled()
    buffer[:] = b"\xee" * LARGE
    buffer.append(0)
    again = bytearray(LARGE)
    receive = asyncio.create_task(wire.ends[1].recv_into(again))
    await wire.run()
    assert await receive == LARGE
    assert again == some(LARGE)
    assert buffer == b"\xee" * LARGE + b"\0"
    await sending
    await wire.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_memory_is_let_go_that_a_thread_registers_for_a_canceled_call(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """However often the call is canceled while the thread is at it."""
    monkeypatch.setattr("aiordma.endpoint.large.fetch.INLINE_BYTES", 0)
    monkeypatch.setattr("aiordma.endpoint.large.fetch.MemoryRegion", FakeRegion)
    wire = await opened()
    link: Any = wire.links[1]
    register, registered = link.register, asyncio.Event()

    async def slowly(memory: Any, access: Any) -> Any:
        await registered.wait()
        return await register(memory, access)

    link.register = slowly
    buffer = bytearray(LARGE)
    receiving = asyncio.create_task(wire.ends[1].recv_into(buffer))
    sending = asyncio.create_task(wire.ends[0].send(some(LARGE)))
    await wire.run()
    for _ in range(times):
        receiving.cancel()
        await settle()
    assert not receiving.done()
    registered.set()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    buffer.append(0)
    receive = asyncio.create_task(wire.ends[1].recv_into(buffer))
    await wire.run()
    assert await receive == LARGE
    await sending
    await wire.close()
    assert FakeRegion.regions == {}


async def test_a_canceled_read_leaves_the_message_to_a_task_that_waits() -> None:
    wire = await opened()
    receiving = asyncio.create_task(wire.ends[1].recv_into(bytearray(LARGE)))
    await settle()
    waiting = asyncio.create_task(wire.ends[1].recv())
    sending = asyncio.create_task(wire.ends[0].send(some(LARGE)))
    await until_read(wire, 4)
    receiving.cancel()
    await wire.run()
    assert receiving.cancelled()
    assert (await waiting).tobytes() == some(LARGE)
    await sending
    await wire.close()


async def test_a_coroutine_that_is_closed_leaves_the_message() -> None:
    """No wait is possible: the buffer stays exported until the READs have ended."""
    wire = await opened()
    buffer = bytearray(LARGE)
    sending = asyncio.create_task(wire.ends[0].send(some(LARGE)))
    receive = wire.ends[1].recv_into(bytearray(LARGE + 1))
    first = asyncio.create_task(receive)
    await wire.run()
    assert await first == LARGE
    await sending
    sending = asyncio.create_task(wire.ends[0].send(some(LARGE)))
    await wire.run()
    left = wire.ends[1].recv_into(buffer)
    left.send(None)
    assert wire.links[1].reads
    left.close()
    with pytest.raises(BufferError):
        buffer.append(0)
    receiving = asyncio.create_task(wire.ends[1].recv())
    await wire.run()
    assert (await receiving).tobytes() == some(LARGE)
    buffer.append(0)
    await sending
    await wire.close()


async def test_reads_that_hang_end_with_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_fetches(monkeypatch, 0.05)
    wire, buffer, receiving, sending = await in_the_middle(CONFIG)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    buffer.append(0)
    with pytest.raises(ConnectionLostError) as lost:
        await wire.ends[1].recv_into(buffer)
    assert isinstance(lost.value.__cause__, RdmaTimeoutError)
    await wire.lose()
    with pytest.raises(ConnectionLostError):
        await sending
    assert FakeRegion.regions == {}


@pytest.mark.parametrize("again", [False, True])
async def test_the_wait_for_memory_is_bounded_however_often_it_is_canceled(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The connection is ended, and not even that makes the adapter let go of the buffer."""
    limit_fetches(monkeypatch, 0.05)
    limit_revoking(monkeypatch, 0.05)
    wire, buffer, receiving, sending = await in_the_middle()
    flushed = asyncio.Event()
    link: Any = wire.links[1]
    link.quiesce = flushed.wait
    receiving.cancel()
    if again:
        await cancel_at_every_turn(receiving)
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert isinstance(link.failure, RdmaTimeoutError)
    with pytest.raises(BufferError):
        buffer.append(0)
    flushed.set()
    await wire.lose()
    buffer.append(0)
    with pytest.raises(ConnectionLostError):
        await sending


async def test_a_call_is_canceled_while_a_lost_connection_lets_go_of_its_buffer() -> None:
    """The cancellation is waited with, and not swallowed."""
    wire, buffer, receiving, sending = await in_the_middle()
    flushed = asyncio.Event()
    link: Any = wire.links[1]
    link.quiesce = flushed.wait
    losing = asyncio.create_task(wire.lose())
    await settle(20)
    receiving.cancel()
    await settle(20)
    assert not receiving.done(), "READs are under way"
    with pytest.raises(BufferError):
        buffer.append(0)
    flushed.set()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    buffer.append(0)
    await losing
    with pytest.raises(ConnectionLostError):
        await sending


async def test_a_message_that_does_not_match_its_checksum() -> None:
    def wrong(view: memoryview) -> None:
        view[-1] ^= 1

    wire = await opened()
    wire.links[1].damage = wrong
    buffer = bytearray(LARGE)
    receiving = asyncio.create_task(wire.ends[1].recv_into(buffer))
    waiting = asyncio.create_task(wire.ends[1].recv())
    sending = asyncio.create_task(wire.ends[0].send(some(LARGE)))
    await wire.run()
    for task in (receiving, waiting):
        with pytest.raises(ConnectionLostError, match=f"{LARGE} bytes does not match"):
            await task
    buffer.append(0)
    with pytest.raises(ConnectionLostError):
        await sending
    await wire.lose()
    assert FakeRegion.regions == {}


@pytest.mark.parametrize(
    ("code", "raises"), [(errno.EFAULT, False), (errno.EOPNOTSUPP, False), (errno.ENOMEM, True)]
)
async def test_memory_that_cannot_be_registered(code: int, raises: bool) -> None:
    """It gets a copy; but where too much is registered, a copy needs as much."""
    wire = await opened()
    real = wire.links[1].register

    async def refuse(buffer: Any, access: Any) -> Any:
        raise OSError(code, "ibv_reg_mr")

    monkey: Any = wire.links[1]
    monkey.register = refuse
    buffer = bytearray(LARGE)
    receiving = asyncio.create_task(wire.ends[1].recv_into(buffer))
    sending = asyncio.create_task(wire.ends[0].send(some(LARGE)))
    await wire.run()
    if raises:
        with pytest.raises(OSError, match="ibv_reg_mr") as caught:
            await receiving
        assert caught.value.errno == code
        monkey.register = real
        receiving = asyncio.create_task(wire.ends[1].recv_into(buffer))
        await wire.run()
    assert await receiving == LARGE
    assert buffer == some(LARGE)
    await sending
    await wire.close()


async def test_a_message_that_was_fetched_ahead_is_copied_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And stays the next if the task is canceled between two."""
    copy_in_steps(monkeypatch, 99)
    wire = await opened()
    sending = asyncio.create_task(wire.ends[0].send(some(LARGE)))
    await wire.run()
    await sending
    buffer = bytearray(b"\xee" * LARGE)
    receiving = asyncio.create_task(wire.ends[1].recv_into(buffer))
    other = asyncio.create_task(wire.ends[1].recv())
    await settle(3)
    assert not receiving.done()
    assert not other.done()
    receiving.cancel()
    await settle(3)
    assert receiving.cancelled()
    assert buffer.startswith(some(LARGE)[:99])
    assert buffer.endswith(b"\xee" * 99)
    assert (await other).tobytes() == some(LARGE)
    await wire.close()


def read_only() -> Any:
    return mmap.mmap(-1, 100, access=mmap.ACCESS_READ)


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (b"abc", BufferError), (memoryview(b"abc"), BufferError), (read_only(), BufferError),
        (bytearray(), ValueError), (memoryview(bytearray(8))[::2], ValueError),
        ("text", TypeError), (8, TypeError), (None, TypeError), ([bytearray(3)], TypeError),
    ],
)  # fmt: skip
async def test_a_wrong_buffer_is_refused_at_the_call(buffer: Any, error: type[Exception]) -> None:
    wire = await opened()
    await wire.ends[0].send(b"")
    await wire.run()
    with pytest.raises(error):
        await wire.ends[1].recv_into(buffer)
    assert wire.ends[1].stats.messages_received == 0
    assert len(await wire.ends[1].recv()) == 0
    await wire.close()


async def test_requests_leave_no_message_to_take() -> None:
    wire = await opened()
    end = wire.ends[1]
    end.requests()
    with pytest.raises(RuntimeError, match=r"recv_into\(\)"):
        await end.recv_into(bytearray(8))
    await wire.close()


async def test_a_connection_that_breaks_in_the_middle() -> None:
    wire, buffer, receiving, sending = await in_the_middle()
    wire.links[1].fail(ConnectionResetError(errno.ECONNRESET, "lost"))
    with pytest.raises(ConnectionLostError):
        await receiving
    buffer.append(0)
    assert wire.links[1].closed, "it ended when the adapter was done with the buffer"
    await wire.lose()
    with pytest.raises(ConnectionLostError):
        await sending


async def test_a_close_in_the_middle() -> None:
    wire, buffer, receiving, sending = await in_the_middle(
        dataclasses.replace(CONFIG, close_timeout_s=0.2)  # the peer is not heard any more
    )
    closing = asyncio.create_task(wire.ends[1].close())
    await settle()
    with pytest.raises(ResourceClosedError):
        await receiving
    buffer.append(0)
    await closing
    await wire.lose()
    with pytest.raises(ConnectionLostError):
        await sending


async def test_the_end_is_told() -> None:
    wire = await opened()
    receiving = asyncio.create_task(wire.ends[1].recv_into(bytearray(8)))
    await settle()
    await wire.ends[0].send(b"last")
    closing = asyncio.create_task(wire.ends[0].send_eof())
    await wire.run()
    assert await receiving == 4
    with pytest.raises(ConnectionEndedError):
        await wire.ends[1].recv_into(bytearray(8))
    await closing
    await wire.close()
