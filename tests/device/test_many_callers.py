"""A thousand tasks that send over one connection: most of them wait for a slot and a credit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig
from tests.device.meeting import Pair, are_alive, paired
from tests.device.oracle import until
from tests.inside.endpoint import state_of

pytestmark = pytest.mark.device

CALLERS = 1000
OVER = (aiordma.ConnectionLostError, aiordma.ResourceClosedError)


@pytest.fixture(params=["default", "small", "pool"])
async def ends(address: str, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """With slots of its own; with more credits than slots, which run out; with slots of a pool."""
    configs = {
        "default": ConnectionConfig(),
        "small": ConnectionConfig(slot_size=512, send_depth=3, recv_depth=48),
        "pool": ConnectionConfig(slot_size=512, shared_slots=600),
    }
    async with asyncio.timeout(100), paired(address, configs[request.param]) as pair:
        yield pair


def number(data: object) -> int:
    return int.from_bytes(bytes(data), "big")  # type: ignore[call-overload]


def sending(conn: Connection) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(conn.send(n.to_bytes(4, "big"))) for n in range(CALLERS)]


async def collect(conn: Connection) -> list[int]:
    """What arrives until the end, which may be a loss."""
    got: list[int] = []
    with contextlib.suppress(aiordma.ConnectionLostError, aiordma.ConnectionEndedError):
        while True:
            got.append(number(await conn.recv()))
    return got


async def test_each_call_gets_its_answer_and_requests_arrive_in_order(ends: Pair) -> None:
    client, server = ends
    arrived: list[int] = []
    waiting: dict[int, asyncio.Future[int]] = {}

    async def answer() -> None:
        async for message in server:
            arrived.append(number(message))
            await server.send(message)

    async def read() -> None:
        async for message in client:
            waiting.pop(number(message)).set_result(number(message))

    async def call(request: int) -> int:
        waiting[request] = asyncio.get_running_loop().create_future()
        answered = waiting[request]
        await client.send(request.to_bytes(4, "big"))
        return await answered

    others = [asyncio.create_task(answer()), asyncio.create_task(read())]
    for first in (0, CALLERS):
        numbers = range(first, first + CALLERS)
        answers = await asyncio.gather(*map(call, numbers))
        assert answers == list(numbers)
    assert arrived == list(range(2 * CALLERS)), "a send has overtaken another"
    assert not waiting
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    await are_alive(ends)


@pytest.mark.parametrize("how", ["close", "abort", "the peer closes", "the peer aborts"])
async def test_an_end_with_a_thousand_that_wait(ends: Pair, how: str) -> None:
    client, server = ends
    tasks = sending(client)
    await until(lambda: state_of(client).queued > CALLERS // 2)
    got: list[int] = []
    if how == "close":
        collecting = asyncio.create_task(collect(server))
        await client.close()
        got = await collecting
    elif how == "abort":
        client.abort()
        got = await collect(server)
    elif how == "the peer closes":
        await server.close()
    else:
        server.abort()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    sent = [n for n, result in enumerate(results) if result is None]
    failed = [result for result in results if result is not None]
    assert sent == list(range(len(sent))), "the first come are the first served"
    assert failed, "none has waited"
    assert all(isinstance(result, OVER) for result in failed), set(map(type, failed))
    assert len(set(map(id, failed))) == len(failed)
    assert got == sent[: len(got)], "part of what was sent, in order"
    if how == "close":
        assert got == sent
    assert state_of(client).queued == 0
