"""Connections that share the slots of a pool, and completion queues."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import aiordma
from aiordma.endpoint.config import MIN_WINDOW
from aiordma.verbs import AsyncEventType
from aiordma.verbs.async_event import AsyncEvent
from tests.device.meeting import Pair
from tests.device.oracle import until
from tests.inside.endpoint import budget_of, link_of, receiver_of, state_of
from tests.inside.link import queue_of
from tests.inside.verbs import promised, tell, token_of

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

CONFIG = aiordma.ConnectionConfig(
    slot_size=4096, recv_depth=32, send_depth=16, rendezvous_window=2, one_sided_depth=4,
    receive_buffer_size=1 << 20, shared_slots=200,
)  # fmt: skip


@asynccontextmanager
async def pairs(
    address: str, count: int, config: aiordma.ConnectionConfig = CONFIG
) -> AsyncIterator[list[Pair]]:
    """Connected ends, (client, server), all of one pool."""
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(aiordma.listen(address, 0, config=config))
        made: list[Pair] = []
        for _ in range(count):
            connecting = aiordma.connect(address, listener.port, config=config)
            client = await stack.enter_async_context(connecting)
            made.append((client, await stack.enter_async_context(await listener.accept())))
        yield made


def window_of(connection: aiordma.Connection) -> int:
    return receiver_of(connection).window.size


async def transfer(sender: aiordma.Connection, receiver: aiordma.Connection, count: int) -> None:
    """As fast as it goes."""

    async def take() -> None:
        for n in range(count):
            with await receiver.recv() as message:
                assert bytes(message) == n.to_bytes(4, "big") * 50

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(take())
        for n in range(count):
            await sender.send(n.to_bytes(4, "big") * 50)


@pytest.mark.smoke
async def test_what_is_shared_and_what_is_not(address: str) -> None:
    async with pairs(address, 3) as made:
        ends = [end for pair in made for end in pair]
        links = [link_of(end) for end in ends]
        assert len({id(queue_of(link)) for link in links}) == 1
        assert len({id(queue_of(link).channel) for link in links}) == 1
        assert len({id(budget_of(end)) for end in ends}) == 1
        # Memory and protection domain are each connection's own.
        assert len({id(link.pd) for link in links}) == len(links)
        assert len({region.lkey for link in links for region in link.slots.regions}) >= len(links)
        budget, cq = budget_of(ends[0]), queue_of(links[0])
        assert budget.used == len(ends) * CONFIG.guaranteed
        assert promised(cq) == len(ends) * (CONFIG.sends + CONFIG.receives)
        assert cq.cqe >= promised(cq)
        assert all(window_of(end) == MIN_WINDOW for end in ends)
        await transfer(*made[0], count=20)
    # A close waits 5 s for its queue pair, which may take longer.
    await until(lambda: (budget.used, budget.members, budget.free) == (0, 0, 200), 60)
    await until(lambda: promised(cq) == 0, 60)
    await cq.wait_closed(10)


async def test_a_greedy_connection_starves_nobody(address: str) -> None:
    async with pairs(address, 4) as made:
        greedy, lazy = made[0]
        flood = asyncio.create_task(send_for_ever(greedy))
        async with asyncio.timeout(20):
            # Nobody takes its messages: its window is full, and stays so.
            await until(lambda: state_of(greedy).credits == 0)
            done, _ = await asyncio.wait([flood], timeout=0.5)
            assert not done
            assert state_of(greedy).credits == 0
            others = [transfer(one, other, 50) for one, other in made[1:]]
            back = [transfer(other, one, 50) for one, other in made[1:]]
            await asyncio.gather(*others, *back)
        assert not flood.done()
        flood.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flood
        lazy.abort()


async def send_for_ever(connection: aiordma.Connection) -> None:
    while True:
        await connection.send(bytes(4000))


async def test_a_pool_that_is_used_up_refuses(address: str) -> None:
    few = aiordma.ConnectionConfig(
        slot_size=4096, rendezvous_window=2, shared_slots=3 * CONFIG.guaranteed - 1
    )
    own = aiordma.ConnectionConfig(slot_size=4096)
    async with aiordma.listen(address, 0, config=few) as listener:
        async with aiordma.connect(address, listener.port, config=few) as first:
            budget = budget_of(first)
            assert budget.members == 2
            async with await listener.accept():
                with pytest.raises(OSError, match="raise shared_slots") as caught:
                    await aiordma.connect(address, listener.port, config=few)
                assert caught.value.errno == errno.ENOBUFS
                # One that has slots of its own finds the listener's pool used up.
                with pytest.raises(aiordma.ConnectionRejectedError, match="out of resources"):
                    await aiordma.connect(address, listener.port, config=own)
        # What was given back is there again.
        await until(lambda: not budget.members, 60)
        async with aiordma.connect(address, listener.port, config=own), await listener.accept():
            pass


async def test_one_that_breaks_gives_everything_back(address: str) -> None:
    async with pairs(address, 3) as made:
        (one, other), (two, second), _ = made
        budget = budget_of(one)
        await transfer(one, other, 100)
        waiting = asyncio.create_task(other.recv())
        one.abort()
        with pytest.raises(aiordma.ConnectionLostError):
            await waiting
        async with asyncio.timeout(20):
            await one.wait_closed()
            await other.wait_closed()
        await until(lambda: budget.members == 4, 60)
        assert budget.used == 4 * CONFIG.guaranteed
        await transfer(two, second, 100)


async def test_a_completion_queue_that_fails_ends_all_its_connections(address: str) -> None:
    # It cannot be overrun, so that the device's event is made up here.
    async with pairs(address, 2) as made:
        ends = [end for pair in made for end in pair]
        cq = queue_of(ends[0])
        waiting = [asyncio.create_task(end.recv()) for end in ends]
        await asyncio.sleep(0)
        event = AsyncEvent(AsyncEventType.CQ_ERR, 0, 0, cq.context)
        tell(token_of(cq), event)
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        causes = []
        for outcome in outcomes:
            assert isinstance(outcome, aiordma.ConnectionLostError)
            causes.append(outcome.__cause__)
        assert any(isinstance(cause, aiordma.RdmaOSError) for cause in causes)
        # The next connection of the pool gets another.
        listening = aiordma.listen(address, 0, config=CONFIG)
        async with (
            listening as listener,
            aiordma.connect(address, listener.port, config=CONFIG) as one,
            await listener.accept() as other,
        ):
            assert queue_of(one) is not cq
            await transfer(one, other, 10)


async def test_who_is_closed_by_a_finalizer_leaves_the_pool(address: str) -> None:
    """A finalizer may run in any thread, one without a loop too."""
    async with pairs(address, 2) as made:
        (one, other), _ = made
        budget = budget_of(one)
        await asyncio.to_thread(link_of(one).close)
        one.abort()
        other.abort()
        async with asyncio.timeout(20):
            await one.wait_closed()
            await other.wait_closed()
        await until(lambda: budget.members == 2)
        assert budget.used == 2 * CONFIG.guaranteed
