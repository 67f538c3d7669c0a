"""serve(): whom a server that stops waits for, what it says of them, and how signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from aiordma import Server
from tests.inside.loop import be_patient_with_loops
from tests.inside.service import cancel_handlers, tell_of_handlers_after

from ..conftest import cancel_at_every_turn, settle

LIMIT_S = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LINE = r"the server stops, and waits up to \S+ s for the handlers of (\d+) connections?"


class FakeConnection:
    """A connection whose peer answers the close when the test says so."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.answered = asyncio.Event()
        self.closing = False
        self._owes_no_answer = False

    def _stop_receiving(self) -> None:
        self.over.set()

    async def close(self) -> None:
        self.closing = True
        await self.answered.wait()

    async def __aenter__(self) -> FakeConnection:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.answered.wait()


class FakeListener:
    """A listener that has these connections, and gets no others."""

    def __init__(self, connections: list[FakeConnection]) -> None:
        self._connections = connections
        self._closed = asyncio.Event()
        self._unfinished: list[asyncio.Task[None]] = []

    async def __aiter__(self) -> AsyncIterator[FakeConnection]:
        for connection in self._connections:
            yield connection
        await self._closed.wait()

    def close(self) -> None:
        self._closed.set()

    async def wait_closed(self) -> None:
        await self._closed.wait()


@pytest.mark.parametrize("working", [0, 1, 2])
async def test_only_handlers_that_run_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, working: int
) -> None:
    """A connection that is closing takes as long as its peer, and has no handler any more."""
    tell_of_handlers_after(monkeypatch, 0)
    connections = [FakeConnection() for _ in range(3)]
    finish, returned = asyncio.Event(), asyncio.Semaphore(0)

    async def handler(connection: Any) -> None:
        await connection.over.wait()
        if connections.index(connection) < working:
            await finish.wait()
        returned.release()

    listener: Any = FakeListener(connections)
    server = Server(listener, handler, grace_s=60)
    while len(server.connections) < len(connections):  # noqa: ASYNC110
        await asyncio.sleep(0)
    for connection in connections:
        connection.over.set()
    for _ in connections[working:]:
        await returned.acquire()
    stopping = asyncio.create_task(server.stop())
    if working:
        while not caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        finish.set()
    for _ in range(100):  # turns in which it could tell of the others
        await asyncio.sleep(0)
    for connection in connections:
        connection.answered.set()
    await stopping
    told = [re.match(LINE, message) for message in caplog.messages]
    assert [found and int(found[1]) for found in told] == ([working] if working else [])


@pytest.mark.parametrize("again", [False, True])
async def test_a_canceled_stop_waits_for_the_end_of_handlers(again: bool) -> None:
    """However often it is canceled, as by a cancel scope of anyio."""
    connections = [FakeConnection() for _ in range(3)]
    ended = 0

    async def handler(connection: Any) -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await settle()  # as one that has something to put in order
            ended += 1

    listener: Any = FakeListener(connections)
    server = Server(listener, handler, grace_s=60)
    for connection in connections:
        connection.answered.set()
    while len(server.connections) < len(connections):  # noqa: ASYNC110
        await asyncio.sleep(0)
    stopping = asyncio.create_task(server.stop())
    await settle()
    stopping.cancel()
    if again:
        await cancel_at_every_turn(stopping)
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert ended == len(connections)
    assert not server.connections


async def test_a_connection_whose_handler_never_begins_is_closed() -> None:
    """As they are canceled in the moment in which it comes, or before."""

    async def handler(_: Any) -> None:
        raise AssertionError

    listener: Any = FakeListener([])
    server = Server(listener, handler, grace_s=60)
    connections = [FakeConnection() for _ in range(2)]
    listener._left_over(connections[0])
    cancel_handlers(server)
    listener._left_over(connections[1])
    stopping = asyncio.create_task(server.stop())
    await settle()
    assert [each.closing for each in connections] == [True, True]
    assert not stopping.done()
    for connection in connections:
        connection.answered.set()
    await stopping
    assert not server.connections


async def test_a_close_goes_on_when_handlers_are_canceled() -> None:
    """Or its client would not hear what has become of its requests."""
    connection = FakeConnection()

    async def handler(_: Any) -> None:
        pass

    listener: Any = FakeListener([connection])
    server = Server(listener, handler, grace_s=60)
    await settle()
    stopping = asyncio.create_task(server.stop())
    await settle()
    cancel_handlers(server)
    await settle()
    assert not stopping.done()
    connection.answered.set()
    await stopping


async def test_a_handler_may_stop_its_server() -> None:
    """It is canceled as any other, and the end does not wait for a call that waits for it."""
    connection = FakeConnection()
    connection.answered.set()
    stopped = asyncio.Event()

    async def handler(_: Any) -> None:
        try:
            await asyncio.create_task(server.stop())  # a task of the handler's is the same
        finally:
            stopped.set()

    listener: Any = FakeListener([connection])
    server = Server(listener, handler, grace_s=0.01)
    await stopped.wait()
    await server.stop()
    assert not server.connections


class Signaled:
    """A server that heeds signals, and what its program has done.

    Attributes:
        handled: Ends the handlers of its two connections.
        log: What has happened, in order.
        afterwards: Is called a moment after the first of the waits of `forever` has ended.
    """

    def __init__(self) -> None:
        self.handled = asyncio.Event()
        self.log: list[str] = []
        self.afterwards: Callable[[], object] | None = None

    def serve(self, *, signals: bool = True) -> Server:
        connections = [FakeConnection() for _ in range(2)]
        for connection in connections:
            connection.answered.set()
        listener: Any = FakeListener(connections)

        async def handler(_: Any) -> None:
            try:
                await self.handled.wait()
                self.log.append("handled")
            except asyncio.CancelledError:
                self.log.append("canceled")
                raise

        return Server(listener, handler, grace_s=60, signals=signals)

    async def forever(self, what: str) -> None:
        """Wait in a block until it is canceled."""
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append(what)
            afterwards, self.afterwards = self.afterwards, None
            if afterwards is not None:
                asyncio.get_running_loop().call_later(0.02, afterwards)


async def turns() -> None:
    """Let the loop see a signal, and the tasks what it brings about."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def raise_soon(number: signal.Signals, when: float = 0.01) -> None:
    asyncio.get_running_loop().call_later(when, signal.raise_signal, number)


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """A server that has stopped leaves the handlers of signals as they were."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_ends_the_block(number: signal.Signals) -> None:
    """What waits in it is canceled, handlers finish, and the program goes on."""
    program = Signaled()
    program.afterwards = program.handled.set
    task = asyncio.current_task()
    assert task is not None
    async with asyncio.timeout(LIMIT_S):
        async with program.serve():
            raise_soon(number)
            await program.forever("the block ends")
        assert task.cancelling() == 0
    assert program.log == ["the block ends", "handled", "handled"]


async def test_a_second_signal_cancels_handlers() -> None:
    program = Signaled()
    program.afterwards = functools.partial(signal.raise_signal, signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S), program.serve():
        raise_soon(signal.SIGINT)
        await program.forever("the block ends")
    assert program.log == ["the block ends", "canceled", "canceled"]


async def test_a_second_signal_cancels_the_block_again() -> None:
    """Its last steps wait for ever."""
    program = Signaled()
    async with asyncio.timeout(LIMIT_S), program.serve():
        try:
            raise_soon(signal.SIGINT)
            await program.forever("the block ends")
        finally:
            raise_soon(signal.SIGINT)
            await program.forever("its last step, too")
    assert program.log == [
        "the block ends", "canceled", "canceled", "its last step, too",
    ]  # fmt: skip


async def test_a_signal_during_the_exit_cancels_handlers() -> None:
    program = Signaled()
    async with asyncio.timeout(LIMIT_S), program.serve():
        await turns()  # the handlers have begun
        raise_soon(signal.SIGINT)
    assert program.log == ["canceled", "canceled"]


async def test_a_signal_after_close_ends_the_block_in_good_order() -> None:
    program = Signaled()
    async with asyncio.timeout(LIMIT_S), program.serve() as server:
        await turns()
        server.close()
        raise_soon(signal.SIGINT)
        asyncio.get_running_loop().call_later(0.05, program.handled.set)
        await server.wait_closed()
    assert program.log == ["handled", "handled"]


async def test_serve_forever_ends_and_the_block_goes_on() -> None:
    program = Signaled()
    program.handled.set()
    async with asyncio.timeout(LIMIT_S), program.serve() as server:
        raise_soon(signal.SIGINT)
        await server.serve_forever()
        program.log.append("goes on")
    assert program.log == ["handled", "handled", "goes on"]


@pytest.mark.parametrize("signals", [False, True])
async def test_a_signal_ends_a_block_with_serve_forever_beside_other_tasks(
    *, signals: bool
) -> None:
    """Its tasks are canceled, and handlers finish nevertheless."""
    program = Signaled()
    program.afterwards = program.handled.set
    async with asyncio.timeout(LIMIT_S), program.serve(signals=signals) as server:
        raise_soon(signal.SIGINT)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve_forever())
            group.create_task(program.forever("the other ends"))
    assert program.log == ["the other ends", "handled", "handled"]


async def test_serve_forever_ends_without_a_block() -> None:
    program = Signaled()
    program.handled.set()
    async with asyncio.timeout(LIMIT_S):
        server = program.serve()
        raise_soon(signal.SIGINT)
        await asyncio.gather(server.serve_forever(), server.serve_forever())
    assert program.log == ["handled", "handled"]


async def test_a_cancellation_from_elsewhere_is_not_swallowed() -> None:
    """Neither without a signal, nor beside one."""
    for signaled in (False, True):
        program = Signaled()
        program.handled.set()

        async def block(program: Signaled = program) -> None:
            async with program.serve():
                await program.forever("the block ends")

        task = asyncio.create_task(block())
        await turns()
        if signaled:
            signal.raise_signal(signal.SIGINT)
        task.cancel()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([task])
        assert task.cancelled()


async def test_an_exception_of_the_block_is_raised() -> None:
    program = Signaled()
    program.handled.set()

    async def block() -> None:
        async with asyncio.timeout(LIMIT_S), program.serve():
            raise_soon(signal.SIGINT)
            try:
                await program.forever("the block ends")
            finally:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()


async def test_a_signal_ends_the_blocks_of_all_servers() -> None:
    program = Signaled()
    program.handled.set()
    async with asyncio.timeout(LIMIT_S):
        async with program.serve():
            async with program.serve():
                raise_soon(signal.SIGINT)
                await program.forever("the inner ends")
            await program.forever("never begun")
    assert program.log == [*4 * ["handled"], "the inner ends"]


async def test_signals_reach_a_server_after_another_has_stopped() -> None:
    program = Signaled()
    program.handled.set()
    async with asyncio.timeout(LIMIT_S), program.serve():
        async with program.serve():
            pass
        raise_soon(signal.SIGINT)
        await program.forever("the outer ends")
    assert program.log.count("handled") == 4
    assert program.log[-1] == "the outer ends"


@contextlib.contextmanager
def noting(number: signal.Signals) -> Iterator[list[int]]:
    """The program has a handler for the signal, which notes each that it gets."""
    got: list[int] = []
    before = signal.signal(number, lambda number, _: got.append(number))
    try:
        yield got
    finally:
        signal.signal(number, before)


async def test_a_signal_that_ends_nothing_does_what_it_would_do_otherwise() -> None:
    """Of a server that is neither in a block nor waited for; but the server stops before."""
    program = Signaled()
    with noting(signal.SIGTERM) as got:
        server = program.serve()
        await turns()  # the handlers have begun
        signal.raise_signal(signal.SIGTERM)
        await turns()
        assert repr(server).startswith("<Server closed")
        assert not got
        program.handled.set()
        for count in (1, 2):
            await turns()
            assert got == count * [signal.SIGTERM]
            signal.raise_signal(signal.SIGTERM)
        await server.stop()
    assert program.log == ["handled", "handled"]


async def test_a_second_signal_cancels_handlers_of_a_server_without_a_block() -> None:
    program = Signaled()
    with noting(signal.SIGINT) as got:
        server = program.serve()
        await turns()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            await turns()
        assert program.log == ["canceled", "canceled"]
        assert got == [signal.SIGINT]
        await server.stop()


async def test_a_signal_ends_wait_closed() -> None:
    program = Signaled()
    program.handled.set()
    with noting(signal.SIGTERM) as got:
        async with asyncio.timeout(LIMIT_S):
            server = program.serve()
            raise_soon(signal.SIGTERM)
            await server.wait_closed()
        await server.stop()
        await turns()
    assert program.log == ["handled", "handled"]
    assert not got


async def test_a_server_with_a_block_goes_on_behind_it_beside_one_without() -> None:
    program = Signaled()
    program.handled.set()
    with noting(signal.SIGINT) as got:
        async with asyncio.timeout(LIMIT_S):
            other = program.serve()
            async with program.serve():
                raise_soon(signal.SIGINT)
                await program.forever("the block ends")
            await other.wait_closed()
            await turns()
    assert program.log.count("handled") == 4
    assert not got


async def test_a_signal_that_comes_as_the_server_ends_is_not_lost() -> None:
    program = Signaled()
    program.handled.set()
    with noting(signal.SIGTERM) as got:
        server = program.serve()
        server.listener.wait_closed = lambda: raised(signal.SIGTERM)  # type: ignore[method-assign]
        await server.stop()
        await turns()
    assert got == [signal.SIGTERM]


async def raised(number: signal.Signals) -> None:
    signal.raise_signal(number)


async def test_a_second_ctrl_c_ends_a_program_that_never_yields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Python's own; after the first it has a while for the loop to run."""
    program = Signaled()
    program.handled.set()
    async with asyncio.timeout(LIMIT_S), program.serve():
        for _ in range(3):  # one Ctrl-C, passed on by launchers
            signal.raise_signal(signal.SIGINT)
        be_patient_with_loops(monkeypatch, 0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        await program.forever("the block ends")
    assert "the block ends" in program.log


async def test_a_second_sigterm_ends_a_program_that_never_yields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Signaled()
    program.handled.set()
    be_patient_with_loops(monkeypatch, 0)
    with noting(signal.SIGTERM) as got:
        async with asyncio.timeout(LIMIT_S), program.serve():
            signal.raise_signal(signal.SIGINT)
            assert not got
            signal.raise_signal(signal.SIGTERM)
            assert got == [signal.SIGTERM]
            await program.forever("the block ends")


async def test_a_loop_that_runs_gets_every_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago the one before was."""
    program = Signaled()
    program.afterwards = functools.partial(signal.raise_signal, signal.SIGINT)
    be_patient_with_loops(monkeypatch, 0)
    async with asyncio.timeout(LIMIT_S), program.serve():
        raise_soon(signal.SIGINT)
        await program.forever("the block ends")
    assert program.log == ["the block ends", "canceled", "canceled"]
