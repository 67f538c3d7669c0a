"""`recv()`: a message at once, or a task that C resumes with it; in order, and none is lost.

C tells the first task that waits (`arrives`, and `tell`), or Python does (`by_python`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from aiordma._core import EVENT_FRAMES, Message
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.errors import ConnectionEndedError, ConnectionLostError
from tests.inside.endpoint import receiver_of, resumed_in, waiting_in

from ..conftest import LIMIT_S, LOOPS, Run, settle
from ..endpoint.fabric import FakeLink, LeftConnection, LeftToPython, Wire
from ..endpoint.test_sender import ended, lost
from .test_wakeup import called_by_the_loop

T = TypeVar("T")
SEEDS = range(40)


class Side:
    """A connection; the test is its peer and its drain."""

    def __init__(self, recv_depth: int = 8, **settings: Any) -> None:
        config = ConnectionConfig(slot_size=64, recv_depth=recv_depth, **settings)
        self.link = FakeLink(config)
        self.link.delivering = False
        self.core = LeftConnection(self.link, config)
        self.receiver = receiver_of(self.core)
        self.state = self.link.state

    @property
    def told(self) -> list[int]:
        """The credits that the peer was told of."""
        return [FRAME.unpack_from(frame)[2] for frame in self.link.sent]

    async def whole(self) -> Message:
        message = await self.core.recv()
        assert isinstance(message, Message)
        return message

    async def recv(self) -> bytes:
        with await self.whole() as message:
            return bytes(message)

    def arrives(self, body: bytes) -> None:
        self.link.inject(FRAME.pack(FrameKind.DATA, 0, 0, 0, len(body)) + body)
        self.link.unacked.extend(self.link.busy)
        while self.link.unacked:
            self.link.acknowledge()

    def arrive(self, *bodies: bytes) -> None:
        """In one drain."""
        for body in bodies:
            self.link._lay(FRAME.pack(FrameKind.DATA, 0, 0, 0, len(body)) + body)
        self.link.sweep()

    def by_python(self, body: bytes) -> None:
        """As large ones come: Python tells a task to look."""
        self.arrives(body)
        self.receiver.wake()

    def tell(self) -> None:
        """The drain is over; as drain.c does it."""
        self.link.tell()
        self.link.raise_wrong()


@contextmanager
def traced(on: bool = True) -> Iterator[None]:
    """The interpreter iterates over what is awaited while it is traced, instead of sending."""

    def trace(*args: Any) -> Any:
        return trace

    before = sys.gettrace()
    if on:
        sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


async def parked(side: Side) -> asyncio.Task[bytes]:
    task = asyncio.create_task(side.recv())
    await settle()
    assert not task.done()
    assert side.state.receive_wakeup.waiting
    return task


async def result(task: asyncio.Task[T]) -> T:
    async with asyncio.timeout(LIMIT_S / 4):
        return await task


@pytest.mark.parametrize("trace", [False, True])
def test_a_message_that_is_there_takes_no_turn(run: Run, trace: bool) -> None:
    async def main() -> None:
        side = Side()
        side.arrives(b"one")
        with traced(trace):
            task = asyncio.create_task(side.recv())
            await asyncio.sleep(0)
        assert task.done()
        assert await task == b"one"
        assert not side.state.receive_wakeup.waiting
        assert side.state.facts()["messages_received"] == 1
        assert side.state.kept == 0

    run(main())


@pytest.mark.parametrize("trace", [False, True])
def test_a_parked_task_is_resumed_by_the_drain(run: Run, trace: bool) -> None:
    async def main() -> None:
        side, log = Side(), list[object]()

        async def work() -> None:
            for _ in range(3):
                log.append(await side.recv())

        def drain(body: bytes) -> None:
            side.arrives(body)
            side.tell()
            log.append("drained")

        with traced(trace):
            task = asyncio.create_task(work())
            for body in (b"a", b"b", b"c"):
                await settle()
                await called_by_the_loop(functools.partial(drain, body))
            await task
        assert log == [b"a", "drained", b"b", "drained", b"c", "drained"]

    run(main())


@pytest.mark.parametrize("together", [False, True])
def test_a_second_one_stands_in_line(run: Run, together: bool) -> None:
    async def main() -> None:
        side = Side()
        first = await parked(side)

        async def bare() -> object:
            return await side.state.receiving(LeftToPython())

        other = asyncio.create_task(bare())
        await asyncio.sleep(0)
        assert other.done(), "None at once"
        assert other.result() is None
        second = asyncio.create_task(side.recv())
        await settle()
        assert waiting_in(side.receiver) == 1
        if together:
            side.arrive(b"a", b"b")
        else:
            side.arrives(b"a")
            side.arrives(b"b")
        await called_by_the_loop(side.tell)
        await settle()
        assert second.done(), "it waits, and there is a message"
        assert [await result(first), await result(second)] == [b"a", b"b"]
        assert not waiting_in(side.receiver)

    run(main())


@pytest.mark.parametrize("thrown_out", [None, 0, 1, 4])
def test_tasks_in_line_are_resumed_in_one_turn(run: Run, thrown_out: int | None) -> None:
    """As many as there are messages, in the order of the line."""

    async def main() -> None:
        side = Side(recv_depth=16)
        order: list[int] = []

        async def receive(number: int) -> bytes:
            body = await side.recv()
            order.append(number)
            return body

        tasks = [asyncio.create_task(receive(number)) for number in range(6)]
        await settle()
        side.arrive(*(bytes([n]) for n in range(5)))

        def tell() -> None:
            side.tell()
            if thrown_out is not None:
                tasks[thrown_out].cancel()

        await called_by_the_loop(tell)
        await asyncio.sleep(0)
        left = [task for task in tasks if not task.done()]
        if thrown_out in (None, 0):  # the first was resumed by the drain
            assert order == [0, 1, 2, 3, 4]
            assert left == tasks[5:]
            side.arrive(b"last")
            await called_by_the_loop(side.tell)
            assert await result(tasks[5]) == b"last"
        else:
            await settle()
            assert order == [number for number in range(6) if number != thrown_out]
        assert [await task for task in tasks[:1]] == [b"\0"]
        assert (resumed_in(side.receiver), waiting_in(side.receiver)) == (0, 0)

    run(main())


@pytest.mark.parametrize("arrival", ["before", "between", "after"])
@pytest.mark.parametrize("way", ["arrives", "by_python"])
def test_cancellation_loses_nothing(run: Run, way: str, arrival: str) -> None:
    async def main() -> None:
        side = Side()
        task = await parked(side)
        arrive: Callable[[bytes], None] = getattr(side, way)
        if arrival == "before":
            arrive(b"x")
        task.cancel()
        if arrival == "between":
            arrive(b"x")
        side.tell()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not side.state.receive_wakeup.waiting
        if arrival == "after":
            arrive(b"x")
        assert await result(asyncio.create_task(side.recv())) == b"x"
        assert len(side.link.ready) + side.state.facts()["n_back"] == side.link.slots.recv.count

    run(main())


def test_a_canceled_one_that_has_not_left_is_in_the_way(run: Run) -> None:
    async def main() -> None:
        side = Side()
        first = await parked(side)
        second = asyncio.create_task(side.recv())  # it runs before the first does
        first.cancel()
        await settle()
        assert first.cancelled()
        side.arrives(b"x")
        side.tell()
        assert await result(second) == b"x"

    run(main())


def test_those_that_look_before_the_task_whose_turn_it_is_stand_behind_it(run: Run) -> None:
    async def main() -> None:
        side = Side()
        first = await parked(side)
        second, last = (asyncio.create_task(side.recv()) for _ in range(2))
        side.by_python(b"x")  # the first is on its way to it, behind these two
        assert await result(first) == b"x"
        await settle()
        side.arrives(b"y")
        side.arrives(b"z")
        side.tell()
        assert [await result(second), await result(last)] == [b"y", b"z"]

    run(main())


def test_i05_a_credit_that_was_put_off_is_sent_where_the_program_does_not_answer(
    run: Run,
) -> None:
    """It keeps the last message that the peer could send, and waits for something else."""

    async def main() -> None:
        side, busy = Side(recv_depth=2), asyncio.Event()

        async def work() -> None:
            (await side.whole()).release()
            kept = await side.whole()
            await busy.wait()
            kept.release()

        def drain(body: bytes) -> None:
            side.arrives(body)
            side.tell()

        task = asyncio.create_task(work())
        await settle()
        await called_by_the_loop(lambda: drain(b"a"))
        assert side.told == [], "the peer has a credit, and need not be told of another"
        await called_by_the_loop(lambda: drain(b"b"))
        await settle()
        assert side.told == [1], "the peer has none left, and is not told of the one it is owed"
        busy.set()
        await task

    run(main())


@pytest.mark.parametrize("times", [1, 100])
def test_i05_a_credit_that_cannot_be_posted_ends_the_connection(run: Run, times: int) -> None:
    """Where a task begins to wait, C posts it; the peer waits for it for ever."""

    async def main() -> None:
        side = Side(recv_depth=2)
        side.arrives(b"a")
        await side.recv()
        side.arrives(b"b")
        kept = await side.whole()
        assert side.told == []
        side.link.refusals = [errno.ENOMEM] * times
        task = asyncio.create_task(side.recv())
        await settle()
        assert isinstance(side.link.failure, OSError)
        assert side.link.failure.errno == errno.ENOMEM
        with pytest.raises(ConnectionLostError):
            await result(task)
        kept.release()

    run(main())


def test_i05_a_task_that_is_canceled_after_its_turn_hands_it_on(run: Run) -> None:
    async def main() -> None:
        side = Side()
        first = await parked(side)
        second = asyncio.create_task(side.recv())
        await settle()
        side.by_python(b"x")  # the first is on its way to it
        first.cancel()
        await settle(10)
        assert second.done(), "it waits, and there is a message"
        assert await second == b"x"

    run(main())


@pytest.mark.parametrize("how", ["end", "fail"])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_end_reaches_who_is_parked(run: Run, how: str, before: int) -> None:
    async def main() -> None:
        side = Side()
        task = await parked(side)
        for number in range(before):
            side.arrives(bytes([number]))
        getattr(side.receiver, how)(ended if how == "end" else lost)
        error = ConnectionEndedError if how == "end" else ConnectionResetError
        for number in range(before):
            assert await result(task) == bytes([number])
            task = asyncio.create_task(side.recv())
        for _ in range(2):
            with pytest.raises(error):
                await result(task)
            task = asyncio.create_task(side.recv())
        await asyncio.wait([task])
        assert isinstance(task.exception(), error)

    run(main())


def test_in_another_thread_it_is_for_python(run: Run) -> None:
    async def main() -> None:
        side, got = Side(), list[object]()
        side.arrives(b"x")

        async def bare() -> None:
            got.append(await side.state.receiving(LeftToPython()))

        def foreign() -> None:
            try:
                bare().send(None)
            except StopIteration:
                got.append("ended")

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join(LIMIT_S)
        assert got == [None, "ended"]
        assert await side.recv() == b"x"

    run(main())


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_comes_once_and_in_order(run: Run, seed: int, trace: bool) -> None:
    async def main() -> None:
        print("seed", seed)
        rng = random.Random(seed)
        side = Side(recv_depth=rng.choice((1, 2, 3, 8)))
        log, kept, tasks = list[int](), list[Message](), list[asyncio.Task[None]]()
        arrived = parked = 0

        async def work(keep: bool, into: bool = False) -> None:
            if into:
                buffer = bytearray(rng.choice((1, 64)))
                assert await side.core.recv_into(buffer) == 1
                log.append(buffer[0])
                return
            message = await side.whole()
            log.append(bytes(message)[0])
            if keep:
                kept.append(message)
            else:
                message.release()

        with traced(trace):
            tasks.append(asyncio.create_task(work(keep=False)))
            await settle()
            for _ in range(200):
                step = rng.random()
                parked += side.state.receive_wakeup.waiting
                if step < 0.4 and side.state.unused > 0 and arrived < 256:
                    rng.choice((side.arrives, side.arrives, side.by_python))(bytes([arrived]))
                    arrived += 1
                elif step < 0.6:
                    await called_by_the_loop(side.tell)
                elif step < 0.8 and len(tasks) < 4:
                    into = rng.random() < 0.3
                    tasks.append(asyncio.create_task(work(rng.random() < 0.3, into)))
                elif step < 0.85 and tasks:
                    rng.choice(tasks).cancel()
                elif step < 0.9 and kept:
                    kept.pop().release()
                else:
                    await settle(rng.randrange(3))
                tasks = [task for task in tasks if not task.done()]
            await called_by_the_loop(side.tell)
            await settle(20)
            waiting = [task for task in tasks if not task.done()]
            assert not waiting or len(log) == arrived, "one waits although a message is there"
            for task in waiting:
                task.cancel()
            await settle()
            while len(log) < arrived:
                await result(asyncio.create_task(work(keep=False)))
        assert log == list(range(arrived))
        assert side.link.failure is None
        assert arrived
        assert parked, "the quick way was never gone"
        for message in kept:
            message.release()
        assert len(side.link.ready) + side.state.facts()["n_back"] == side.link.slots.recv.count

    run(main())


def test_a01_a_credit_is_told_when_the_receiving_task_ends_the_loop(run: Run) -> None:
    """With a window this small the peer waits for each credit."""

    async def credits(error: type[BaseException] | None) -> list[Any]:
        side = Side(recv_depth=2)

        async def serve() -> None:
            await side.recv()
            if error is not None:
                raise error

        for _ in range(6):
            task = asyncio.create_task(serve())
            await settle()
            side.arrives(b"x")
            with contextlib.suppress(error or KeyError):
                await called_by_the_loop(side.tell)
            await settle()
            assert isinstance(task.exception(), error or type(None))
        return side.told

    async def main() -> None:
        usual = await credits(None)
        assert sum(usual) == 6
        for error in (SystemExit, KeyboardInterrupt):
            assert await credits(error) == usual

    run(main())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_a01_a_handler_that_raises_is_called_once_more(run: Run, kind: type[BaseException]) -> None:
    """A Ctrl-C may come in the midst of it: what it has not seen to, and the message, wait."""

    async def main() -> None:
        side = Side()
        calls: list[int] = []

        def handle(events: int) -> None:
            calls.append(events)
            if len(calls) == 1:
                raise kind

        side.state.set_handler(handle)
        waiting = await parked(side)
        side.link.inject(FRAME.pack(FrameKind.END, 0, 0, 0, 0))
        side.arrives(b"x")
        reports: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        with pytest.raises(kind):
            await called_by_the_loop(side.tell)
        assert await result(waiting) == b"x"
        assert calls == [EVENT_FRAMES] * 2
        assert not reports

    run(main())


@pytest.mark.parametrize("name", list(LOOPS))
def test_a14_another_loop_of_the_same_thread_is_refused(name: str) -> None:
    async def opened() -> Wire:
        wire = Wire(ConnectionConfig(), ConnectionConfig())
        await wire.open()
        await wire.run()
        await wire.ends[1].send(b"for the owner")
        await wire.run()
        return wire

    async def in_the_owner(wire: Wire) -> None:
        with await wire.ends[0].recv() as message:
            assert message == b"for the owner"
        await wire.ends[0].send(b"from the owner")
        await wire.run()
        with await wire.ends[1].recv() as message:
            assert message == b"from the owner", "nothing of another loop was sent"
        await wire.close()

    with asyncio.Runner(loop_factory=LOOPS[name]) as owner:
        wire = owner.run(opened())
        end = wire.ends[0]
        with asyncio.Runner(loop_factory=LOOPS[name]) as other:
            for call in (
                lambda: end.send(b"x"),
                lambda: end.send(bytearray(b"x")),
                lambda: end.send(b"x", imm=1),
                lambda: end.recv(),
                lambda: end.flush(),
            ):
                with pytest.raises(RuntimeError, match="another event loop"):
                    other.run(call())
        owner.run(in_the_owner(wire))
