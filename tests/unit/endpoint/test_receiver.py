"""Receiver: no message and no slot is lost; a credit is owed only for a posted receive."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._core import FRAME_HAS_IMM, Message
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.receiving import Large
from aiordma.endpoint.wire import FRAME, FRAME_SIZE, FrameKind
from aiordma.errors import ConnectionEndedError
from tests.inside.endpoint import large_of, receiver_of, set_large, waiting_in

from ..conftest import Run, settle
from .fabric import FakeLink, LeftConnection


class Side:
    """The parts of a connection whose peer is the test."""

    def __init__(self, **settings: Any) -> None:
        values: dict[str, Any] = {"slot_size": 64, "recv_depth": 4} | settings
        self.config = ConnectionConfig(**values)
        self.link = FakeLink(self.config)
        self.core = LeftConnection(self.link, self.config)
        self.receiver, self.state = receiver_of(self.core), self.link.state
        self.link.promised = lambda: self.state.unused + self.config.control_depth

    def arrive(self, frame: bytes, imm: int | None = None) -> int:
        slot = self.link.inject(frame, imm)
        self.link.unacked.extend(self.link.busy)
        while self.link.unacked:
            self.link.acknowledge()
        return slot

    def data(self, body: bytes, imm: int | None = None, credits: int = 0) -> int:
        flags = 0 if imm is None else FRAME_HAS_IMM
        return self.arrive(FRAME.pack(FrameKind.DATA, flags, credits, imm or 0, len(body)) + body)

    def announce(self, length: int = 100, imm: int | None = None) -> None:
        """A large message."""
        flags = 0 if imm is None else FRAME_HAS_IMM
        self.arrive(FRAME.pack(FrameKind.RENDEZVOUS, flags, 0, imm or 0, length) + b"b" * 16)

    def expect(self, place: Large) -> None:
        """The next that is announced has this place."""
        self.take_announcements(lambda length, body, imm: self.receiver.announced(place))

    def take_announcements(self, announce: Callable[[int, bytes, int | None], object]) -> None:
        """In place of the fetcher."""
        large = large_of(self.core)
        set_large(
            self.core,
            SimpleNamespace(
                announce=announce,
                exposer=large.exposer,
                stop=large.stop,
                fetcher=None,
                landings=large.landings,
            ),
        )

    @property
    def returned(self) -> list[int]:
        """What each CREDIT frame has returned."""
        headers = [FRAME.unpack_from(frame) for frame in self.link.sent]
        return [header[2] for header in headers if header[0] == FrameKind.CREDIT]

    @property
    def ungranted(self) -> int:
        return self.state.posted - self.state.control - self.state.unused

    @property
    def away(self) -> int:
        """Receive slots that the adapter does not have."""
        return int(self.link.slots.recv.count) - len(self.link.ready)


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
        assert side.state.alive

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
        assert side.link.sent == [], "a foreign peer knows no credits"

    run(main())


def test_a_credit_is_owed_only_once_the_slot_is_posted_again(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=4)
        side.data(b"x")
        side.data(b"y")
        messages = [await side.receiver.recv()]
        assert side.away == 2
        assert side.ungranted == 0, "both are still held"
        messages[0].release()
        (await side.receiver.recv()).release()
        assert side.away == 0
        assert side.returned == [2], "the model checks that they are posted"

    run(main())


@pytest.mark.parametrize(("depth", "threshold"), [(2, 2), (3, 3), (4, 2), (5, 2), (64, 32)])
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
            side.link.sent.clear()
            assert side.away <= (depth + 1) // 2
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
        side.data(b"third")
        assert bytes(await side.receiver.recv()) == b"other"  # with it the slot is tried again
        gc.collect()
        assert side.away == 1

    run(main())


def test_control_frames_give_their_slots_back_at_once(run: Run) -> None:
    async def main() -> None:
        side = Side()
        done: list[tuple[int, int]] = []
        exposer = SimpleNamespace(on_done=lambda number, flags: done.append((number, flags)))
        landings = SimpleNamespace(look=lambda: None)
        set_large(side.core, SimpleNamespace(exposer=exposer, fetcher=None, landings=landings))
        for kind in (FrameKind.CREDIT, FrameKind.DONE, FrameKind.PING, FrameKind.PONG):
            side.arrive(FRAME.pack(kind, 2, 3, 0, 7))
            assert side.away == 0
        await settle()
        assert side.state.credits == 12
        assert done == [(7, 2)]
        assert [frame[0] for frame in side.link.sent] == [FrameKind.PONG]
        assert side.state.unused == 4, "they need no credit"

    run(main())


def test_a_slot_goes_back_even_if_the_handler_raises(run: Run) -> None:
    async def main() -> None:
        side = Side()

        def fail(*args: object) -> None:
            raise ZeroDivisionError

        side.take_announcements(fail)
        side.announce()
        await settle()
        with pytest.raises(ZeroDivisionError):
            side.link.raise_wrong()
        assert side.away == 0

    run(main())


def test_an_announcement_needs_a_credit_and_returns_it(run: Run) -> None:
    async def main() -> None:
        side = Side(recv_depth=2)
        seen: list[tuple[int, bytes, int | None]] = []
        side.take_announcements(lambda length, body, imm: seen.append((length, body, imm)))
        for count in (1, 2):
            side.announce(100, imm=9)
            await settle()
            assert seen == [(100, b"b" * 16, 9)] * count
            assert side.away == 0
        assert side.returned == [2]

    run(main())


def test_a_large_message_keeps_its_place(run: Run) -> None:
    async def main() -> None:
        side = Side()
        told = list[str]()
        fetcher: Any = SimpleNamespace(
            taken=lambda _: told.append("taken"), wanted=lambda: told.append("wanted")
        )
        side.receiver.fetcher = fetcher
        side.data(b"first")
        side.expect(place := Large(100))
        side.announce()
        side.data(b"last")
        await settle()
        assert bytes(await side.receiver.recv()) == b"first"
        assert told == []
        waiting = asyncio.create_task(side.receiver.recv())
        await settle()
        assert not waiting.done(), "the last must not overtake"
        assert told == ["wanted"]
        place.message = Message(memoryview(b"large"))
        side.receiver.wake()
        assert bytes(await waiting) == b"large"
        assert told == ["wanted", "taken"]
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
        assert not waiting_in(side.receiver)

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
        side.expect(Large(100))
        side.announce()
        side.data(b"behind the gap")
        await settle()
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
        side.receiver.drop_all()
        side.receiver.fail(lost)
        assert side.away == 0
        with pytest.raises(ConnectionResetError, match="lost"):
            await side.receiver.recv()

    run(main())


@pytest.mark.parametrize("length", range(FRAME_SIZE))
def test_a_short_frame_is_a_violation(run: Run, length: int) -> None:
    async def main() -> None:
        side = Side()
        side.arrive(bytes(length))
        await settle()
        assert f"a message of {length} bytes is shorter" in str(side.link.failure)
        assert side.state.arrived == 0

    run(main())
