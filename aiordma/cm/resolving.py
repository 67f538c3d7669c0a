"""Resolving: from an address to a device, a neighbor and a route.

Theory of operation
    The address and the route are two calls, each answered by an event.  With `ConnectionId.find`,
    `CMEvents.next` makes the second call when it takes the event of the first, so that the task is
    resumed once.

    The kernel looks again when a neighbor becomes known, and at the end of the time.  If the
    neighbor answers at once, as over a veth pair, the answer can come before the kernel waits for
    it, and only the look at the end finds it: so the first tries are short.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import time
from collections.abc import Callable

from aiordma.cm.address import Address, is_loopback
from aiordma.cm.enums import EventType
from aiordma.cm.step import Step
from aiordma.errors import ConnectTimeoutError, os_error
from aiordma.loop.workers import call_blocking

__all__ = ["LONGEST_ROUTE_MS", "ROUTE_RESOLVED", "check_resolve", "resolve", "route_call_can_block"]

LONGEST_ROUTE_MS = (1 << 24) - 1
ROUTE_RESOLVED = frozenset({EventType.ROUTE_RESOLVED})
_ADDR_RESOLVED = frozenset({EventType.ADDR_RESOLVED})
_FIRST_PATIENCE_S = 0.1
_IBACM = "/run/ibacm.sock"
_FRESH_S = 1.0
_ibacm = 0.0, False  # when it was looked for, and whether it was there


async def route_call_can_block() -> bool:
    """Whether `rdma_resolve_route` can block: it asks ibacm, where that runs, without a limit.

    The socket of ibacm is looked for once a second, in a thread: a file system can block.

    Cancellation: safe.
    """
    global _ibacm
    now = time.monotonic()
    if now - _ibacm[0] > _FRESH_S:
        found = await call_blocking(lambda: os.access(_IBACM, os.F_OK), undo=lambda _: None)
        _ibacm = now, found
    return _ibacm[1]


def check_resolve(code: int, dst: Address) -> None:
    """Raise if `rdma_resolve_addr` has failed with this errno; 0: it has not."""
    # Software iWARP refuses loopback here; Soft-RoCE has no route for it, ENODEV.
    if code == errno.EINVAL and is_loopback(dst):
        raise os_error(errno.ENODEV, "rdma_resolve_addr", detail=f"({dst[0]} is loopback)")
    if code:
        raise os_error(code, "rdma_resolve_addr")


async def resolve(
    step: Step,
    loop: asyncio.AbstractEventLoop,
    call: Callable[[int], None],
    timeout: float,
    route_ms: int,
    *,
    limited: bool,
) -> None:
    """Resolve an address, and a route with it; tries again until the time is up.

    `call` asks for the address, and is given its limit in milliseconds; `timeout` is for the
    address, `route_ms` for the route, 0 if only the address is wanted; `limited` as for
    `ConnectionId.find`.
    """
    answers = ROUTE_RESOLVED if route_ms else _ADDR_RESOLVED
    deadline = loop.time() + timeout
    patience = _FIRST_PATIENCE_S
    while True:
        left = max(0.001, deadline - loop.time())
        last = left <= patience
        limit_ms = max(1, int(min(left, patience) * 1000))
        # The kernel's own limit answers with an event; this limit is for an event that got lost.
        # It covers all tries: a loop that is late must not ask again for an address that is
        # resolved.
        late = None if limited else left + route_ms / 1000 + 1.0
        step.retries = not last
        try:
            await step.run(loop, functools.partial(call, limit_ms), answers, late)
            return
        except ConnectTimeoutError as exc:
            if last or exc.event == EventType.ROUTE_ERROR.name:
                raise
            patience *= 2
        finally:
            step.retries = False
