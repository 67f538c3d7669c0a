"""Broadcast: one message for many connections, whatever becomes of some of them."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from aiordma import Broadcast, Connection, ConnectionConfig, ConnectionLostError
from tests.device.oracle import until
from tests.device.stepping import Steps, for_every_step, run_canceled

pytestmark = pytest.mark.device

KIB, MIB = 1 << 10, 1 << 20
ONE = ConnectionConfig(recv_depth=1)
TWO = ConnectionConfig(recv_depth=2)
SIZES = (0, 1, 1000, 5 * KIB + 872, 6 * KIB, 100 * KIB, 300 * KIB, 3 * MIB)


class Scene:
    """A publisher's ends, and those of its subscribers, in the same order."""

    def __init__(self) -> None:
        self.ours: list[Connection] = []
        self.theirs: list[Connection] = []


@asynccontextmanager
async def scene(
    address: str, *configs: ConnectionConfig | None, ours: ConnectionConfig | None = None
) -> AsyncIterator[Scene]:
    """A publisher, and a subscriber with each of these settings."""
    there = Scene()
    async with aiordma.listen(address, 0, config=ours) as listener:
        try:
            for config in configs:
                accepting = asyncio.create_task(listener.accept())
                there.theirs.append(await aiordma.connect(address, listener.port, config=config))
                there.ours.append(await accepting)
            yield there
        finally:
            await asyncio.gather(*(end.close() for end in (*there.ours, *there.theirs)))


async def next_of(connection: Connection) -> bytes:
    async with asyncio.timeout(10):
        with await connection.recv() as message:
            return bytes(message)


def number(value: int, size: int = 1000) -> bytes:
    return value.to_bytes(4, "big").ljust(size, b".")


async def numbers(connection: Connection, count: int) -> list[int]:
    return [int.from_bytes((await next_of(connection))[:4], "big") for _ in range(count)]


async def fill(broadcast: Broadcast, limit: int = 500) -> int:
    """Send until a connection has no room; how many messages were sent over all."""
    for count in range(limit):
        if (await broadcast.send(number(count))).dropped:
            return count
        await asyncio.sleep(0)
    raise AssertionError("there is always room")


def nothing_waits(broadcast: Broadcast) -> bool:
    return not any(stats.waiting for stats in broadcast.stats.values())


async def until_room(connection: Connection) -> None:
    """Wait for the credits of what the peer has taken."""
    await until(lambda: not connection._state.lacks)


# What arrives


@pytest.mark.smoke
@pytest.mark.parametrize("slow", ["wait", "drop", "latest"])
async def test_each_gets_the_message(address: str, slow: Any) -> None:
    async with scene(address, *[ONE if slow == "latest" else None] * 5) as there:
        broadcast = Broadcast(there.ours, slow=slow)
        for size in SIZES:
            message = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
            got = [asyncio.create_task(next_of(end)) for end in there.theirs]
            await asyncio.sleep(0)
            delivery = await broadcast.send(message)
            assert len(delivery.waiting) + delivery.sent == 5
            assert not delivery.failed
            for task in got:
                assert await task == message
            await until(functools.partial(nothing_waits, broadcast))
            for end in there.ours:
                await until_room(end)
        for stats in broadcast.stats.values():
            assert (stats.sent, stats.dropped, stats.failed) == (len(SIZES), 0, 0)


@pytest.mark.parametrize("slow", ["wait", "drop", "latest"])
async def test_parts_and_an_immediate(address: str, slow: Any) -> None:
    async with scene(address, ONE, ONE) as there:
        broadcast = Broadcast(there.ours, slow=slow)
        body = bytearray(b"body")
        await broadcast.send([b"head ", body], imm=7)
        body[:] = b"gone"
        for end in there.theirs:
            message = await end.recv()
            assert bytes(message) == b"head body"
            assert message.imm == 7


async def test_bytes_that_wait_are_kept(address: str) -> None:
    """The program may change its buffer as soon as the call has returned."""
    async with scene(address, ONE) as there:
        broadcast = Broadcast(there.ours, slow="latest")
        buffer = bytearray(b"first")
        assert (await broadcast.send(buffer)).sent == 1
        buffer[:] = b"other"
        assert (await broadcast.send(buffer)).waiting == there.ours
        buffer[:] = b"third"
        assert await next_of(there.theirs[0]) == b"first"
        assert await next_of(there.theirs[0]) == b"other"


async def test_memory_that_they_share_is_sent_in_place(address: str) -> None:
    async with aiordma.Memory(2 * MIB) as memory, aiordma.listen(address, 0, memory=memory) as hall:
        ends = []
        for _ in range(2):
            accepting = asyncio.create_task(hall.accept())
            ends.append((await aiordma.connect(address, hall.port), await accepting))
        memory.view[:4] = b"here"
        broadcast = Broadcast(server for _, server in ends)
        sending = asyncio.create_task(broadcast.send(memory[0:MIB]))
        for client, _ in ends:
            assert (await next_of(client))[:4] == b"here"
        assert (await sending).sent == 2
        for slow in ("drop", "latest"):
            with pytest.raises(TypeError, match="part of a Memory"):
                await Broadcast(slow=slow).send(memory[0:MIB])
        for pair in ends:
            await asyncio.gather(*(end.close() for end in pair))


async def test_raw_connections(address: str) -> None:
    """They have no credits, so that nobody knows what their peers have taken."""
    raw = ConnectionConfig(raw=True)
    async with scene(address, raw, raw, ours=raw) as there:
        with pytest.raises(ValueError, match="without `raw`"):
            Broadcast(there.ours, slow="latest")
        for slow in ("wait", "drop"):
            broadcast = Broadcast(there.ours, slow=slow)
            assert (await broadcast.send(b"raw")).sent == 2
            for end in there.theirs:
                assert await next_of(end) == b"raw"
            assert len((await broadcast.send(bytes(100 * KIB))).failed) == 2


# A peer that takes one message at a time


@pytest.mark.parametrize("size", [10, 7000, 90 * KIB, 500 * KIB])
async def test_a_depth_of_one_lets_one_message_wait(address: str, size: int) -> None:
    """One lies at the peer, and the next waits until that one is received."""
    async with scene(address, ONE) as there:
        (sender,), (receiver,) = there.ours, there.theirs
        for value in range(0, 20, 2):
            sending = [asyncio.create_task(sender.send(number(value + n, size))) for n in range(2)]
            await asyncio.sleep(0.005)
            assert not sending[1].done()
            assert await numbers(receiver, 2) == [value, value + 1]
            await asyncio.gather(*sending)


async def test_several_tasks_receive_with_a_depth_of_one(address: str) -> None:
    async with scene(address, ONE) as there:
        got = list[int]()

        async def take() -> None:
            while len(got) < 100:
                got.extend(await numbers(there.theirs[0], 1))

        takers = [asyncio.create_task(take()) for _ in range(4)]
        for value in range(100):
            async with asyncio.timeout(10):
                await there.ours[0].send(number(value, (10, 7000, 90 * KIB, 500 * KIB)[value % 4]))
        await until(lambda: len(got) == 100)
        assert got == list(range(100))
        for task in takers:
            task.cancel()
        await asyncio.gather(*takers, return_exceptions=True)


async def test_requests_with_a_depth_of_one(address: str) -> None:
    async def double(request: aiordma.Request) -> bytes:
        return bytes(request.body) * 2

    async with (
        aiordma.serve_requests(double, address, 0, config=ONE) as server,
        aiordma.connect(address, server.port, config=ONE) as client,
        asyncio.timeout(30),
    ):
        answers = await asyncio.gather(*(client.request(b"%d" % n) for n in range(300)))
        assert [bytes(answer) for answer in answers] == [b"%d" % n * 2 for n in range(300)]
        assert len(await client.request(bytes(2 * MIB))) == 4 * MIB


# Slow subscribers


@pytest.mark.smoke
async def test_the_latest_is_the_newest_when_the_one_before_was_taken(address: str) -> None:
    """At most one message lies at the peer while its program works on another."""
    async with scene(address, ONE, ONE) as there:
        slow, fast = there.theirs
        broadcast = Broadcast(there.ours, slow="latest")

        async def publish(first: int, last: int) -> None:
            for value in range(first, last):
                await broadcast.send(number(value))
                assert await numbers(fast, 1) == [value]
                # The fast one has taken it, and its credit comes back.
                await until_room(there.ours[1])

        await publish(0, 1)
        assert await numbers(slow, 1) == [0]
        for first in range(1, 40, 10):
            await publish(first, first + 10)
            # `first` was sent when the last was taken; all between were replaced.
            got = await numbers(slow, 2)
            assert got == [first, first + 9], "older than the time of one message"
        stats = broadcast.stats[there.ours[0]]
        assert (stats.sent, stats.dropped, stats.waiting) == (9, 32, 0)
        assert broadcast.stats[there.ours[1]].dropped == 0


@pytest.mark.parametrize("size", [100 * KIB, 300 * KIB, 2 * MIB])
async def test_the_latest_of_large_messages(address: str, size: int) -> None:
    """None is fetched ahead of the program."""
    async with scene(address, ONE) as there:
        (subscriber,) = there.theirs
        broadcast = Broadcast(there.ours, slow="latest")
        for value in range(20):
            await broadcast.send(number(value, size))
            await asyncio.sleep(0.005)
        got = await numbers(subscriber, 2)
        assert got[0] <= 1
        assert got[1] in (1, 19)  # the first of all may have gone into a slot or a landing
        for value in range(20, 30):
            await broadcast.send(number(value, size))
            await asyncio.sleep(0.005)
        while got[-1] != 29:
            got += await numbers(subscriber, 1)
        assert len(got) <= 6, got


async def test_a_small_message_does_not_pass_a_large_one(address: str) -> None:
    async with scene(address, ONE) as there:
        broadcast = Broadcast(there.ours, slow="latest")
        await broadcast.send(number(0, MIB))
        await asyncio.sleep(0.05)
        await broadcast.send(number(1))
        await broadcast.send(number(2))
        assert await numbers(there.theirs[0], 2) == [0, 2]


async def test_others_that_send_are_in_line(address: str) -> None:
    """A program may send over the same connection; all of its messages arrive, in order."""
    async with scene(address, ONE) as there:
        (ours,), (theirs,) = there.ours, there.theirs
        broadcast = Broadcast([ours], slow="latest")
        await broadcast.send(number(0))
        for value in range(1, 5):
            await broadcast.send(number(value))
        own = [asyncio.create_task(ours.send(number(value))) for value in range(100, 104)]
        await asyncio.sleep(0.01)
        await broadcast.send(number(5))
        got = await numbers(theirs, 6)
        assert [value for value in got if value >= 100] == [100, 101, 102, 103]
        assert [value for value in got if value < 100] == [0, 5]
        await asyncio.gather(*own)


async def test_drop_counts_what_a_connection_misses(address: str) -> None:
    async with scene(address, TWO, None) as there:
        broadcast = Broadcast(there.ours, slow="drop")
        missed = []
        for value in range(50):
            delivery = await broadcast.send(number(value))
            assert list(delivery.dropped) in ([], [there.ours[0]])
            missed += [value] * len(delivery.dropped)
            assert delivery.sent == 2 - len(delivery.dropped)
            assert await numbers(there.theirs[1], 1) == [value]
            await until_room(there.ours[1])
        kept = [value for value in range(50) if value not in missed]
        assert await numbers(there.theirs[0], len(kept)) == kept
        assert 2 <= len(kept) <= 4
        assert broadcast.stats[there.ours[0]].dropped == len(missed)
        assert broadcast.stats[there.ours[0]].sent == len(kept)
        await until_room(there.ours[0])
        assert (await broadcast.send(b"room again")).sent == 2


async def test_drop_of_large_messages(address: str) -> None:
    """One is under way at a time."""
    config = ConnectionConfig(receive_buffer_size=1)
    async with scene(address, config) as there:
        broadcast = Broadcast(there.ours, slow="drop")
        assert (await broadcast.send(number(0, 2 * MIB))).sent == 1
        for value in (1, 2):
            assert (await broadcast.send(number(value, 2 * MIB))).dropped == there.ours
        assert await numbers(there.theirs[0], 1) == [0]
        await until(lambda: not broadcast.stats[there.ours[0]].waiting)
        assert (await broadcast.send(number(3, 2 * MIB))).sent == 1
        assert await numbers(there.theirs[0], 1) == [3]


@pytest.mark.smoke
async def test_wait_delays_nobody_else(address: str) -> None:
    async with scene(address, TWO, None, None) as there:
        full = await fill(Broadcast(there.ours, slow="drop"))
        for end in there.theirs[1:]:
            await numbers(end, full + 1)
        broadcast = Broadcast(there.ours)
        sending = asyncio.create_task(broadcast.send(number(1000)))
        for end in there.theirs[1:]:
            assert await numbers(end, 1) == [1000]
        assert not sending.done()
        assert broadcast.stats[there.ours[0]].sent == 0
        assert await numbers(there.theirs[0], full) == list(range(full))
        assert (await sending).sent == 3
        assert await numbers(there.theirs[0], 1) == [1000]


async def test_messages_of_several_calls_stay_in_order(address: str) -> None:
    async with scene(address, TWO, None) as there:
        broadcast = Broadcast(there.ours)
        calls = [asyncio.create_task(broadcast.send(number(value))) for value in range(30)]
        for end in there.theirs:
            assert await numbers(end, 30) == list(range(30))
        assert {delivery.sent for delivery in await asyncio.gather(*calls)} == {2}


@pytest.mark.parametrize("size", [1000, 2 * MIB])
async def test_the_timeout_of_wait(address: str, size: int) -> None:
    async with scene(address, ConnectionConfig(recv_depth=2, receive_buffer_size=1), None) as there:
        full = await fill(Broadcast(there.ours, slow="drop"))
        await numbers(there.theirs[1], full + 1)
        await until_room(there.ours[1])
        broadcast = Broadcast(there.ours)
        taking = asyncio.create_task(next_of(there.theirs[1]))
        # The other one has to fetch a large message in that time, however busy the machine.
        delivery = await broadcast.send(number(7, size), timeout=0.5 if size < MIB else 3)
        assert delivery.sent == 1
        assert delivery.dropped == [there.ours[0]]
        assert len(await taking) == size
        assert broadcast.stats[there.ours[0]].dropped == 1
        assert await numbers(there.theirs[0], full) == list(range(full))
        with pytest.raises(ValueError, match="nothing waits"):
            await Broadcast(slow="drop").send(b"", timeout=1)


async def test_a_stalled_subscriber_leaves(address: str) -> None:
    """One whose publisher has a limit for a peer that takes nothing."""
    async with scene(address, ONE, ours=ConnectionConfig(stall_timeout_s=0.2)) as there:
        gone = list[tuple[Connection, BaseException]]()
        broadcast = Broadcast(
            there.ours, slow="latest", on_leave=lambda conn, why: gone.append((conn, why))
        )
        for value in range(3):
            await broadcast.send(number(value))
        await until(lambda: bool(gone))
        assert gone[0][0] is there.ours[0]
        assert isinstance(gone[0][1], TimeoutError)
        assert len(broadcast) == 0
        assert not there.ours[0].is_closing(), "it belongs to the program"


# Ends


def _close(ends: tuple[Connection, Connection]) -> None:
    ends[0].abort()


def _peer_aborts(ends: tuple[Connection, Connection]) -> None:
    ends[1].abort()


@pytest.mark.parametrize("slow", ["wait", "drop", "latest"])
@pytest.mark.parametrize("end", [_close, _peer_aborts], ids=["ours", "theirs"])
async def test_a_connection_that_ends_leaves(
    address: str, slow: Any, end: Callable[[tuple[Connection, Connection]], None]
) -> None:
    """While messages wait for it, and also before anything else is sent."""
    async with scene(address, ONE, ONE) as there:
        gone = list[Connection]()
        broadcast = Broadcast(there.ours, slow=slow, on_leave=lambda conn, _: gone.append(conn))
        taking = asyncio.create_task(numbers(there.theirs[1], 2 if slow == "latest" else 3))
        calls = [asyncio.create_task(broadcast.send(number(value))) for value in range(3)]
        if slow == "wait":
            assert await taking == [0, 1, 2]
        end((there.ours[0], there.theirs[0]))
        await until(lambda: bool(gone))
        assert gone == there.ours[:1]
        assert list(broadcast) == there.ours[1:]
        deliveries = await asyncio.gather(*calls)
        if slow == "wait":
            assert deliveries[0].sent == 2
            for delivery in deliveries[1:]:
                assert delivery.sent == 1
                (error,) = delivery.failed.values()
                assert isinstance(error, aiordma.RdmaError | ConnectionLostError)
        if slow == "latest":
            assert await taking == [0, 2]
        taking.cancel()
        await until(lambda: not there.ours[1]._state.lacks or slow == "drop")
        await broadcast.send(b"goes on")


async def test_a_subscriber_that_closes_in_good_order(address: str) -> None:
    async with scene(address, ONE, ONE) as there:
        gone = list[BaseException]()
        broadcast = Broadcast(there.ours, slow="latest", on_leave=lambda _, why: gone.append(why))
        await there.theirs[0].close()
        await until(lambda: bool(gone))
        assert isinstance(gone[0], ConnectionLostError)
        assert (await broadcast.send(b"x")).sent == 1


async def test_end_of_messages_and_requests_leave(address: str) -> None:
    async with scene(address, ONE, ONE, ONE) as there:
        gone = list[BaseException]()
        broadcast = Broadcast(there.ours, slow="latest", on_leave=lambda _, why: gone.append(why))
        await there.ours[0].send_eof()
        there.ours[1].requests()
        await until(lambda: len(gone) == 2)
        assert isinstance(gone[0], aiordma.ResourceClosedError)
        assert isinstance(gone[1], RuntimeError)
        assert list(broadcast) == there.ours[2:]
        with pytest.raises(RuntimeError, match="carries requests"):
            broadcast.add(there.ours[1])
        with pytest.raises(aiordma.ResourceClosedError):
            broadcast.add(there.ours[0])


async def test_discard(address: str) -> None:
    async with scene(address, ONE, ONE) as there:
        gone = list[Connection]()
        broadcast = Broadcast(there.ours, slow="latest", on_leave=lambda conn, _: gone.append(conn))
        for value in range(4):
            await broadcast.send(number(value))
        broadcast.discard(there.ours[0])
        broadcast.discard(there.ours[0])
        assert there.ours[0] not in broadcast
        assert there.ours[1] in broadcast
        assert await numbers(there.theirs[1], 2) == [0, 3]
        assert await numbers(there.theirs[0], 1) == [0]
        await there.ours[0].send(number(9))
        assert await numbers(there.theirs[0], 1) == [9], "what waited was not sent"
        assert not gone
        broadcast.add(there.ours[0])
        assert broadcast.stats[there.ours[0]].dropped == 0


@pytest.mark.parametrize("size", [8, 300_000], ids=["short", "large"])
async def test_nobody_waits_for_a_connection_that_was_discarded(address: str, size: int) -> None:
    async with scene(address, ONE, ONE) as there:
        broadcast = Broadcast(there.ours, slow="wait")
        slow, other = there.ours
        await broadcast.send(b"first")
        assert await next_of(there.theirs[1]) == b"first"
        sending = [asyncio.create_task(broadcast.send(bytes(size))) for _ in range(2)]
        assert await next_of(there.theirs[1]) == bytes(size)
        assert await next_of(there.theirs[1]) == bytes(size)
        assert not any(task.done() for task in sending)
        broadcast.discard(slow)
        for delivery in await asyncio.wait_for(asyncio.gather(*sending), 20):
            assert (delivery.sent, [*delivery.dropped], dict(delivery.failed)) == (1, [slow], {})
        assert broadcast.stats[other].sent == 3
        assert await next_of(there.theirs[0]) == b"first"


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("size", [8, 300_000], ids=["short", "large"])
async def test_discarded_while_a_message_begins_to_wait(
    address: str, size: int, turns: int
) -> None:
    async with scene(address, ONE) as there:
        (slow,) = there.ours
        broadcast = Broadcast(there.ours, slow="wait")
        await broadcast.send(b"first")
        sending = asyncio.create_task(broadcast.send(bytes(size)))
        for _ in range(turns):
            await asyncio.sleep(0)
        broadcast.discard(slow)
        delivery = await asyncio.wait_for(sending, 20)
        assert [*delivery.dropped] == ([slow] if turns else [])
        assert await next_of(there.theirs[0]) == b"first"
        if size == 8:
            await slow.send(b"last")
            assert await next_of(there.theirs[0]) == b"last", "what waited was not sent"


@pytest.mark.parametrize("size", [8, 300_000], ids=["short", "large"])
async def test_canceled_while_it_gives_up_those_without_room(address: str, size: int) -> None:
    """In each turn of the loop: no cancellation is lost."""
    async with scene(address, ONE) as there:
        broadcast = Broadcast(there.ours, slow="wait")
        await broadcast.send(b"first")
        canceled = True
        for turns in range(16):
            sending = asyncio.create_task(broadcast.send(bytes(size), timeout=0))
            for _ in range(turns):
                await asyncio.sleep(0)
            canceled = sending.cancel()
            await asyncio.wait([sending], timeout=20)
            assert sending.cancelled() is canceled
        assert not canceled, "the last has ended by itself"
        assert await next_of(there.theirs[0]) == b"first"


async def test_a_forgotten_broadcast_is_gone(address: str) -> None:
    async with scene(address, ONE) as there:
        broadcast = Broadcast(there.ours, slow="latest")
        await broadcast.send(b"1")
        await until(lambda: not there.ours[0]._state.queued)
        gone = weakref.ref(broadcast)
        del broadcast
        gc.collect()
        assert gone() is None
        assert await next_of(there.theirs[0]) == b"1"


async def test_what_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="'newest'"):
        Broadcast(slow="newest")  # type: ignore[arg-type]
    async with scene(address, None, ONE) as there:
        with pytest.raises(ValueError, match="recv_depth=1"):
            Broadcast(there.ours, slow="latest")
        wrong: Any = "connection"
        with pytest.raises(TypeError, match="'connection'"):
            Broadcast().add(wrong)
        broadcast = Broadcast(there.ours)
        for bad, error in ((5, TypeError), ("text", TypeError), ([1], TypeError)):
            with pytest.raises(error):
                await broadcast.send(bad)  # type: ignore[arg-type]
            with pytest.raises(error):
                await Broadcast().send(bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="32 bits"):
            await broadcast.send(b"", imm=1 << 32)
        with pytest.raises(ValueError, match="timeout"):
            await broadcast.send(b"", timeout=float("nan"))
        assert {stats.sent for stats in broadcast.stats.values()} == {0}

        async def elsewhere() -> None:
            for call in (lambda: broadcast.add(there.ours[0]), lambda: Broadcast(there.ours)):
                with pytest.raises(RuntimeError, match="another event loop"):
                    call()
            with pytest.raises(RuntimeError, match="another event loop"):
                await broadcast.send(b"")

        await asyncio.to_thread(asyncio.run, elsewhere())
    with pytest.raises(ConnectionError):
        Broadcast(there.ours)


async def test_one_that_takes_less_does_not_disturb_the_others(address: str) -> None:
    small = ConnectionConfig(recv_depth=1, max_message_size=64 * KIB)
    for slow in ("wait", "drop", "latest"):
        async with scene(address, small, ONE) as there:
            broadcast = Broadcast(there.ours, slow=slow)
            taking = asyncio.create_task(next_of(there.theirs[1]))
            delivery = await broadcast.send(bytes(300 * KIB))
            (error,) = delivery.failed.values()
            assert isinstance(error, aiordma.MessageTooLargeError)
            assert len(await taking) == 300 * KIB
            assert len(broadcast) == 2
            assert broadcast.stats[there.ours[0]].failed == 1
            await until(functools.partial(nothing_waits, broadcast))
            assert (await broadcast.send(b"small")).sent + len(delivery.waiting) >= 1


# Cancellation, and many


@pytest.mark.parametrize("size", [1000, 2 * MIB])
async def test_cancel_at_every_await(address: str, late: bool, size: int) -> None:
    """Those with room get it, those without may or may not; nothing is lost or sent twice."""
    slow = ConnectionConfig(recv_depth=2, receive_buffer_size=1)

    async def scenario(steps: Steps) -> None:
        async with scene(address, slow, None) as there:
            full = await fill(Broadcast(there.ours, slow="drop"))
            await numbers(there.theirs[1], full + 1)
            await until_room(there.ours[1])
            broadcast = Broadcast(there.ours)
            got = list[int]()
            taking = asyncio.create_task(numbers(there.theirs[1], 1))

            async def take() -> None:
                await until(lambda: steps.count > 0)
                while True:
                    got.extend(await numbers(there.theirs[0], 1))

            taking_slowly = asyncio.create_task(take())
            delivery = await run_canceled(broadcast.send(number(1000, size)), steps)
            stats = broadcast.stats[there.ours[0]]
            assert (stats.sent, stats.dropped) in ((1, 0), (0, 1))
            assert delivery is None or delivery.sent == 2
            if size < MIB or delivery is not None:
                assert await taking == [1000]
                assert (await broadcast.send(number(1001))).sent == 2
                await until(lambda: 1001 in got)
                assert got == [*range(full), *[1000] * stats.sent, 1001]
            for task in (taking, taking_slowly):
                task.cancel()
            await asyncio.gather(taking, taking_slowly, return_exceptions=True)

    assert await for_every_step(scenario, late=late, complete=size < MIB) >= 1


@pytest.mark.one_loop
@pytest.mark.parametrize("slow", ["wait", "drop", "latest"])
async def test_two_hundred(address: str, slow: Any) -> None:
    config = ConnectionConfig(recv_depth=1) if slow == "latest" else None
    async with scene(address, *[config] * 200) as there:
        broadcast = Broadcast(there.ours, slow=slow)
        lost = there.theirs[::20]
        for value in range(10):
            taking = [
                asyncio.create_task(numbers(end, 1))
                for end in there.theirs
                if end not in lost or not value
            ]
            await asyncio.sleep(0)
            delivery = await broadcast.send(number(value))
            assert not delivery.failed
            for task in taking:
                assert await task == [value]
            if not value:
                for end in lost:
                    end.abort()
                await until(lambda: len(broadcast) == 190)
        assert len(broadcast) == 190
