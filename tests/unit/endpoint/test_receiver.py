"""Receiver: no message and no slot is lost; a credit is owed only for a posted receive."""

from __future__ import annotations

import asyncio
import gc
from collections import deque

import pytest

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.message import Message
from aiordma.endpoint.receiver import Arrival, Receiver
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, HAS_IMM, FrameKind
from aiordma.errors import ConnectionEndedError

from ..conftest import Run, settle
from .fabric import FakeLink, as_link, record


class Side:
    """A receiver whose peer is the test."""

    def __init__(self, **settings: object) -> None:
        values = {"slot_size": 64, "recv_depth": 4} | settings
        self.config = ConnectionConfig(**values)  # type: ignore[arg-type]
        self.link = FakeLink(self.config)
        self.controls: list[tuple[int, int, int, bytes, int | None]] = []
        self.credits: list[int] = []
        self.returned: list[int] = []
        self.taken: list[int] = []
        self.receiver = Receiver(
            as_link(self.link), self.config, self.on_control, self.credits.append,
            self.send_credit, self.taken.append,
        )  # fmt: skip
        self.link.post_recv(range(self.link.recv.count))

    def on_control(
        self, kind: int, flags: int, argument: int, body: memoryview, imm: int | None
    ) -> None:
        self.controls.append((kind, flags, argument, bytes(body), imm))

    def send_credit(self) -> None:
        self.returned.append(self.receiver.window.take(0xFFFF, alone=True))

    def arrive(self, frame: bytes, imm: int | None = None) -> int:
        slot = self.link.posted.popleft()
        self.link.recv.slot(slot, len(frame))[:] = frame
        self.receiver.on_frame(slot, record(len(frame), imm))
        return slot

    def data(self, body: bytes, imm: int | None = None, credits: int = 0) -> int:
        flags = 0 if imm is None else HAS_IMM
        return self.arrive(FRAME.pack(FrameKind.DATA, flags, credits, imm or 0, len(body)) + body)

    @property
    def away(self) -> int:
        """Receive slots that the adapter does not have."""
        return self.link.recv.count - len(self.link.posted)


def lost() -> BaseException:
    return ConnectionResetError("lost")


def ended() -> BaseException:
    return ConnectionEndedError("ended")


def test_messages_come_in_order_with_their_immediates(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.data(b"one", imm=0)
        side.data(b"", imm=0xFFFFFFFF)
        side.data(b"x" * 48)
        messages = [await side.receiver.recv() for _ in range(3)]
        assert [(bytes(m), m.imm) for m in messages] == [
            (b"one", 0), (b"", 0xFFFFFFFF), (b"x" * 48, None),
        ]  # fmt: skip
        assert side.receiver.heard

    run(main())


def test_raw_messages_are_taken_as_they_are(run: Run) -> None:
    async def main() -> None:
        side = Side(raw=True)
        side.arrive(b"ab", imm=0x01020304)
        side.arrive(b"c")
        first, second = await side.receiver.recv(), await side.receiver.recv()
        assert (bytes(first), first.imm) == (b"ab", 0x01020304)
        assert (bytes(second), second.imm) == (b"c", None)
        first.release()
        second.release()
        assert side.away == 0
        assert side.returned == [], "a foreign peer knows no credits"

    run(main())


def test_a_credit_is_owed_only_once_the_slot_is_posted_again(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=3)
        posted_when_returned: list[int] = []
        side.receiver.window._send_credit = lambda: posted_when_returned.append(side.away)
        side.data(b"x")
        side.data(b"y")
        messages = [await side.receiver.recv()]
        assert side.away == 2
        assert side.receiver.window.take(10, alone=False) == 0, "both are still held"
        messages[0].release()
        (await side.receiver.recv()).release()
        assert side.away == 0
        assert posted_when_returned == [0]
        assert side.receiver.window.take(10, alone=False) == 2

    run(main())


@pytest.mark.parametrize(("depth", "threshold"), [(2, 2), (3, 2), (4, 2), (5, 3), (64, 32)])
def test_credits_return_by_themselves_at_half_the_depth(
    run: Run, depth: int, threshold: int
) -> None:
    async def main() -> None:
        side = Side(recv_depth=depth)
        for count in range(1, 2 * depth + 1):
            side.data(b"x")
            (await side.receiver.recv()).release()
            assert len(side.returned) == count // threshold
        assert set(side.returned) == {threshold}

    run(main())


def test_taking_owed_credits_is_bounded_and_counts_once(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=10)
        for _ in range(4):
            side.data(b"x")
            (await side.receiver.recv()).release()
        assert [side.receiver.window.take(3, alone=False) for _ in range(3)] == [3, 1, 0]

    run(main())


@pytest.mark.parametrize("depth", [2, 3, 4, 9])
def test_a_program_that_keeps_every_message_never_stops_the_peer(run: Run, depth: int) -> None:
    async def main() -> None:
        side = Side(recv_depth=depth)
        kept: list[Message] = []
        available = depth
        for n in range(5 * depth):
            assert available > 0, "the peer has no credit left"
            available -= 1
            side.data(bytes([n]))
            kept.append(await side.receiver.recv())
            available += sum(side.returned)
            side.returned.clear()
            assert side.away <= depth // 2
        assert [bytes(message) for message in kept] == [bytes([n]) for n in range(5 * depth)]
        for message in kept:
            message.release()
        assert side.away == 0

    run(main())


def test_messages_that_nobody_takes_stay_where_they_are(run: Run) -> None:
    async def main() -> None:
        side = Side()
        for _ in range(4):
            side.data(b"x")
        assert side.away == 4
        assert side.returned == []

    run(main())


def test_a_message_that_is_dropped_gives_its_slot_back(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.data(b"x")
        await side.receiver.recv()
        gc.collect()
        assert side.away == 0

    run(main())


def test_a_slot_that_is_looked_at_waits_for_the_view(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.data(b"abc")
        message = await side.receiver.recv()
        view = memoryview(message)
        del message
        gc.collect()
        assert side.away == 1
        side.data(b"other")
        assert bytes(view) == b"abc"
        view.release()
        side.data(b"third")  # with the next message the slot is tried again
        assert side.away == 2

    run(main())


def test_control_frames_give_their_slots_back_at_once(run: Run) -> None:
    async def main() -> None:
        side = Side()
        for kind in (FrameKind.CREDIT, FrameKind.DONE, FrameKind.PING, FrameKind.PONG):
            side.arrive(FRAME.pack(kind, 2, 3, 0, 7))
        assert side.away == 0
        assert side.credits == [3, 3, 3, 3]
        assert [(c[0], c[1], c[2]) for c in side.controls] == [(k, 2, 7) for k in (0, 3, 4, 5)]
        assert side.receiver.window.unused == 4, "they need no credit"

    run(main())


def test_a_slot_goes_back_even_if_the_handler_raises(run: Run) -> None:
    async def main() -> None:
        side = Side()

        def fail(*args: object) -> None:
            raise ZeroDivisionError

        side.receiver._on_control = fail
        with pytest.raises(ZeroDivisionError):
            side.arrive(FRAME.pack(FrameKind.PING, 0, 0, 0, 0))
        assert side.away == 0

    run(main())


def test_an_announcement_needs_a_credit_and_returns_it(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=2)
        for count in (1, 2):
            side.arrive(FRAME.pack(FrameKind.RENDEZVOUS, HAS_IMM, 0, 9, 100) + b"b" * 16)
            assert side.controls == [(FrameKind.RENDEZVOUS, HAS_IMM, 100, b"b" * 16, 9)] * count
            assert side.away == 0
        assert side.returned == [2]

    run(main())


def test_a_large_message_keeps_its_place(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.data(b"first")
        place = Arrival(None, fetched=100)
        side.receiver.arrived(place)
        side.data(b"last")
        assert bytes(await side.receiver.recv()) == b"first"
        waiting = asyncio.create_task(side.receiver.recv())
        await settle()
        assert not waiting.done(), "the last must not overtake"
        place.message = Message(memoryview(b"large"))
        side.receiver.wake()
        assert bytes(await waiting) == b"large"
        assert side.taken == [100]
        assert bytes(await side.receiver.recv()) == b"last"

    run(main())


@pytest.mark.parametrize("rounds", range(4))
def test_a_canceled_recv_loses_no_message(run: Run, rounds: int) -> None:
    async def main() -> None:
        side = Side()
        first, second = (asyncio.create_task(side.receiver.recv()) for _ in range(2))
        await settle()
        side.data(b"x")
        await settle(rounds)
        first.cancel()
        await settle()
        if first.cancelled():
            assert bytes(await second) == b"x", "the wake-up went with the canceled one"
        else:
            assert bytes(first.result()) == b"x"
            side.data(b"y")
            assert bytes(await second) == b"y"
        assert not side.receiver._waiters

    run(main())


def test_many_waiters_and_many_messages_in_one_round(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=8)
        tasks = [asyncio.create_task(side.receiver.recv()) for _ in range(8)]
        await settle()
        for n in range(8):
            side.data(bytes([n]))
        got = [bytes(message) for message in await asyncio.gather(*tasks)]
        assert got == [bytes([n]) for n in range(8)]

    run(main())


def test_the_end_comes_after_the_messages_and_to_everybody(run: Run) -> None:
    async def main() -> None:
        side = Side()
        waiting = [asyncio.create_task(side.receiver.recv()) for _ in range(3)]
        await settle()
        side.data(b"x")
        side.receiver.end(ended)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert bytes(results[0]) == b"x"  # type: ignore[arg-type]
        assert all(isinstance(result, ConnectionEndedError) for result in results[1:])
        with pytest.raises(ConnectionEndedError):
            await side.receiver.recv()

    run(main())


def test_a_failure_comes_after_what_had_arrived_without_a_gap(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.data(b"first")
        side.receiver.arrived(Arrival(None, fetched=100))
        side.data(b"behind the gap")
        side.receiver.fail(lost)
        assert bytes(await side.receiver.recv()) == b"first"
        with pytest.raises(ConnectionResetError, match="lost"):
            await side.receiver.recv()
        with pytest.raises(ConnectionResetError, match="lost"):
            await side.receiver.recv()

    run(main())


def test_what_the_program_drops_goes_back(run: Run) -> None:
    async def main() -> None:
        side = Side()
        for _ in range(3):
            side.data(b"x")
        side.receiver.fail(lost)
        side.receiver.drop_all()
        gc.collect()
        assert side.away == 0
        with pytest.raises(ConnectionResetError, match="lost"):
            await side.receiver.recv()

    run(main())


@pytest.mark.parametrize("length", range(FRAME_SIZE))
def test_a_short_frame_is_a_violation(run: Run, length: int) -> None:
    async def main() -> None:
        side = Side()
        side.arrive(bytes(length))
        assert f"a message of {length} bytes is shorter" in str(side.link.failure)
        assert side.receiver.queue == deque()

    run(main())
