"""The budget of the requests of a listener, by itself and under an exchange."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiordma import RequestOverloadedError
from aiordma.memory.byte_budget import fair_share
from aiordma.requests.budget import FREE_BYTES, RequestBudget, Share

from .pipe import joined, part

MIB = 1 << 20


def test_a_source_leaves_room_for_another() -> None:
    budget = RequestBudget(8 * MIB)
    assert budget.take("one", 6 * MIB)
    assert not budget.take("one", 1)
    assert budget.take("two", MIB)
    assert not budget.take("two", MIB)
    budget.give("one", 6 * MIB)
    budget.give("two", MIB)
    assert budget.used == 0


def test_the_only_request_may_have_any_size() -> None:
    budget = RequestBudget(MIB)
    assert budget.take("one", 64 * MIB)
    assert not budget.take("two", 1)


@pytest.mark.parametrize("seed", range(20))
def test_what_shares_hold_is_what_the_budget_counts(seed: int) -> None:
    chance = random.Random(seed)
    budget = RequestBudget(4 * MIB)
    sources = ["one", "one", "two", "three"]
    shares = [Share(budget, source) for source in sources]
    held = [0] * len(shares)
    for _ in range(2000):
        n = chance.randrange(len(shares))
        share = shares[n]
        if chance.random() < 0.5:
            want = held[n] + chance.randrange(1, 300_000)
            if want <= share.size:
                held[n] = want
            else:
                unused = budget.used == 0
                if share.widen(want):
                    held[n] = want
                    own = sum(s.size - FREE_BYTES for s, of in zip(shares, sources, strict=True)
                              if of == sources[n])  # fmt: skip
                    assert unused or own <= fair_share(4 * MIB, budget.used, own)
        else:
            held[n] = chance.randrange(held[n] + 1)
            share.narrow(held[n])
        assert all(h <= s.size for h, s in zip(held, shares, strict=True))
        assert budget.used == sum(share.size - FREE_BYTES for share in shares)
    for share in shares:
        share.narrow(0)
    assert budget.used == 0


async def test_a_request_beyond_the_budget_is_refused() -> None:
    budget = RequestBudget(MIB)
    client, server = await joined(share=Share(budget, "client"))
    requests = server.requests()
    first = asyncio.create_task(client.request(bytes(500_000)))
    request = await anext(requests)
    with pytest.raises(RequestOverloadedError, match="take all the memory"):
        await client.request(bytes(500_000))
    small = asyncio.create_task(client.request(b"small"))
    await (await anext(requests)).reply(b"yes")
    assert await small == b"yes"
    await request.reply(b"done")
    assert await first == b"done"
    assert budget.used == 0
    await part(client, server)
