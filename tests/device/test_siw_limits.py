"""How many queues a process can have on software iWARP."""

from __future__ import annotations

import contextlib

import pytest

import aiordma
from aiordma.verbs import CompletionQueue

pytestmark = [pytest.mark.device, pytest.mark.siw]

# rdma-core's header for the driver calls this page of a process's queues an invalid one.
FORBIDDEN_PAGE = 144
# Entries of 32 bytes, rounded up to a power of two, and a word of control: 257 pages.
LEAP = 32_768


async def test_the_page_that_cannot_be_had(is_siw: bool) -> None:
    """Queues of one page each end there; the error names the limit."""
    assert is_siw
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(aiordma.devices()[0].open())
        for _ in range(FORBIDDEN_PAGE):
            stack.enter_context(CompletionQueue(context, 1))
        for _ in range(2):
            with pytest.raises(OSError, match="software iWARP"):
                CompletionQueue(context, 1)


async def test_a_large_queue_leaps_over_it() -> None:
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(aiordma.devices()[0].open())
        for size in (LEAP, *[1] * 2 * FORBIDDEN_PAGE):
            stack.enter_context(CompletionQueue(context, size))
