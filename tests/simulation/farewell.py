"""A side that says some messages, and ends: what was sent has arrived, or arrives.

It ends by close(), or by abort() right behind its messages, or as an event loop ends it, which
cancels all tasks.  Or nothing gets through any more, at any moment: what a flush() has vouched for
has arrived all the same.  The connections are of the library's protocol, or raw.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field, replace

import aiordma
from tests.simulation.common import (
    ADDRESS,
    BROKEN,
    OTHER,
    count_of,
    is_broken,
    pattern,
    settings,
    unless_broken,
)
from tests.simulation.world import World

__all__ = ["farewell"]

#: At the beginning of a message: its number, that of its task, and that within the task.
_HEAD = struct.Struct("!III")
_ENDS = ("close", "abort", "abort", "loop ends", "cut", "cut")
#: Seconds after which a raw connection is given up of which nothing is heard any more, and what the
#: end of any connection may take then.
_IDLE_S, _GIVEN_UP_S = 5.0, 150.0


@dataclass
class _Speech:
    """What is said, and what is heard of it.

    Attributes:
        end: how it ends, of `_ENDS`.
        source: the adapter from which it comes.
        faulty: whether a fault beside this end may break the connection.
        calls: how many messages were tried.
        said: how many messages of each task were sent.
        flushed: how many of them a flush() has vouched for.
        heard: the head of each message that was heard, as it came.
        ended: whether it has ended, but for a close().
    """

    end: str
    source: int
    faulty: bool
    calls: int = 0
    said: dict[int, int] = field(default_factory=dict)
    flushed: dict[int, int] = field(default_factory=dict)
    heard: list[tuple[int, int, int]] = field(default_factory=list)
    ended: bool = False


async def _speak(world: World, speech: _Speech, connection: aiordma.Connection) -> None:
    """Speak, with a few tasks, and end."""
    at_flush = world.draw("cut at a flush", 2)
    async with asyncio.TaskGroup() as tasks:
        for name in range(count_of(world, "tasks", 3)):
            tasks.create_task(_say(world, speech, connection, name, at_flush))
        if speech.end == "cut" and not at_flush:
            for _ in range(world.draw("cut after", 40)):
                await asyncio.sleep(0)
            _cut(world, speech)
    if not speech.ended:
        _end(speech, connection)


def _end(speech: _Speech, connection: aiordma.Connection) -> None:
    speech.ended = True
    before = asyncio.all_tasks()
    if speech.end in {"abort", "loop ends"}:
        connection.abort()
    if speech.end == "loop ends":  # as asyncio.run() does at its end
        for task in asyncio.all_tasks() - before:
            task.cancel()


async def _say(
    world: World, speech: _Speech, connection: aiordma.Connection, name: int, at_flush: int
) -> None:
    for _ in range(count_of(world, "bursts", 3)):
        for _ in range(count_of(world, "burst", 6)):
            number, index = speech.calls, speech.said.get(name, 0)
            speech.calls += 1
            data = _HEAD.pack(number, name, index) + pattern(number, world.draw("size", 250))
            sending = connection.send(data, imm=number if number % 3 == 1 else None)
            try:
                await world.within(world.patience + 2, "send()", sending)
            except aiordma.ResourceClosedError:
                if not speech.ended:
                    raise
                return
            speech.said[name] = index + 1
        if speech.end == "cut":
            said = dict(speech.said)
            await world.within(world.patience, "flush()", connection.flush())
            for each, count in said.items():
                speech.flushed[each] = max(count, speech.flushed.get(each, 0))
            if at_flush:
                _cut(world, speech)
        elif speech.end != "close" and world.once_in("ends at once", 4):
            _end(speech, connection)
        elif world.once_in("pause", 3):
            await asyncio.sleep(world.draw("pauses", 20) / 10_000)


def _cut(world: World, speech: _Speech) -> None:
    """From now on nothing gets to the listener."""
    world.fabric.fabric_cut(speech.source, 0, 1)


async def _listen(world: World, speech: _Speech, connection: aiordma.Connection) -> None:
    """Hear everything, until the end."""
    try:
        async for message in connection:
            with message:
                head = _HEAD.unpack(message[: _HEAD.size])
                good = message[_HEAD.size :] == pattern(head[0], len(message) - _HEAD.size)
                good &= message.imm == (head[0] if head[0] % 3 == 1 else None)
                world.check(good, "a message has other bytes than were sent")
            speech.heard.append(head)
            if world.once_in("slow", 8):
                await asyncio.sleep(world.draw("slow for", 10) / 10_000)
    except BROKEN as error:
        # A raw connection has no end of messages.
        lost = speech.end != "close" or connection.config.raw or world.may_break
        world.check(lost and is_broken(world, error), f"recv() has raised {error!r}")


def _judge(world: World, speech: _Speech) -> None:
    check, numbers = world.check, [number for number, _, _ in speech.heard]
    check(numbers == sorted(set(numbers)), f"heard {numbers}: twice, or in another order")
    if speech.faulty:
        return
    for name, said in speech.said.items():
        heard = sum(each == name for _, each, _ in speech.heard)
        flushed = speech.flushed.get(name, 0)
        check(heard >= flushed, f"task {name}: {flushed} messages were flushed, {heard} heard")
        if speech.end != "cut":
            check(heard >= said, f"task {name}: {said} messages were said, {heard} heard")


async def farewell(world: World) -> None:
    """A client that speaks and ends, and a server that listens."""
    world.may_overrun = True  # the peer of a raw connection sends again
    source = world.draw("other adapter", 2)
    speech = _Speech(world.one_of("end", _ENDS), source, world.may_break)
    if speech.end == "cut":
        world.may_break = True
        world.patience = max(world.patience, _GIVEN_UP_S)
    raw = bool(world.draw("raw", 2))
    if raw and world.may_delay:  # while a message finds no receive, no retry is counted anew
        world.may_break = speech.faulty = True
    config = replace(settings(world), raw=raw, rnr_retry_count=7, raw_idle_timeout_s=_IDLE_S)

    async def handler(connection: aiordma.Connection) -> None:
        await _listen(world, speech, connection)

    async with aiordma.serve(handler, ADDRESS, 0, config=config, grace_s=100) as server:
        with unless_broken(world):
            local = (OTHER, 0) if source else None
            connection = await aiordma.connect(
                ADDRESS, server.port, local_addr=local, config=config
            )
            try:
                await _speak(world, speech, connection)
            finally:
                bound = 15 + world.patience
                await world.within(bound, "close()", connection.close())
        await world.within(world.patience + 40, "stop()", server.stop())
    _judge(world, speech)
