"""One message over many connections in C, and a place in line for a message chosen later."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aiordma._core import FOR_PYTHON, NO_ROOM, MessageState
from aiordma.endpoint.wire import FRAME, FrameKind
from aiordma.errors import ConnectionLostError

from ..conftest import LIMIT_S, settle
from ..endpoint.test_sender import Side

REFUSED = (FOR_PYTHON, NO_ROOM)


def sides(*credits: int) -> list[Side]:
    """Connections whose peers have granted these credits."""
    made = [Side() for _ in credits]
    for side, granted in zip(made, credits, strict=True):
        side.grant(granted)
    return made


def states_of(made: list[Side]) -> tuple[MessageState, ...]:
    return tuple(side.state for side in made)


async def test_those_without_room_are_told() -> None:
    made = sides(1, 0, 2, 0)
    states = states_of(made)
    refused = MessageState.send_each(states, [b"a", bytearray(b"b")], 5)
    assert refused is not None
    assert [number for number, _ in refused] == [1, 3]
    assert all(code in REFUSED for _, code in refused)
    assert [side.bodies for side in made] == [[b"ab"], [], [b"ab"], []]
    assert MessageState.send_each(states[2:3], b"c", None) is None
    assert made[2].bodies == [b"ab", b"c"]
    assert MessageState.send_each((), b"c", None) is None


async def test_an_error_of_a_post_is_told_of_its_connection_alone() -> None:
    made = sides(1, 1, 1)
    made[1].link.refusals.append(12)
    assert MessageState.send_each(states_of(made), b"x", None) == [(1, 12)]
    assert [len(side.bodies) for side in made] == [1, 0, 1]


@pytest.mark.parametrize("wrong", ["text", 7, None, [b"", 1]])
async def test_what_is_no_buffer_is_for_python(wrong: Any) -> None:
    (side,) = made = sides(1)
    assert MessageState.send_each(states_of(made), wrong, None) == [(0, FOR_PYTHON)]
    assert MessageState.send_each(states_of(made), b"", 1 << 32) == [(0, FOR_PYTHON)]
    assert side.bodies == []


async def test_other_arguments_are_refused() -> None:
    states: Any = [side.state for side in sides(1)]
    for arguments in ((states, b"", None), ((1,), b"", None), ((), b"")):
        with pytest.raises(TypeError):
            MessageState.send_each(*arguments)
    with pytest.raises(TypeError):
        states[0].send_first(b"")


async def test_another_thread_sends_nothing() -> None:
    made = sides(1, 1)
    found = list[Any]()
    thread = threading.Thread(
        target=lambda: found.append(MessageState.send_each(states_of(made), b"x", None))
    )
    thread.start()
    thread.join(LIMIT_S)
    assert found == [[(0, FOR_PYTHON), (1, FOR_PYTHON)]]
    assert not any(side.bodies for side in made)


# A place in line


async def test_the_message_is_chosen_when_there_is_room_for_it() -> None:
    """And it goes before those of tasks that wait behind."""
    side = Side()
    newest = [b"old"]

    async def send_newest() -> None:
        await side.sender.wait_room()
        assert side.state.send_first(newest[0], None) == 0

    first = asyncio.create_task(send_newest())
    await settle()
    second = side.send(b"behind")
    await settle()
    newest[0] = b"new"
    side.grant(1)
    await settle()
    assert side.bodies == [b"new"]
    assert first.done()
    assert not second.done()
    side.grant(1)
    await settle()
    assert side.bodies == [b"new", b"behind"]
    await asyncio.gather(first, second)


async def test_room_is_there_at_once() -> None:
    side = Side()
    side.grant(1)
    await side.sender.wait_room()
    assert side.bodies == []
    assert side.state.send_first(b"x", 3) == 0
    assert side.state.send_first(b"x", 3) in REFUSED
    assert side.bodies == [b"x"]


@pytest.mark.parametrize("by_loop", [False, True], ids=["by the drain", "by the loop"])
@pytest.mark.parametrize("how", ["sends nothing", "is canceled", "is canceled late"])
async def test_room_that_is_not_used_is_for_the_next(how: str, by_loop: bool) -> None:
    """Also where the loop resumes as many tasks as there are credits, and no more."""
    side = Side()
    side.link.drain.resume_by_loop(by_loop)
    side.grant(1)
    await side.send(b"first")
    side.acknowledge()
    await settle()
    first = asyncio.create_task(side.sender.wait_room())
    await settle()
    second = side.send(b"next")
    await settle()
    if how == "is canceled":
        first.cancel()
        await settle()
    # The credit comes with a frame of the peer, and so by the drain.
    side.link.inject(FRAME.pack(FrameKind.CREDIT, 0, 1, 0, 0))
    if how == "is canceled late":
        first.cancel()
    await settle()
    assert second.done()
    assert side.bodies == [b"first", b"next"]
    await asyncio.gather(first, second, return_exceptions=True)


async def test_the_end_of_the_connection_ends_the_wait() -> None:
    side = Side()
    waiting = asyncio.create_task(side.sender.wait_room())
    await settle()
    side.sender.refuse(lambda: ConnectionLostError(104, "lost"))
    with pytest.raises(ConnectionLostError):
        await waiting
    with pytest.raises(ConnectionLostError):
        await side.sender.wait_room()


async def test_the_limit_of_the_line_holds_for_it() -> None:
    side = Side(stall_timeout_s=0.05)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            await side.sender.wait_room()
    assert side.state.queued == 0
