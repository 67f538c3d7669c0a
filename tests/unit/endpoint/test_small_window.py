"""The window that a connection begins with: three messages, and no frame for each credit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from aiordma.endpoint.config import MIN_WINDOW
from aiordma.endpoint.wire import FRAME, FrameKind
from tests.inside.endpoint import handler_of, receiver_of

from ..conftest import settle
from .fabric import Wire, use_fake_regions
from .test_sharing_model import Pool, config_of


@pytest.fixture(autouse=True)
def fake_regions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_fake_regions(patch)
        yield


async def test_question_and_answer_out_of_a_pool_take_neither_python_nor_credit_frames() -> None:
    """Not while both have only what they are guaranteed: a credit goes with the next message."""
    config = config_of(recv_depth=20, send_depth=20, window=1, total=0)
    pool = Pool(config, chunk=4)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    await wire.run()
    told = list[int]()
    for link in wire.links:
        link.sent.clear()
        link.state.set_handler(told.append)

    async def ask() -> None:
        for n in range(50):
            await wire.ends[0].send(bytes([n]))
            with await wire.ends[0].recv() as answer:
                assert bytes(answer) == bytes([n, n])

    async def answer() -> None:
        for _ in range(50):
            with await wire.ends[1].recv() as question:
                await wire.ends[1].send(bytes(question) * 2)

    both = asyncio.gather(ask(), answer())
    await wire.run()
    await both
    for link in wire.links:
        assert {frame[0] for frame in link.sent} == {FrameKind.DATA}
        assert len(link.sent) == 50
        assert link.refused == 0
        assert link.state.facts()["messages_sent"] == link.state.facts()["messages_received"] == 50
    assert told == [], "Python had something to do"
    for link, end in zip(wire.links, wire.ends, strict=True):
        link.state.set_handler(handler_of(end))
    assert all(receiver_of(end).window.size == MIN_WINDOW for end in wire.ends)
    await wire.close()


@pytest.mark.parametrize("how", ["one loops", "three loop", "each takes one", "comes late"])
async def test_a_credit_that_was_put_off_comes_when_nobody_answers(
    how: str,
) -> None:
    """A program keeps one message, and waits for more: so the peer must be able to send."""
    config = config_of(recv_depth=2, send_depth=20, window=1, total=0)
    pool = Pool(config, chunk=4)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    await wire.run()
    kept, came = [], 0

    async def take() -> None:
        nonlocal came
        message = await wire.ends[1].recv()
        came += 1
        if came == 2:
            kept.append(message)  # and its slot is not posted any more
        else:
            message.release()

    async def loop() -> None:
        while True:
            await take()

    taking = {"one loops": [loop], "three loop": [loop] * 3, "each takes one": [take] * 7}
    tasks = [asyncio.create_task(take()) for take in taking.get(how, [])]
    await wire.run()
    for n in range(1, 8):
        if how == "comes late":
            assert not wire.links[1].state.receive_wakeup.waiting
        sending = asyncio.create_task(wire.ends[0].send(bytes([n])))
        await wire.run()
        assert sending.done(), "it has no credit"
        if how == "comes late":
            await take()
            if n == 2:
                tasks.append(asyncio.create_task(take()))
                await wire.run()
                assert wire.links[0].state.credits, "it waits, and nothing can come"
                tasks.pop().cancel()
                await settle()
        assert came == n
    for task in tasks:
        task.cancel()
    await settle()
    kept[0].release()
    await wire.run()
    await wire.close()


async def test_a_frame_without_credit_is_posted_again_before_anything_is_sent() -> None:
    """The peer counts on it, also while the window may still grow."""
    config = config_of(recv_depth=5, send_depth=3, window=1, total=2)
    pool = Pool(config, chunk=1)
    wire = Wire(config, config, pool.arenas_of)
    await wire.open()
    await wire.run()
    link = wire.links[1]
    for _ in range(MIN_WINDOW):
        await wire.ends[0].send(b"x")
    await wire.run()
    assert link.state.unused == 0
    link.inject(FRAME.pack(FrameKind.PING, 0, 0, 0, 0))
    assert link.sent[-1][0] == FrameKind.PONG
    assert len(link.ready) == config.control_depth
    await wire.run()
    await wire.close()
