"""No more requests and bytes than the grants: those that are under way, and those that wait."""

from __future__ import annotations

import asyncio
import gc

import pytest

from aiordma import Request
from aiordma.requests.wire import INITIAL_BYTES, INITIAL_REQUESTS, ErrorCode, Kind
from tests.inside.requests import held_of

from ..conftest import settle
from .pipe import LARGE, NOTHING, joined, lone, part


async def test_no_more_than_the_grant_are_under_way() -> None:
    client, server = await joined()
    asking = [asyncio.create_task(client.request(b"x" * 10)) for _ in range(40)]
    await settle()
    assert held_of(server.exchange.served)[0] == INITIAL_REQUESTS
    requests = server.requests(limit=30)
    await settle()
    assert held_of(server.exchange.served)[0] == 30
    server.requests(limit=30, limit_bytes=310)
    most = 0
    for _ in asking:
        request = await anext(requests)
        most = max(most, held_of(server.exchange.served)[0])
        await request.reply()
        await settle()
    assert most == 30
    await asyncio.gather(*asking)
    # By bytes; a single request may have more.
    requests = server.requests(limit=30, limit_bytes=25)
    await settle()
    asking = [asyncio.create_task(client.request(bytes(size))) for size in (100, 10, 10, 10)]
    for numbers in (1, 2, 2, 1):
        await settle()
        assert held_of(server.exchange.served)[0] == numbers
        await (await anext(requests)).reply()
    await asyncio.gather(*asking)
    await part(client, server)


async def test_requests_beyond_a_lowered_grant_wait() -> None:
    """They were sent before the smaller grant was there."""
    client, server = await joined()
    client.peer = None  # its requests are on their way
    asking = [asyncio.create_task(client.request(b"x" * 10)) for _ in range(8)]
    await settle()
    requests = server.requests(limit=2)
    for data, imm in client.sent:
        server.arrive(data, imm)
    client.peer = server
    await settle()
    taken = [await anext(requests) for _ in range(2)]
    third = asyncio.create_task(anext(requests))
    for _ in range(6):
        await settle()
        assert not third.done(), "the program has more than the limit"
        await taken.pop(0).reply()
        await settle()
        assert third.done(), "there is room, and a request waits"
        taken.append(await third)
        third = asyncio.create_task(anext(requests))
    for request in taken:
        await request.reply()
    assert await asyncio.gather(*asking) == [b""] * 8
    await settle()
    assert held_of(server.exchange.served) == (0, *NOTHING)
    await part(client, server)
    with pytest.raises(StopAsyncIteration):
        await third


@pytest.mark.parametrize("limit", [{"limit": 1}, {"limit_bytes": 1}])
async def test_a_client_that_has_its_answer_may_ask_anew(limit: dict[str, int]) -> None:
    """A large answer is there before the server's own send has returned."""
    client, server = await joined()

    async def answer(request: Request) -> None:
        await request.reply(LARGE)

    requests = server.requests(**limit)
    tasks: set[asyncio.Task[None]] = set()

    async def serve_all() -> None:
        async for request in requests:
            tasks.add(asyncio.create_task(answer(request)))

    serving = asyncio.create_task(serve_all())
    await settle()
    for _ in range(20):
        assert await client.request(b"??") == LARGE
    await asyncio.gather(*(client.request(b"??") for _ in range(20)))
    await asyncio.wait(tasks)
    assert held_of(server.exchange.served) == (0, *NOTHING)
    await part(client, server)
    await serving


async def test_a_canceled_request_that_the_program_keeps_counts() -> None:
    """Else a peer that sends and cancels would have the program hold any number."""
    client, server = await joined()
    requests = server.requests(limit=3)
    await settle()
    kept = []
    for _ in range(3):
        asking = asyncio.create_task(client.request(b"?"))
        kept.append(await anext(requests))
        asking.cancel()
        await settle()
    asking = asyncio.create_task(client.request(b"?"))
    taking = asyncio.create_task(anext(requests))
    await settle()
    assert not taking.done()
    assert held_of(server.exchange.served) == (1, 1, 4, 4)
    kept.clear()
    gc.collect()
    await (await taking).reply(b"!")
    assert await asking == b"!"
    await part(client, server)


async def test_several_tasks_take_what_there_is_room_for() -> None:
    """One request of many bytes is done: there is room for several small ones."""
    client, server = await joined()
    requests = server.requests(limit_bytes=100)
    await settle()
    large = asyncio.create_task(client.request(bytes(100)))
    first = await anext(requests)
    client.exchange.calls.on_grant(16, 1000)  # a client that does not keep to it
    small = [asyncio.create_task(client.request(bytes(10))) for _ in range(4)]
    takers = [asyncio.create_task(anext(requests)) for _ in range(4)]
    await settle()
    assert not any(taker.done() for taker in takers)
    await first.reply()
    async with asyncio.timeout(10):
        for taker in takers:
            await (await taker).reply()
    await asyncio.gather(large, *small)
    await part(client, server)


async def test_bytes_beyond_all_grants_are_refused() -> None:
    end = await lone()
    requests = end.requests(limit_bytes=INITIAL_BYTES)
    half = bytes(INITIAL_BYTES // 2)
    for number in range(6):
        end.ask(number, half)
    await settle()
    # Two wait; the program has none of them yet.
    assert held_of(end.exchange.served) == (2, 2, 2, INITIAL_BYTES)
    refusals = [data for data, _ in end.sent if data[2] == Kind.ERROR]
    assert [(data[7], data[15]) for data in refusals] == [
        (number, ErrorCode.OVERLOADED) for number in range(2, 6)
    ]
    taken = [await anext(requests) for _ in range(2)]
    for number in range(6, 12):  # and two more, while the program has as many
        end.ask(number, half)
    await settle()
    assert held_of(end.exchange.served) == (4, 2, 4, 2 * INITIAL_BYTES)
    for request in taken:
        await request.reply()
    await part(end)
