"""Calls beyond the grant of a server wait in line: a client that keeps to it is never refused."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

import aiordma

pytestmark = pytest.mark.device

LIMIT_S = 120.0
#: Calls of a case; a run by hand has more: AIORDMA_CALLS=100000.
CALLS = int(os.environ.get("AIORDMA_CALLS", "400"))
SIZES = (1, 100, 5_856, 5_857, 20_000, 70_000, 300_000, 400_000, 1_100_000, 4_000_000)


async def call_all(client: aiordma.Connection, sizes: list[int], tasks: int) -> None:
    """Ask for so many answers of these sizes by some tasks, each as soon as it has an answer."""
    left = list(sizes)

    async def caller() -> None:
        while left:
            size = left.pop()
            with await client.request(size.to_bytes(4, "big"), timeout=LIMIT_S) as answer:
                assert len(answer) == size

    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(caller())


async def answer(request: aiordma.Request) -> Any:
    return bytes(int.from_bytes(request.body[:4], "big"))


@pytest.mark.one_loop
@pytest.mark.parametrize("size", [20_000, 400_000])
@pytest.mark.parametrize("limit", [1, 16])
async def test_answers_larger_than_a_slot(address: str, limit: int, size: int) -> None:
    """The client knows the whole answer before the server knows that the client has it."""
    asyncio.get_running_loop().set_debug(False)
    async with (
        aiordma.serve_requests(answer, address, 0, limit=limit) as server,
        aiordma.connect(address, server.port) as client,
    ):
        await call_all(client, [size] * CALLS, 2 * limit)


async def test_at_random(address: str) -> None:
    """Sizes of requests and answers, limits by number and by bytes, tasks, and calls that end."""
    asyncio.get_running_loop().set_debug(False)
    seed = int(os.environ.get("AIORDMA_SEED", random.getrandbits(32)))
    print("seed", seed)
    rng = random.Random(seed)
    left = CALLS
    while left > 0:
        count = min(left, rng.randint(50, 400))
        left -= count
        await one_grant(address, rng, count)


async def one_grant(address: str, rng: random.Random, count: int) -> None:
    """A server with a grant, and calls of one client."""
    limit, limit_bytes = rng.choice([1, 2, 3, 8, 16, 17, 64, 256]), rng.choice([1, 10_000, 1 << 26])
    tasks, most = rng.choice([1, 4, 40, 300]), rng.choice(SIZES)
    ends = rng.random() < 0.3  # some callers leave before their answers
    print(f"{limit=} {limit_bytes=} {tasks=} {most=} {count=} {ends=}")
    budget = 1 << 28  # bytes of a case: it ends in bounded time

    async def caller() -> None:
        nonlocal count, budget
        while count > 0 and budget > 0:
            count -= 1
            size = rng.choice([size for size in SIZES if size <= most])
            body = size.to_bytes(4, "big") + bytes(rng.choice([0, 0, rng.randrange(most)]))
            budget -= size + len(body)
            calling = asyncio.ensure_future(client.request(body, timeout=LIMIT_S))
            if ends and rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.uniform(0, 0.01), calling.cancel)
            await asyncio.wait([calling])
            if not calling.cancelled():
                with calling.result() as whole:
                    assert len(whole) == size
            del calling

    async with (
        aiordma.serve_requests(answer, address, 0, limit=limit, limit_bytes=limit_bytes) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(tasks):
            group.create_task(caller())
