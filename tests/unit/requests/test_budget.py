"""The budget of the requests of a listener, by itself and under an exchange."""

from __future__ import annotations

import asyncio

import pytest

from aiordma import RequestRefusedError
from aiordma.memory.governor import REQUESTS, Budget, Lease

from .pipe import joined, part

MIB = 1 << 20


def lease_of(budget: Budget, source: str) -> Lease:
    """That of a connection that holds nothing yet."""
    lease = budget.lease(REQUESTS, 0, source)
    assert lease is not None
    return lease


def test_a_source_leaves_room_for_another() -> None:
    budget = Budget(8 * MIB)
    one, also_one, two = (lease_of(budget, source) for source in ("one", "one", "two"))
    assert one.resize(5 * MIB)
    assert also_one.resize(MIB)
    assert not one.resize(5 * MIB + 1)
    assert two.resize(MIB)
    assert not two.resize(2 * MIB)
    for lease in (one, also_one, two):
        assert lease.resize(0)
    assert budget.held() == 0


def test_the_only_request_may_have_any_size() -> None:
    budget = Budget(MIB)
    assert lease_of(budget, "one").resize(64 * MIB)
    assert not lease_of(budget, "two").resize(1)


async def test_a_request_beyond_the_budget_is_refused() -> None:
    budget = Budget(MIB)
    client, server = await joined(lease_of(budget, "client"))
    requests = server.requests()
    first = asyncio.create_task(client.request(bytes(500_000)))
    request = await anext(requests)
    with pytest.raises(RequestRefusedError, match="take all the memory"):
        await client.request(bytes(500_000))
    small = asyncio.create_task(client.request(b"small"))
    await (await anext(requests)).reply(b"yes")
    assert await small == b"yes"
    await request.reply(b"done")
    assert await first == b"done"
    assert budget.held() == 0
    await part(client, server)
