"""Sender: slots and credits are granted together, in order, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from aiordma._core import FRAME_HAS_IMM, Message, Waiting
from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, FrameKind
from aiordma.verbs.enums import WCStatus
from tests.inside.endpoint import receiver_of, sender_of, waiting_in

from ..conftest import LIMIT_S, Run, settle
from .fabric import FakeLink, LeftConnection


class Side:
    """The parts of a connection whose peer is the test."""

    def __init__(self, **settings: Any) -> None:
        values: dict[str, Any] = {"slot_size": 64, "send_depth": 2, "recv_depth": 4} | settings
        self.config = ConnectionConfig(**values)
        self.link = FakeLink(self.config)
        self.core = LeftConnection(self.link, self.config)
        self.sender, self.state = sender_of(self.core), self.link.state

    def grant(self, credits: int) -> None:
        """The peer has posted this many receives."""
        self.state.credits += credits
        self.sender.room()

    def owe(self, messages: int) -> None:
        """So many of the peer's messages arrive, and are taken and released."""
        for _ in range(messages):
            self.link.inject(FRAME.pack(FrameKind.DATA, 0, 0, 0, 0))
            message = receiver_of(self.core).take()
            assert message is not None
            message.release()

    def acknowledge(self) -> None:
        """The oldest send has reached the peer's adapter."""
        self.link.unacked.append(next(iter(self.link.busy)))
        self.link.acknowledge()

    def send(self, data: bytes = b"x", imm: int | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(self.sender.data(memoryview(data), imm))

    @property
    def bodies(self) -> list[bytes]:
        return [frame[FRAME_SIZE:] for frame in self.link.sent]

    @property
    def kinds(self) -> list[int]:
        return [FRAME.unpack_from(frame)[0] for frame in self.link.sent]


def lost() -> BaseException:
    return ConnectionResetError("lost")


def test_nothing_is_sent_before_the_peers_depth_is_known(run: Run) -> None:
    async def main() -> None:
        side = Side()
        task = side.send()
        await settle()
        assert side.link.sent == []
        side.grant(1)
        await task
        assert side.bodies == [b"x"]

    run(main())


def test_a_frame_as_it_is_on_the_wire(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=8)
        side.grant(2)
        side.owe(3)
        await side.send(b"abc", imm=0x01020304)
        await side.send(b"")
        assert (
            side.link.sent[0]
            == FRAME.pack(FrameKind.DATA, FRAME_HAS_IMM, 3, 0x01020304, 3) + b"abc"
        )
        assert side.link.sent[1] == FRAME.pack(FrameKind.DATA, 0, 0, 0, 0)

    run(main())


def test_c_sends_bytes_a_bytearray_and_a_message(run: Run) -> None:
    async def main() -> None:
        side = Side(send_depth=3)
        side.grant(8)
        message = Message(memoryview(b"three"))
        assert [side.state.send(data) for data in (b"one", bytearray(b"two"), message)] == [0] * 3
        await settle()
        assert side.bodies == [b"one", b"two", b"three"]
        message.release()  # its bytes were copied, and it is not exported any more

    run(main())


class NoBytes(bytes):
    """A subclass, whose bytes may lie elsewhere."""


def test_c_leaves_other_buffers_to_python_untouched(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.grant(8)
        released = Message(memoryview(b"gone"))
        released.release()
        large = bytearray(side.state.eager_size + 1)
        for data in (memoryview(b"view"), NoBytes(b"sub"), released, large, "text", None):
            assert side.state.send(data) == -1
        large.append(0)  # it is not exported
        assert side.link.sent == []
        assert (side.state.credits, side.state.n_free) == (8, 2)

    run(main())


def test_raw_messages_have_no_header(run: Run) -> None:
    async def main() -> None:
        side = Side(raw=True)
        side.state.credits = 10
        await side.send(b"abc", imm=7)
        assert side.link.sent == [b"abc"]

    run(main())


def test_a_flush_waits_while_the_reason_of_the_end_is_not_known(run: Run) -> None:
    """What the adapter flushed has come back, too, and has not arrived."""

    async def main() -> None:
        side = Side(send_depth=3)
        side.grant(3)
        for data in (b"x", b"y", b"z"):
            await side.send(data)
        side.sender.hold()
        flushing = asyncio.create_task(side.sender.flush())
        await settle()
        side.acknowledge()
        for _ in range(2):
            side.link.send_back(WCStatus.WR_FLUSH_ERR)
        side.sender.sent()  # it looks once more
        await settle()
        assert side.state.under_way == side.state.receives, "all sends have come back"
        assert not flushing.done(), "it says that the messages have arrived"
        side.sender.fail(lost)
        side.sender.settle()
        with pytest.raises(ConnectionResetError):
            await flushing

    run(main())


def test_a_flush_that_has_nothing_to_wait_for_ends_although_the_connection_has(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.grant(2)
        await side.send(b"x")
        side.acknowledge()
        side.sender.hold()
        await side.sender.flush()
        side.sender.fail(lost)
        side.sender.settle()
        await side.sender.flush()

    run(main())


@pytest.mark.parametrize("known", ["while the reason is looked for", "with it"])
def test_what_has_arrived_before_the_end_is_flushed(run: Run, known: str) -> None:
    """The task that waits runs only when the connection is over."""

    async def main() -> None:
        side = Side()
        side.grant(2)
        await side.send(b"x")
        first = asyncio.create_task(side.sender.flush())
        await side.send(b"y")
        both = asyncio.create_task(side.sender.flush())
        await settle()
        if known != "with it":
            side.sender.hold()
        side.acknowledge()
        side.sender.fail(lost)
        side.sender.settle()
        await first
        with pytest.raises(ConnectionResetError):
            await both

    run(main())


def test_a_frame_that_was_never_sent_is_not_flushed(run: Run) -> None:
    """All that was posted has arrived, and END waits for a slot that never comes."""

    async def main() -> None:
        side = Side()
        for _ in range(CONTROL_SLOTS):
            side.sender.control(FrameKind.DONE)
        side.sender.control(FrameKind.END)
        flushing = asyncio.create_task(side.sender.flush_all())
        await settle()
        side.state.dead = True  # before the slots are free, which would be given to END
        while side.link.busy:
            side.acknowledge()
        side.sender.fail(lost)
        side.sender.settle()
        with pytest.raises(ConnectionResetError):
            await flushing
        assert FrameKind.END not in side.kinds

    run(main())


@pytest.mark.parametrize("short_of", ["slots", "credits"])
def test_first_come_first_served(run: Run, short_of: str) -> None:
    async def main() -> None:
        side = Side()
        side.grant(100 if short_of == "slots" else 2)
        tasks = [side.send(bytes([n])) for n in range(8)]
        await settle()
        assert len(side.link.sent) == 2
        for _ in range(6):
            side.acknowledge()
            if short_of == "credits":
                side.grant(1)
            await settle()
        await asyncio.gather(*tasks)
        assert side.bodies == [bytes([n]) for n in range(8)]

    run(main())


@pytest.mark.parametrize("begins", ["before the grant", "after it", "after it, in C"])
def test_a_newcomer_does_not_overtake_who_was_granted_or_waits(run: Run, begins: str) -> None:
    async def main() -> None:
        side = Side(send_depth=3)
        side.grant(3)
        for _ in range(3):
            await side.send(b"0")
        waiting = [side.send(b"1"), side.send(b"2")]
        await settle()
        # A task that begins before the grant has its turn before those that are resumed.
        early = [side.send(b"3")] if begins == "before the grant" else []
        for _ in range(3):
            side.acknowledge()
        side.grant(10)  # to both; they have not resumed
        if begins == "after it, in C":
            assert isinstance(side.state.send(b"3"), Waiting)
        late = early or [side.send(b"3")]
        for _ in range(3):
            await settle()
            if side.link.busy:
                side.acknowledge()
        await asyncio.gather(*waiting, *late)
        assert side.bodies == [b"0", b"0", b"0", b"1", b"2", b"3"]
        assert side.state.send(b"4") == 0, "there is room, and no task waits"

    run(main())


@pytest.mark.parametrize("rounds", range(5))
@pytest.mark.parametrize("cancel_first", [True, False])
def test_cancellation_at_every_point_loses_neither_slot_nor_credit(
    run: Run, rounds: int, cancel_first: bool
) -> None:
    async def main() -> None:
        side = Side(send_depth=1)
        side.grant(1)
        await side.send(b"0")
        first, second = side.send(b"1"), side.send(b"2")
        await settle()

        def free() -> None:
            side.grant(1)
            side.acknowledge()

        actions: list[Callable[[], object]] = [free, first.cancel]
        if cancel_first:
            actions.reverse()
        actions[0]()
        await settle(rounds)
        actions[1]()
        await settle()
        if first.cancelled():
            assert side.bodies == [b"0", b"2"], "the grant went to nobody"
            await second
        else:
            assert side.bodies == [b"0", b"1"]
            free()
            await second
        side.acknowledge()
        assert side.link.state.free_slots == [0]
        assert side.state.credits == 0
        assert not waiting_in(side.sender)

    run(main())


def test_a_stall_timeout_ends_the_wait_and_gives_nothing_away(run: Run) -> None:
    async def main() -> None:
        side = Side(stall_timeout_s=0.01)
        sending = side.send()
        await asyncio.wait([sending], timeout=LIMIT_S / 2)
        assert sending.done(), "it waits for a peer that takes nothing"
        with pytest.raises(TimeoutError):
            await sending
        side.grant(1)
        await side.send(b"y")
        assert side.bodies == [b"y"]

    run(main())


def test_control_messages_need_neither_credit_nor_data_slot(run: Run) -> None:
    async def main() -> None:
        side = Side(send_depth=1)
        side.grant(1)
        await side.send()
        waiting = side.send(b"y")
        await settle()
        for argument in range(CONTROL_SLOTS + 2):
            side.sender.control(FrameKind.DONE, argument)
        assert side.kinds[1:] == [FrameKind.DONE] * CONTROL_SLOTS
        for _ in range(3):
            side.acknowledge()
        arguments = [FRAME.unpack(frame)[4] for frame in side.link.sent[1:]]
        assert arguments == list(range(CONTROL_SLOTS + 2)), "in order"
        assert not waiting.done()
        waiting.cancel()

    run(main())


def test_every_message_takes_the_owed_credits_along(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=12)
        side.grant(1)
        side.owe(5)
        await side.send()
        side.owe(2)
        side.sender.control(FrameKind.PING)
        assert [FRAME.unpack_from(frame)[2] for frame in side.link.sent] == [5, 2]

    run(main())


def test_a_credit_message_is_sent_only_while_it_is_due(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=8)
        side.owe(3)
        assert side.state.credit() == 0
        assert side.kinds == [], "nothing is due"
        for _ in range(CONTROL_SLOTS):
            side.sender.control(FrameKind.DONE)
        side.owe(4)
        for _ in range(50):
            assert side.state.credit() == 0
        assert FrameKind.CREDIT not in side.kinds, "there is no slot"
        side.acknowledge()
        assert side.kinds.count(FrameKind.CREDIT) == 1
        assert FRAME.unpack_from(side.link.sent[-1])[2] == 4
        side.acknowledge()
        assert side.kinds.count(FrameKind.CREDIT) == 1, "one that returns nothing"

    run(main())


def test_a_credit_that_another_message_took_along_is_not_sent(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=8)
        for _ in range(CONTROL_SLOTS):
            side.sender.control(FrameKind.DONE)
        side.owe(4)
        assert side.state.credit() == 0
        side.grant(1)
        await side.send()
        side.acknowledge()
        assert FrameKind.CREDIT not in side.kinds

    run(main())


def test_one_answer_to_any_number_of_pings_is_queued(run: Run) -> None:
    async def main() -> None:
        side = Side()
        for _ in range(100):
            side.link.inject(FRAME.pack(FrameKind.PING, 0, 0, 0, 0))
        await settle()
        assert side.kinds == [FrameKind.PONG] * CONTROL_SLOTS
        assert side.state.has_pending == 1

    run(main())


def test_flush_waits_for_all_that_was_sent(run: Run) -> None:
    async def main() -> None:
        side = Side()
        await side.sender.flush()
        side.grant(2)
        await side.send()
        side.sender.control(FrameKind.END)
        flushes = [asyncio.create_task(side.sender.flush()) for _ in range(2)]
        await settle()
        side.acknowledge()
        await settle()
        assert not any(flush.done() for flush in flushes)
        flushes[0].cancel()
        side.acknowledge()
        await flushes[1]

    run(main())


def test_a_flush_does_not_wait_for_what_was_sent_after_it(run: Run) -> None:
    """And a later one waits for it, though the adapter tells of the first."""

    async def main() -> None:
        side = Side()
        side.grant(2)
        flushes = []
        for _ in range(2):
            await side.send()
            flushes.append(asyncio.create_task(side.sender.flush()))
            await settle()
        side.acknowledge()
        await settle()
        assert [flush.done() for flush in flushes] == [True, False]
        side.acknowledge()
        await flushes[1]

    run(main())


def test_failing_ends_every_wait_with_an_exception_of_its_own(run: Run) -> None:
    async def main() -> None:
        side = Side()
        tasks = [side.send() for _ in range(3)]
        side.sender.control(FrameKind.PING)
        tasks.append(asyncio.create_task(side.sender.flush()))
        await settle()
        side.sender.fail(lost)
        side.sender.settle()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results] == ["lost"] * 4
        assert len(set(map(id, results))) == 4
        for call in (side.sender.data(memoryview(b"x"), None), side.sender.flush()):
            with pytest.raises(ConnectionResetError, match="lost"):
                await call
        sent = len(side.link.sent)
        side.sender.control(FrameKind.PING)
        side.grant(10)
        assert len(side.link.sent) == sent

    run(main())


def test_refusing_lets_what_is_under_way_go_on(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.grant(1)
        await side.send()
        waiting = side.send()
        await settle()
        side.sender.refuse(lost)
        with pytest.raises(ConnectionResetError):
            await waiting
        side.sender.control(FrameKind.END)
        flush = asyncio.create_task(side.sender.flush())
        await settle()
        side.acknowledge()
        side.acknowledge()
        await flush
        assert side.kinds == [FrameKind.DATA, FrameKind.END]

    run(main())


def test_a_connection_that_is_aborted_while_a_send_asks_for_a_slot(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector has run a function that aborts it; the send would stand in line for ever."""

    async def main() -> None:
        side = Side(send_depth=1)
        side.grant(2)
        await side.send()

        def grow(again: Callable[[], None]) -> Iterable[int]:
            side.sender.refuse(lost)
            return ()

        with monkeypatch.context() as patch:
            patch.setattr(side.link.slots.send, "grow", grow)
            data = memoryview(bytearray(b"y"))
            with pytest.raises(ConnectionResetError, match="lost"):
                async with asyncio.timeout(LIMIT_S):
                    await side.sender.data(data, None)
            data.release()
        assert side.state.queued == 0

    run(main())
