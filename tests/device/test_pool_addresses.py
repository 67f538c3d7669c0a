"""Pool with several addresses: servers that are killed and come again, functions, and rails."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

import aiordma
from tests.device.oracle import until
from tests.device.request_server import answer_to, question
from tests.device.test_requests import LIMIT_S, echo, start

CALLERS, CALLS = 20, 40


async def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    await asyncio.to_thread(process.communicate)


@asynccontextmanager
async def servers(address: str) -> AsyncIterator[dict[int, subprocess.Popen[str]]]:
    """Two programs that serve, by their ports."""
    running: dict[int, subprocess.Popen[str]] = {}
    try:
        for _ in range(2):
            process, port = await asyncio.to_thread(start, address)
            running[port] = process
        yield running
    finally:
        for process in running.values():
            await end(process)


async def storm(pool: aiordma.Pool, seed: int) -> int:
    """Idempotent requests of many tasks: each has its right answer."""

    async def caller(number: int) -> None:
        rng = random.Random(seed + number)
        for _ in range(CALLS):
            chosen, size = rng.getrandbits(32), rng.randint(1, 3000)
            asked = question(chosen, size, 0.0, rng.randint(1, 3000))
            with await pool.request(asked, timeout=LIMIT_S, idempotent=True) as answer:
                assert answer == answer_to(chosen, size)

    async with asyncio.TaskGroup() as group:
        for number in range(CALLERS):
            group.create_task(caller(number))
    return CALLERS * CALLS


@pytest.mark.parametrize("policy", ["failover", "spread"])
async def test_one_of_two_servers_is_killed_and_comes_again(
    address: str, policy: Literal["failover", "spread"]
) -> None:
    asyncio.get_running_loop().set_debug(False)
    async with servers(address) as running:
        first, second = running
        async with aiordma.Pool(
            [(address, first), (address, second)], policy=policy, min_size=4, max_size=4,
            max_pause=0.5,
        ) as pool:  # fmt: skip
            await pool.wait(LIMIT_S)
            sizes = [each.size for each in pool.stats.addresses]
            assert sizes == ([4, 0] if policy == "failover" else [2, 2])
            storming = asyncio.create_task(storm(pool, random.getrandbits(32)))
            await until(lambda: pool.stats.requests > CALLERS * CALLS / 3, LIMIT_S)
            await end(running[first])
            assert await storming == CALLERS * CALLS  # nobody has noticed
            await until(lambda: [each.size for each in pool.stats.addresses] == [0, 4], LIMIT_S)
            assert not pool.stats.addresses[0].works
            storming = asyncio.create_task(storm(pool, random.getrandbits(32)))
            running[first], _ = await asyncio.to_thread(start, address, first)
            assert await storming == CALLERS * CALLS
            await until(lambda: [each.size for each in pool.stats.addresses] == sizes, LIMIT_S)
            assert pool.stats.addresses[0].works
            print(pool.stats)
            lost = pool.stats.lost
            assert await storm(pool, random.getrandbits(32)) == CALLERS * CALLS
            assert pool.stats.lost == lost
        for process in running.values():
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
            assert (process.returncode, out, err) == (0, "", "")


async def test_no_address_works(address: str) -> None:
    async with aiordma.serve_requests(echo, address, 0) as server:
        dead = server.port
    async with aiordma.Pool([(address, dead), (address, 9)], timeout=0.5, max_pause=0.1) as pool:
        await until(lambda: all(each.errors for each in pool.stats.addresses), LIMIT_S)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError, match=f"{address} port {dead}: .*{address} port 9: "):
            await pool.request(b"?", timeout=1.0, idempotent=True)
        assert asyncio.get_running_loop().time() - begun < LIMIT_S / 2
        assert [each.works for each in pool.stats.addresses] == [False, False]


async def test_a_function_follows_the_server(address: str) -> None:
    ports: list[Any] = []

    async def find() -> tuple[str, Any]:
        return address, ports[-1]

    async with (
        aiordma.serve_requests(echo, address, 0) as one,
        aiordma.serve_requests(echo, address, 0) as other,
        aiordma.Pool(find, max_pause=0.1, timeout=LIMIT_S) as pool,
    ):
        ports.append("garbage")
        asking = asyncio.create_task(pool.request(b"1"))
        await until(lambda: pool.stats.errors >= 2, LIMIT_S)
        ports[:] = [one.port]
        assert await asking == b"1"
        ports[:] = [other.port]
        await one.stop()
        assert await pool.request(b"2", idempotent=True) == b"2"
        assert {each.port: each.size for each in pool.stats.addresses} == {
            one.port: 0,
            other.port: 1,
        }


async def test_rails(address: str) -> None:
    async with (
        aiordma.serve_requests(echo, address, 0) as server,
        aiordma.Pool(address, server.port, local_addrs=[address], timeout=LIMIT_S) as pool,
    ):
        assert await pool.request(b"?") == b"?"
        (stats,) = pool.stats.addresses
        assert (stats.local, stats.size, stats.requests) == (address, 1, 1)
        async with pool.connection() as connection:
            assert connection.get_extra_info("sockname")[0] == address


async def test_close_during_a_failover(address: str) -> None:
    async with (
        aiordma.serve_requests(echo, address, 0) as one,
        aiordma.serve_requests(echo, address, 0) as other,
    ):
        for number in range(10):
            pool = aiordma.Pool(
                [(address, one.port), (address, other.port)], min_size=2, max_pause=0.01
            )
            async with pool:
                await pool.wait(LIMIT_S)
                for connection in tuple(one.connections):
                    connection.abort()
                asking = asyncio.create_task(pool.request(b"?", idempotent=True))
                for _ in range(number):
                    await asyncio.sleep(0)
            await asyncio.wait([asking])
            if (error := asking.exception()) is not None:
                assert isinstance(error, aiordma.ResourceClosedError | ConnectionError)
