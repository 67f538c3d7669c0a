"""Two programs that send and do not receive wait for each other: the log says so, and to whom."""

from __future__ import annotations

import asyncio
import logging
import re
import time

import pytest

from aiordma import Connection
from tests.device.meeting import Pair

pytestmark = [pytest.mark.device, pytest.mark.virtual_time]

LINE = (
    r"#\d+ send\(\) to .+ has waited (\d+) s for room, and (\d+) messages? ha\w+ arrived here that "
    r"nobody receives: if the peer waits in send\(\), too, both wait forever; receive in a task "
    r"of its own"
)


async def one_by_one(connection: Connection) -> None:
    """A thousand messages, and then as many of the peer's."""
    for number in range(1000):
        await connection.send(b"%d" % number)
    for _ in range(1000):
        (await connection.recv()).release()


async def large(connection: Connection) -> None:
    """More bytes than are fetched before the program receives."""
    for _ in range(20):
        await connection.send(bytes(1 << 20))
    for _ in range(20):
        (await connection.recv()).release()


async def ring(connection: Connection) -> None:
    """As the steps of an all-reduce, in the wrong order, with blocks that are not fetched ahead."""
    block, place = bytes(16 << 20), bytearray(16 << 20)
    for _ in range(2):
        await connection.send(block)
        await connection.recv_into(place)


@pytest.mark.parametrize("program", [one_by_one, large, ring])
async def test_both_sides_are_told_after_five_seconds(
    pair: Pair, program: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(program)
    began = time.monotonic()
    tasks = [asyncio.create_task(program(end)) for end in pair]

    def told() -> list[re.Match[str]]:
        return [found for line in caplog.messages if (found := re.fullmatch(LINE, line))]

    async with asyncio.timeout(60):
        while len(told()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(1)
    assert 5 <= time.monotonic() - began < 15
    assert {int(found[1]) for found in told()} == {5}
    assert all(int(found[2]) >= 1 for found in told())
    await asyncio.sleep(20)
    assert len(told()) == 2, "once a connection"
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]
