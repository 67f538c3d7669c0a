"""`CompletionQueue.poll_count`: completions as a number, with nothing lost."""

from __future__ import annotations

import contextlib

import pytest

import aiordma
from aiordma.verbs import SGE, RecvWR, SendFlags, SendWR
from tests.device.ends import End, Ends
from tests.device.oracle import until
from tests.device.posting import DEPTH, posting_ends

pytestmark = pytest.mark.device
__all__ = ["posting_ends"]  # the fixture `ends`


async def counted(end: End, wanted: int, at_most: int = 256) -> int:
    """Count until there were `wanted`; how many polls found some."""
    seen = polls = 0

    def enough() -> bool:
        nonlocal seen, polls
        count = end.cq.poll_count(at_most)
        assert count <= at_most
        seen += count
        polls += bool(count)
        return seen >= wanted

    await until(enough)
    assert seen == wanted
    return polls


async def test_lists_and_chains_are_counted(ends: Ends) -> None:
    client, server = ends.client, ends.server
    piece = [SGE(client.mr, 0, 8)]
    silent, loud = SendFlags(0), SendFlags.SIGNALED
    with (
        server.qp.prepare_recv([RecvWR(n, [SGE(server.mr, 0, 8)]) for n in range(4)]) as chain,
        client.qp.prepare_send(
            [SendWR(n, piece, send_flags=loud if n == 3 else silent) for n in range(4)]
        ) as send,
    ):
        for _ in range(20):
            chain.execute()
            send.execute()
            # Of the list, one completion; of the receives, each.
            await counted(client, 1)
            await counted(server, 4)
        assert client.qp.outstanding == server.qp.outstanding == 0
    assert client.cq.poll_count() == server.cq.poll_count() == 0


async def test_requests_of_all_kinds_are_counted(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, 0, 8)]) for n in range(4)])
    with client.qp.prepare_send(SendWR(7, [SGE(client.mr, 0, 8)])) as send:
        send.execute()
        client.qp.post_send(SendWR(8, [SGE(client.mr, 0, 8)]))
        send.execute()
        client.qp.post_send(SendWR(9, [SGE(client.mr, 0, 8)]))
        assert await counted(client, 4, at_most=1) == 4
        await counted(server, 4)
        assert client.qp.outstanding == 0


async def test_a_managed_queue_can_be_counted(ends: Ends) -> None:
    client, server = ends.client, ends.server
    server.qp.post_recv([RecvWR(n, [SGE(server.mr, 0, 8)]) for n in range(2)])
    await client.qp.send(SGE(client.mr, 0, 8))  # whoever awaits has it drained by the loop
    client.qp.post_send(SendWR(8, [SGE(client.mr, 0, 8)]))
    assert client.cq.managed
    await counted(client, 1)


async def test_what_failed_is_left_for_poll(ends: Ends) -> None:
    client, server = ends.client, ends.server
    with server.qp.prepare_recv([RecvWR(n, [SGE(server.mr, 0, 8)]) for n in range(3)]) as chain:
        chain.execute()
        client.qp.post_send(SendWR(1, [SGE(client.mr, 0, 8)]))
        await counted(client, 1)
        await counted(server, 1)
        server.qp.to_error()
        found: list[int] = []

        def all_flushed() -> bool:
            # It fails again and again, until it is taken.
            for _ in range(2):
                with contextlib.suppress(aiordma.FlushedError):
                    assert server.cq.poll_count() == 0
                    return False
            found.extend(wc.wr_id for wc in server.cq.poll(DEPTH))
            return len(found) == 2

        await until(all_flushed)
    assert found == [1, 2]
    assert server.cq.poll_count() == 0


async def test_a_number_below_one(ends: Ends) -> None:
    with pytest.raises(ValueError, match="cannot poll for 0"):
        ends.client.cq.poll_count(0)
