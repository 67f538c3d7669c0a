"""What tests of posting share: two connected ends with a region each, and their completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiordma.verbs import SGE, SendFlags, SendWR, WCStatus, WorkCompletion
from tests.device.ends import End, Ends, connected

__all__ = [
    "DEPTH",
    "NO_FLAGS",
    "completions",
    "numbers",
    "posting_ends",
    "received",
    "sends",
    "still_works",
]

DEPTH = 8
NO_FLAGS = SendFlags(0)
SIZES: dict[str, Any] = {
    "max_send_wr": DEPTH, "max_recv_wr": DEPTH, "max_inline_data": 64,
    "max_send_sge": 3, "max_recv_sge": 3,
}  # fmt: skip


@pytest.fixture(name="ends")
async def posting_ends(address: str) -> AsyncIterator[Ends]:
    """Two connected ends with queues of DEPTH and a region each."""
    async with connected(address, **SIZES) as both:
        for end in (both.client, both.server):
            end.mr = end.region(4096)
        yield both


async def completions(end: End, count: int) -> list[WorkCompletion]:
    async with asyncio.timeout(10):
        return [await anext(end.cq) for _ in range(count)]


async def numbers(end: End, count: int) -> list[int]:
    """Of the requests that complete next, with success."""
    got = await completions(end, count)
    assert all(wc.ok for wc in got), got
    return [wc.wr_id for wc in got]


async def received(end: End, length: int) -> bytes:
    """The bytes of the one message that arrives next."""
    (completion,) = await completions(end, 1)
    assert completion.status == WCStatus.SUCCESS
    assert completion.byte_len == length
    return bytes(end.mr.view[:length])


async def still_works(ends: Ends) -> None:
    """Bytes still go through, in both directions."""
    for source, sink in ((ends.client, ends.server), (ends.server, ends.client)):
        source.mr.view[:5] = b"still"
        receiving = asyncio.create_task(sink.qp.recv(SGE(sink.mr, 0, 64)))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await source.qp.send(SGE(source.mr, 0, 5))
            assert (await receiving).byte_len == 5
        assert bytes(sink.mr.view[:5]) == b"still"


def sends(end: End, count: int, *, tail: bool = True) -> list[SendWR]:
    """Unsignaled one-byte messages, the last one signaled if `tail`."""
    chain = [SendWR(n, [SGE(end.mr, n, 1)], send_flags=NO_FLAGS) for n in range(count)]
    if tail:
        chain[-1].send_flags = SendFlags.SIGNALED
    return chain
