"""Tasks that wait to send: resumed by the drain, in line; ended by a failure, a time, a cancel."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import random
import sys
import weakref
from collections.abc import Generator
from typing import Any

import pytest

from aiordma._core import EVENT_ROOM, FRAME_HAS_IMM, LACKS_SLOT, Message, QueuedSend
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.errors import RdmaTimeoutError, ResourceClosedError
from tests.inside.core import have_timer
from tests.inside.endpoint import receiver_of, set_terms
from tests.inside.link import listeners_of

from ..conftest import LIMIT_S, LOOPS, Run, eager_collector, settle
from ..endpoint.test_sender import Side, lost
from .test_message_waiting import traced
from .test_wakeup import called_by_the_loop

MANY = 1000
SEEDS = range(20)


def many(*, in_c: bool = True, **settings: Any) -> Side:
    """A connection whose slots suffice for all that a test sends; it has no credit.

    The first wait, too, is `in_c`, and not in Python, which starts a timer.
    """
    side = Side(**({"send_depth": MANY, "recv_depth": 8} | settings))
    if in_c:
        have_timer(side.state)
    return side


def sending(side: Side, *data: bytes | bytearray) -> list[asyncio.Task[None]]:
    """Tasks that send, each as a program does."""
    return [asyncio.create_task(side.core.send(each)) for each in data]


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(2, "big") for number in range(count)]


async def results(tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
    waiting = await pending(*tasks)
    assert not waiting, "some wait for ever"
    return await asyncio.gather(*tasks, return_exceptions=True)


async def pending(*tasks: asyncio.Task[None]) -> set[asyncio.Task[None]]:
    """The tasks that have not ended after a while."""
    return (await asyncio.wait(tasks, timeout=LIMIT_S / 8))[1] if tasks else set()


def give(side: Side, credits: int, *, told: bool = True) -> None:
    """Credits come with a frame of the peer; the drain then tells of it, with no task running."""
    side.link.inject(FRAME.pack(FrameKind.CREDIT, 0, credits, 0, 0))
    if told:
        side.link.tell()


@pytest.mark.parametrize("trace", [False, True])
def test_the_drain_resumes_the_tasks_and_posts_what_they_send_together(
    run: Run, trace: bool
) -> None:
    async def main() -> None:
        side, log = many(), list[object]()

        async def one(number: int) -> None:
            await side.core.send(bytes([number]))
            log.append(number)

        def drain() -> None:
            give(side, 18)
            log.append("drained")

        with traced(trace):
            tasks = [asyncio.create_task(one(number)) for number in range(20)]
            await settle()
            assert (side.state.queued, log, side.link.sent) == (20, [], [])
            await called_by_the_loop(drain)
            assert log == [*range(18), "drained"], "no turn of the loop lies between"
            assert side.link.doorbells == [16, 2]
            assert side.state.queued == 2
            await called_by_the_loop(lambda: give(side, 2))
            await results(tasks)
        assert side.bodies == [bytes([number]) for number in range(20)]
        assert side.state.facts()["messages_sent"] == side.state.facts()["bytes_sent"] == 20

    run(main())


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_first_come_first_served_with_cancels_announcements_and_newcomers(
    run: Run, seed: int, soon: bool
) -> None:
    """Whether the drain resumes the tasks, or has the loop do it (`soon`), or each at times."""

    async def main() -> None:
        chance, side = random.Random(seed), many()
        side.link.drain.resume_by_loop(soon)
        tasks: dict[bytes, asyncio.Task[None]] = {}
        numbers = iter(numbered(MANY))
        while len(tasks) < 300:
            what = chance.choice(["send", "send", "announce", "imm", "cancel", "give", "run"])
            if what == "give":
                count = chance.randrange(1, 4)
                await called_by_the_loop(lambda count=count: give(side, count))  # type: ignore[misc]
            elif what == "run":
                side.link.drain.resume_by_loop(soon and chance.random() < 0.8)
                await settle(chance.randrange(3))
            elif what == "cancel" and tasks:
                chance.choice(list(tasks.values())[-8:]).cancel()
            elif what in ("send", "announce", "imm"):
                body = next(numbers)
                call = side.core.send(body, imm=7 if what == "imm" else None)
                if what == "announce":
                    call.close()
                    call = side.sender.rendezvous(body, None, 1 << 20)
                tasks[body] = asyncio.create_task(call)
                await asyncio.sleep(0)  # it stands in line, or has sent
        # The device of this test acknowledges nothing, so that each slot is used once.
        await called_by_the_loop(lambda: give(side, 400))
        await results(list(tasks.values()))
        expected = [body for body, task in tasks.items() if not task.cancelled()]
        assert side.bodies == expected
        assert len(expected) < 300, "none was canceled in time"
        assert side.state.queued == 0
        assert side.state.facts()["n_free"] == MANY - len(expected), "a slot was lost"

    run(main())


def test_what_waits_is_sent_as_it_would_have_been_at_once(run: Run) -> None:
    async def main() -> None:
        side = many()
        tasks = [
            asyncio.create_task(side.core.send(memoryview(b"one"), imm=5)),
            asyncio.create_task(side.sender.rendezvous(b"head", None, 1 << 20)),
            *sending(side, b"", Message(memoryview(b"two"))),  # type: ignore[arg-type]
        ]
        await settle()
        await called_by_the_loop(lambda: give(side, 4))
        assert await results(tasks) == [None] * 4
        kind = FrameKind
        assert side.link.sent == [
            FRAME.pack(kind.DATA, FRAME_HAS_IMM, 0, 5, 3) + b"one",
            FRAME.pack(kind.RENDEZVOUS, 0, 0, 0, 1 << 20) + b"head",
            FRAME.pack(kind.DATA, 0, 0, 0, 0),
            FRAME.pack(kind.DATA, 0, 0, 0, 3) + b"two",
        ]

    run(main())


def test_a_task_that_is_canceled_by_one_resumed_before_it_does_not_send(run: Run) -> None:
    """The grant of both is the same drain."""

    async def main() -> None:
        side = many()
        tasks: list[asyncio.Task[None]] = []

        async def first() -> None:
            await side.core.send(b"1")
            tasks[1].cancel()

        tasks += [asyncio.create_task(first()), *sending(side, b"2", b"3")]
        await settle()
        await called_by_the_loop(lambda: give(side, 2))
        await results(tasks)
        assert [task.cancelled() for task in tasks] == [False, True, False]
        assert side.bodies == [b"1", b"3"]
        assert (side.state.queued, side.state.credits) == (0, 0)

    run(main())


def test_a_task_that_is_canceled_after_it_was_resumed_has_sent(run: Run) -> None:
    async def main() -> None:
        side = many()
        (task,) = sending(side, b"1")
        await settle()

        def drain() -> None:
            give(side, 1)
            assert not task.cancel(), "the task has ended with its send"

        await called_by_the_loop(drain)
        await task
        assert side.bodies == [b"1"]

    run(main())


@pytest.mark.parametrize("end", ["cancel", "close", "fail", "time"])
def test_a_wait_that_ends_frees_the_buffer_and_its_place(run: Run, end: str) -> None:
    async def main() -> None:
        side = many(stall_timeout_s=0.05, in_c=end != "time")
        data = bytearray(b"data")
        call = side.core.send(data)
        if end == "close":  # of the coroutine, as the interpreter does at its end
            call.send(None)
        task = asyncio.create_task(call) if end != "close" else None
        await settle()
        assert side.state.queued == 1
        with pytest.raises(BufferError):
            data.clear()
        if end == "cancel":
            assert task is not None
            task.cancel()
            assert side.state.queued == 0, "at once"
        elif end == "close":
            call.close()
        elif end == "fail":
            side.sender.fail(lost)
        if task is not None:
            (result,) = await results([task])
            kinds = {"cancel": asyncio.CancelledError, "fail": ConnectionResetError}
            assert isinstance(result, kinds.get(end, RdmaTimeoutError))
        data.clear()
        assert side.state.queued == 0
        await called_by_the_loop(lambda: give(side, 1))
        assert side.link.sent == []

    run(main())


def test_a_send_stands_in_line_though_there_is_room(run: Run) -> None:
    """A task that the drain has resumed sends again, before the drain has come to the next."""

    async def main() -> None:
        side = many()

        async def twice() -> None:
            await side.core.send(b"first")
            await side.core.send(b"third")

        tasks = [asyncio.create_task(twice()), *sending(side, b"second")]
        await settle()
        await called_by_the_loop(lambda: give(side, 3))
        await results(tasks)
        assert side.bodies == [b"first", b"second", b"third"]

    run(main())


def test_a_send_that_no_task_awaits_holds_up_no_other(run: Run) -> None:
    """As a signal's handler that raises may leave it, between two steps of the interpreter."""

    async def main() -> None:
        side = many()
        left: Any = side.state.send_in_turn(FrameKind.DATA, b"0", 1, None)
        assert isinstance(left, QueuedSend)
        tasks = sending(side, b"1", b"2")
        await settle()
        assert side.state.queued == 3
        del left
        assert side.state.queued == 2
        await called_by_the_loop(lambda: give(side, 2))
        assert await results(tasks) == [None, None]
        assert side.bodies == [b"1", b"2"]

    run(main())


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_list_of_buffers_waits_with_a_copy(run: Run, several: bool, in_c: bool) -> None:
    """So that its buffers are the program's again, as where they are sent at once."""

    async def main() -> None:
        side, buffer = many(in_c=in_c), bytearray(b"one")
        data: Any = [buffer, b" and two"] if several else [buffer]
        task = asyncio.create_task(side.core.send(data, imm=7))
        await settle()
        assert side.state.queued == 1
        buffer.clear()  # it is not exported
        data.clear()
        await called_by_the_loop(lambda: give(side, 1))
        assert await results([task]) == [None]
        assert side.bodies == [b"one and two" if several else b"one"]
        assert FRAME.unpack_from(side.link.sent[0])[1:4:2] == (FRAME_HAS_IMM, 7)

    run(main())


@pytest.mark.parametrize("end", ["closed", "closed after a step", "dropped", "sent"])
def test_room_that_the_first_in_line_leaves_resumes_the_next(run: Run, end: str) -> None:
    """Room that came before the first had parked could resume nobody."""

    async def main() -> None:
        side = many()
        first: Any = side.state.send_in_turn(FrameKind.DATA, b"0", 1, None)
        if end == "closed after a step":
            assert next(first) is first, "what its task would park on"
        tasks = sending(side, b"1", b"2")
        await settle()
        await called_by_the_loop(lambda: give(side, 3))
        assert side.bodies == [], "the first is asked when it runs"
        if end == "sent":
            assert await first == 0
        elif end == "dropped":
            del first
        else:
            first.close()
        assert await results(tasks) == [None, None]
        assert side.bodies == [b"0"] * (end == "sent") + [b"1", b"2"]

    run(main())


def test_a_failure_before_the_first_step_of_the_wait_ends_it(run: Run) -> None:
    async def main() -> None:
        side = many()
        waiting: Any = side.state.send_in_turn(FrameKind.DATA, b"0", 1, None)
        side.sender.fail(lost)
        with pytest.raises(ConnectionResetError, match="lost"):
            await waiting
        with pytest.raises(RuntimeError, match="over"):
            await waiting

    run(main())


def test_room_that_came_before_the_first_step_of_the_wait_is_taken(run: Run) -> None:
    async def main() -> None:
        side = many()
        waiting: Any = side.state.send_in_turn(FrameKind.DATA, b"0", 1, None)
        set_terms(side.state, credits=side.state.credits + 1)
        assert await waiting == 0
        assert side.bodies == [b"0"]

    run(main())


def test_a_task_that_finds_no_room_when_it_is_resumed_waits_again_and_is_freed(run: Run) -> None:
    """The awaitable around the wait runs first, and the adapter has failed there."""

    class Around:
        def __init__(self, side: Side, waiting: QueuedSend) -> None:
            self.side = side
            self.waiting = waiting

        def __await__(self) -> Generator[Any, Any, Any]:
            inner: Any = self.waiting
            yield next(inner)
            self.side.sender.hold()
            return (yield from inner)

    async def main() -> None:
        side = many()
        waiting: Any = side.state.send_in_turn(FrameKind.DATA, b"0", 1, None)
        before = sys.getrefcount(waiting)

        async def one() -> None:
            with contextlib.suppress(ConnectionResetError):
                await Around(side, waiting)

        task = asyncio.create_task(one())
        await settle()
        await called_by_the_loop(lambda: give(side, 1))
        assert (side.state.queued, task.done(), side.bodies) == (1, False, [])
        side.sender.fail(lost)
        await results([task])
        del task
        gc.collect()
        assert sys.getrefcount(waiting) == before

    run(main())


def test_a_post_that_fails_when_the_task_is_resumed_ends_the_connection(run: Run) -> None:
    async def main() -> None:
        side = many()
        tasks = sending(side, b"1", b"2")
        await settle()
        side.link.refusals.append(errno.ENOMEM)
        await called_by_the_loop(lambda: give(side, 1))
        await called_by_the_loop(lambda: None)
        assert isinstance(side.link.failure, OSError)
        assert side.link.failure.errno == errno.ENOMEM
        assert isinstance((await results(tasks))[1], OSError)

    run(main())


@pytest.mark.parametrize("how", ["close", "abort", "break"])
def test_an_end_with_a_thousand_that_wait(run: Run, how: str) -> None:
    async def main() -> None:
        side = many(close_timeout_s=0.2)  # nobody is there to answer
        tasks = sending(side, *numbered(MANY))
        await settle()
        assert side.state.queued == MANY
        closing: set[asyncio.Task[None]] = set()
        if how == "close":
            closing.add(asyncio.create_task(side.core.close()))
        elif how == "abort":
            side.core.abort()
        else:
            side.sender.hold()  # its reason is not known yet
            give(side, 10, told=False)
            await settle()
            assert side.state.queued == MANY
            side.sender.fail(lost)
        ends = await results(tasks)
        kind = ConnectionResetError if how == "break" else ResourceClosedError
        assert {type(end) for end in ends} == {kind}
        assert len(set(map(id, ends))) == MANY, "each has a traceback of its own"
        assert FrameKind.DATA not in side.kinds
        assert (side.state.queued, side.state.facts()["n_free"]) == (0, MANY)
        for task in closing:
            task.cancel()
        await results([*closing])

    run(main())


def test_each_wait_has_its_time_and_a_timer_serves_all(run: Run) -> None:
    async def main() -> None:
        side = many(stall_timeout_s=0.2, in_c=False)
        loop, times = asyncio.get_running_loop(), dict[bytes, float]()

        async def one(data: bytes) -> None:
            begun = loop.time()
            with pytest.raises(RdmaTimeoutError, match="the peer took nothing"):
                await side.core.send(data)
            times[data] = loop.time() - begun

        first = asyncio.create_task(one(b"1"))
        await asyncio.wait([first], timeout=0.05)  # the second waits for longer than the first
        second = asyncio.create_task(one(b"2"))
        assert not await pending(first), "the first waits for ever"
        assert not await pending(second), "the second waits for ever"
        (granted,) = sending(side, b"3")
        await settle()
        await called_by_the_loop(lambda: give(side, 1))
        await granted
        # The timer may have found no wait, and ended.
        assert not await pending(asyncio.create_task(one(b"4"))), "the fourth waits for ever"
        assert list(times) == [b"1", b"2", b"4"]
        assert min(times.values()) > 0.19, "it ends too early"
        assert side.bodies == [b"3"]

    run(main())


def test_completed_sends_wake_the_loop_only_while_the_line_lacks_a_slot(run: Run) -> None:
    async def main() -> None:
        side = Side(send_depth=2)
        tasks = sending(side, b"1", b"2", b"3", b"4")
        await settle()
        assert listeners_of(side.link) == 0, "credits come with a message, which wakes it"
        await called_by_the_loop(lambda: give(side, 8))
        assert (len(side.link.sent), side.state.lacks) == (2, LACKS_SLOT)
        assert listeners_of(side.link) == 1
        side.acknowledge()
        await settle()
        assert len(side.link.sent) == 3
        assert listeners_of(side.link) == 1
        side.acknowledge()
        await settle()
        assert await results(tasks) == [None] * 4
        assert listeners_of(side.link) == 0
        # A canceled wait is noticed with the next that completes.
        (task,) = sending(side, b"5")
        await settle()
        assert listeners_of(side.link) == 1
        task.cancel()
        await settle()
        side.acknowledge()
        await settle()
        assert listeners_of(side.link) == 0

    run(main())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_others_have_their_turn_after_a_task_that_ends_the_loop(
    error: type[BaseException],
) -> None:
    with asyncio.Runner(loop_factory=LOOPS["asyncio"]) as runner:
        loop = runner.get_loop()

        async def begin() -> tuple[Side, list[asyncio.Task[None]]]:
            side = many()

            async def first() -> None:
                await side.core.send(b"1")
                raise error

            tasks = [asyncio.create_task(first()), *sending(side, b"2", b"3")]
            await settle()
            side.link.delivering = False
            return side, tasks

        async def rest(side: Side, tasks: list[asyncio.Task[None]]) -> None:
            await results(tasks[1:])
            assert side.bodies == [b"1", b"2", b"3"]

        side, tasks = runner.run(begin())
        loop.call_soon(give, side, 3)
        with pytest.raises(error):
            loop.run_forever()
        assert tasks[0].done()
        side.link.wrong = None
        loop.run_until_complete(rest(side, tasks))


@pytest.mark.parametrize("what", [b"bytes", bytearray(b"bytearray"), "a message"])
def test_the_collector_frees_a_line_that_has_been_left(what: Any) -> None:
    """Nothing leads from outside to the loop, its connection, and the tasks in line."""

    class Thing:
        """An object that can be watched."""

    def leave() -> list[weakref.ref[Any]]:
        loop = LOOPS["asyncio"]()

        async def one(side: Side, thing: Thing) -> None:
            data: Any = receiver_of(side.core).take() if what == "a message" else what
            await side.core.send(data)

        async def main() -> list[weakref.ref[Any]]:
            side = many()
            for _ in range(3):
                side.link.inject(FRAME.pack(FrameKind.DATA, 0, 0, 0, 0))
            things = [Thing() for _ in range(3)]
            side.tasks = [asyncio.create_task(one(side, thing)) for thing in things]  # type: ignore[attr-defined]
            await settle()
            assert side.state.queued == 3
            side.link.close()
            return [weakref.ref(it) for it in (*things, side.link)]

        # A task that is destroyed before its end is reported.
        loop.set_exception_handler(lambda loop, context: None)
        try:
            return loop.run_until_complete(main())
        finally:
            loop.close()

    watched = leave()
    gc.collect()
    assert [it() for it in watched] == [None] * 4


@pytest.mark.parametrize("seed", range(3))
def test_the_collector_between_any_two_steps(run: Run, seed: int) -> None:
    async def main() -> None:
        chance, side = random.Random(seed), many(send_depth=24)
        tasks = sending(side, *numbered(24))
        with eager_collector():
            await settle()
            for task in chance.sample(tasks, 8):
                task.cancel()
            for _ in range(8):
                await called_by_the_loop(lambda: give(side, 2))
            ends = await results(tasks)
        sent = [body for body, end in zip(numbered(24), ends, strict=True) if end is None]
        assert len(sent) == 16
        assert side.bodies == sent

    run(main())


def test_an_event_without_room_resumes_none(run: Run) -> None:
    async def main() -> None:
        side = many()
        (task,) = sending(side, b"1")
        await settle()
        await called_by_the_loop(lambda: side.state(EVENT_ROOM))
        assert not task.done()
        assert side.state.queued == 1
        task.cancel()

    run(main())
