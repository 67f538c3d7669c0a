"""Buffers in cycles: views of messages that the collector finds, in every order; kept exceptions.

The collector runs at nearly every allocation (`eager_collector`), so that it comes between any two
steps of the compiled types.  A mistake here is a crash, or, in a build with AddressSanitizer, a
report.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiordma._core import BufferExport, Message
from aiordma._ffi import ffi
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.errors import ConnectionEndedError, ConnectionLostError, ResourceClosedError
from tests.inside.core import is_released
from tests.inside.endpoint import copied_up_to

from ..conftest import Run, eager_collector, settle
from ..endpoint.fabric import Wire

SIZES = (1, 10_000, 100_000, 1_000_000)
SEEDS = range(12)
OVER = (ConnectionLostError, ConnectionEndedError, ResourceClosedError)


@pytest.fixture(autouse=True)
def nothing_goes_wrong_in_silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the collector cannot raise it reports."""
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_value))
    yield
    gc.collect()
    assert reported == []


class Memory:
    """Bytes of a message, and whether they came back."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(b"x" * size)
        self.back: list[bool] = []

    def message(self) -> Message:
        return Message(memoryview(self.bytes), None, self.back.append)

    def is_free(self) -> bool:
        try:
            self.bytes.clear()
        except BufferError:
            return False
        return len(self.back) == 1


def kept(call: Callable[[], object]) -> BaseException | None:
    """The exception of a call, in a cycle with its own frames, as `except E as e: err = e`."""
    try:
        call()
    except BaseException as exc:
        error = exc
        return error  # noqa: RET504  # the name is what makes the cycle
    return None


# What a program does with a message; each returns what it keeps.


def view(message: Message) -> object:
    return memoryview(message)


def view_of_a_view(message: Message) -> object:
    whole = memoryview(message)
    return [whole[1:], whole.cast("B"), whole.toreadonly(), memoryview(whole)[:1]]


def in_a_cycle(message: Message) -> object:
    found: list[Any] = [memoryview(message)]
    found.append(found)
    return found


def for_c(message: Message) -> object:
    return ffi.from_buffer(message)


def for_c_by_a_view(message: Message) -> object:
    held = BufferExport(memoryview(message))
    found: list[Any] = [ffi.from_buffer(held), memoryview(held), held]
    found.append(found)
    return found


def released_while_exported(message: Message) -> object:
    whole = memoryview(message)
    error = kept(message.release)
    assert isinstance(error, BufferError)
    return error, whole


def failed_in_its_block(message: Message) -> object:
    def block() -> None:
        with message:
            looked_at = memoryview(message)
            raise ConnectionLostError(errno.ECONNRESET, f"{len(looked_at)}")

    error = kept(block)
    assert isinstance(error, ConnectionLostError), "the real error"
    return error


def compared(message: Message) -> object:
    return message == bytes(3), message != message, len(message), repr(message)


STEPS = (
    view, view_of_a_view, in_a_cycle, for_c, for_c_by_a_view, released_while_exported, compared,
)  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_a00_a_view_in_a_cycle(size: int) -> None:
    memory = Memory(size)
    message = memory.message()
    found: list[Any] = [memoryview(message)]
    found.append(found)
    del message, found
    assert not memory.is_free()
    gc.collect()
    assert memory.is_free()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", [*STEPS, failed_in_its_block], ids=lambda step: step.__name__)
def test_a00_what_a_program_keeps_goes_with_it(
    step: Callable[[Message], object], size: int
) -> None:
    for with_message in (True, False):
        memory = Memory(size)
        message: Any = memory.message()
        with eager_collector():
            found: list[Any] = [step(message)]
            found.append(found)
            if with_message:
                found.append(message)
            del message, found
        gc.collect()
        assert memory.is_free()


@pytest.mark.parametrize("seed", SEEDS)
def test_a00_every_order(seed: int) -> None:
    rng = random.Random(seed)
    size = SIZES[seed % len(SIZES)]
    memories = [Memory(size) for _ in range(4)]
    messages: list[Any] = [memory.message() for memory in memories]
    found: list[Any] = []
    with eager_collector():
        for _ in range(60):
            choice = rng.randrange(6)
            message = rng.choice(messages)
            if choice <= 1 and message is not None and not is_released(message):
                found.append(rng.choice(STEPS)(message))
            elif choice == 2 and found:
                rng.choice(found)  # a cycle of two
                ring: list[Any] = [found.pop(rng.randrange(len(found))), message]
                ring.append(ring)
                found.append(ring)
                del ring
            elif choice == 3 and found:
                del found[rng.randrange(len(found))]
            elif choice == 4 and message is not None:
                found.append(kept(message.release))
            elif message is not None and rng.random() < 0.2:
                if not is_released(message):
                    found.append(failed_in_its_block(message))
                messages[rng.randrange(len(messages))] = None
            del message
        found.clear()
        messages.clear()
    gc.collect()
    assert all(memory.is_free() for memory in memories)


def test_a00_a_message_that_a_failed_block_let_go_is_not_seen_any_more() -> None:
    memory = Memory(5)
    message = memory.message()
    looked_at = memoryview(message)
    with pytest.raises(KeyError), message:
        raise KeyError
    assert memory.back == [True], "still looked at"
    assert is_released(message)
    with pytest.raises(ValueError, match="released"):
        memoryview(message)
    message.release()
    assert bytes(looked_at) == b"xxxxx"
    with pytest.raises(BufferError):
        memory.bytes.clear()
    looked_at.release()
    assert memory.is_free()


def test_a00_a_view_of_its_own_cannot_be_released_under_a_message() -> None:
    data = bytearray(b"hello")
    whole = memoryview(data)
    message = Message(whole)
    whole.release()
    with pytest.raises(BufferError):
        data.clear()
    assert bytes(message) == b"hello"
    message.release()
    data.clear()


def test_held_bytes() -> None:
    data = bytearray(b"hello")
    whole = memoryview(data)
    held: Any = BufferExport(whole[1:4])
    whole.release()
    again = memoryview(held)
    assert (bytes(again), again.readonly, again.format) == (b"ell", False, "B")
    again[0] = 0x45
    assert data == b"hEllo"
    with pytest.raises(RuntimeError):
        held.__init__(b"other")
    del held
    with pytest.raises(BufferError):
        data.clear()
    again.release()
    data.clear()
    assert memoryview(BufferExport(b"abc")).readonly
    for wrong, error in ((memoryview(b"abcd")[::2], BufferError), (3, TypeError)):
        with pytest.raises(error):
            BufferExport(wrong)
    with pytest.raises(ValueError, match="no buffer"):
        memoryview(BufferExport.__new__(BufferExport))


# ---- connections over a fake adapter --------------------------------------------------------

CONFIG = ConnectionConfig(slot_size=16 * 1024, recv_depth=4, send_depth=4, rendezvous_window=2)


class Echo:
    """The README's server, which keeps the exception that ended it."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    async def serve(self, conn: Connection) -> None:
        try:
            while True:
                message = await conn.recv()
                with message:
                    await conn.send(message)
        except BaseException as exc:
            error = exc
            self.errors.append(error)


async def broken(wire: Wire) -> None:
    for link, end in zip(wire.links, wire.ends, strict=True):
        link.fail(ConnectionResetError(errno.ECONNRESET, "end of the test"))
        end.abort()
        await end.wait_closed()


async def one_echo(rng: random.Random, size: int) -> list[BaseException]:
    """A client asks, and goes at any moment; what the server was told of it."""
    wire = Wire(CONFIG, CONFIG)
    await wire.open()
    client, server = wire.ends
    echo = Echo()
    tasks = [asyncio.create_task(echo.serve(server))]

    async def ask() -> None:
        for _ in range(3):
            await client.send(bytes(size))

    tasks.append(asyncio.create_task(ask()))
    await asyncio.sleep(0)
    for _ in range(rng.randrange(60)):
        if steps := wire.steps():
            wire.step(rng.choice(steps))
        if rng.random() < 0.4:
            await asyncio.sleep(0)
    how = rng.randrange(3)
    if how == 0:
        tasks[0].cancel()
    elif how == 1:
        server.abort()
    else:
        wire.links[1].fail(ConnectionResetError(errno.ECONNRESET, "the client has gone"))
    await settle()
    tasks[1].cancel()
    await broken(wire)
    await asyncio.gather(*tasks, return_exceptions=True)
    return echo.errors


@pytest.mark.usefixtures("fake_regions")
@pytest.mark.parametrize("size", SIZES)
def test_a00_an_echo_whose_client_goes(run: Run, size: int) -> None:
    rng = random.Random(size)

    async def main() -> None:
        for _ in range(6):
            with eager_collector():
                errors = await one_echo(rng, size)
            assert len(errors) == 1
            assert isinstance(errors[0], (*OVER, asyncio.CancelledError)), repr(errors[0])
            errors.clear()
            gc.collect()

    run(main())


@pytest.mark.usefixtures("fake_regions")
@pytest.mark.parametrize("size", [100, 10_000, 100_000, 1_000_000])
@pytest.mark.parametrize("imm", [None, 7])
def test_a00b_a_failed_send_does_not_keep_the_buffer(run: Run, size: int, imm: int | None) -> None:
    async def main() -> None:
        wire = Wire(CONFIG, CONFIG)
        await wire.open()
        client = wire.ends[0]
        data = bytearray(size)

        async def fill() -> None:
            while True:  # until there is no credit left
                await client.send(data, imm=imm)

        task = asyncio.create_task(fill())
        await settle(40)
        assert not task.done()
        task.cancel()
        error = BaseException()
        try:
            await task
        except asyncio.CancelledError as exc:
            error = exc
        if size > max(CONFIG.slot_size, copied_up_to()):  # the adapter may be reading
            with pytest.raises(BufferError):
                data.clear()
            await broken(wire)
        data.clear()
        assert error.__traceback__ is not None
        await broken(wire)

    run(main())


@pytest.mark.usefixtures("fake_regions")
@pytest.mark.parametrize("size", SIZES)
def test_a00b_the_error_of_a_send_is_what_ends_the_block(run: Run, size: int) -> None:
    async def main() -> None:
        wire = Wire(CONFIG, CONFIG)
        await wire.open()
        client, server = wire.ends
        asking = asyncio.create_task(client.send(bytes(size)))
        await wire.run()
        await asking
        message = await server.recv()
        while True:  # until there is no credit left
            try:
                async with asyncio.timeout(0.05):
                    await server.send(bytes(size))
            except TimeoutError:
                break

        async def answer() -> None:
            async with asyncio.timeout(0.05):
                with message:
                    await server.send(message)

        with pytest.raises(TimeoutError):
            await answer()
        assert is_released(message)
        await broken(wire)

    run(main())
