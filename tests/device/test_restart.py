"""Servers that are restarted one after the other, while clients of a pool ask them."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Literal

import pytest

import aiordma
from tests.device.oracle import until
from tests.device.test_requests import LIMIT_S

pytestmark = pytest.mark.device

CALLERS, RESTARTS = 20, 6


@pytest.mark.smoke
@pytest.mark.parametrize(("number", "policy"), [(1, "failover"), (2, "failover"), (2, "spread")])
async def test_a_restart_in_good_order_loses_no_request(
    address: str, number: int, policy: Literal["failover", "spread"]
) -> None:
    """Each is served once, although none may be served twice."""
    served: Counter[int] = Counter()
    asked = 0
    stop = False

    async def serve(request: aiordma.Request) -> bytes:
        served[int.from_bytes(request.body, "big")] += 1
        await asyncio.sleep(0)
        return bytes(request.body)

    async def more() -> None:
        before = len(served)
        await until(lambda: len(served) > before + 100, LIMIT_S)

    async def caller(pool: aiordma.Pool) -> None:
        nonlocal asked
        while not stop:
            asked += 1
            question = asked.to_bytes(4, "big")
            with await pool.request(question, timeout=LIMIT_S) as answer:
                assert bytes(answer) == question

    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(aiordma.serve_requests(serve, address, 0, grace_s=5))
            for _ in range(number)
        ]
        ports = [server.port for server in running]
        addresses = [(address, port) for port in ports]
        pool = await stack.enter_async_context(
            aiordma.Pool(addresses, policy=policy, min_size=4, max_size=4, max_pause=0.2)
        )
        await pool.wait(LIMIT_S)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(caller(pool))
            for turn in range(RESTARTS):
                at = turn % number
                await more()
                await running[at].stop()
                running[at] = await stack.enter_async_context(
                    aiordma.serve_requests(serve, address, ports[at], grace_s=5)
                )
            await more()
            stop = True
        assert set(served.values()) == {1}
        assert len(served) == asked == pool.stats.requests


@pytest.mark.parametrize("begun", [False, True])
async def test_what_a_program_has_not_answered_is_in_doubt(address: str, *, begun: bool) -> None:
    """A program that takes requests by itself, and closes while there are some."""
    asked = asyncio.Event()

    async def serve(connection: aiordma.Connection) -> None:
        requests = connection.requests(limit=1)
        first = await anext(requests)
        if not begun:
            await first.reply()
        asked.set()
        await until(lambda: connection.stats.messages_received >= 2 - begun, LIMIT_S)
        await connection.close()

    async with (
        aiordma.serve(serve, address, 0) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        first = asyncio.create_task(client.request(b"?"))
        await asked.wait()
        second = asyncio.create_task(client.request(b"?"))
        if begun:
            with pytest.raises(aiordma.ConnectionLostError) as lost:
                await first
            assert lost.value.request_sent
            await asyncio.wait([second])
            assert second.exception() is not None
        else:
            await first
            with pytest.raises(aiordma.RequestRefusedError, match="closed") as refused:
                await second
            assert refused.value.try_again
