"""Finding the way: from an address to a device, a neighbor and a route.

Theory of operation
    The address and the route are two calls, each answered by an event.  With `find` an id goes on
    from the one to the other by itself: `aio_cm_next` makes the second call when it takes the
    event of the first, so that the task is woken once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time

from aiordma._core import CMEvents
from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma.arguments import check_seconds
from aiordma.cm.address import Address, is_loopback, to_sockaddr
from aiordma.cm.enums import EventType
from aiordma.cm.identifier import Identifier, Stage
from aiordma.errors import ConnectTimeoutError, os_error
from aiordma.loop.workers import call_blocking

__all__ = ["Resolving"]

_FIRST_PATIENCE_S = 0.1
_LONGEST_ROUTE_MS = (1 << 24) - 1
_ADDR_RESOLVED = frozenset({EventType.ADDR_RESOLVED})
_ROUTE_RESOLVED = frozenset({EventType.ROUTE_RESOLVED})
_IBACM = "/run/ibacm.sock"
_FRESH_S = 1.0
_ibacm = 0.0, False  # when it was looked for, and whether it was there


async def _route_call_can_block() -> bool:
    """Where ibacm runs, the call asks it, over a socket and without a limit of its own.

    Looked for once a second, in a thread: it is a call to a file system.

    Cancellation: safe.
    """
    global _ibacm
    now = time.monotonic()
    if now - _ibacm[0] > _FRESH_S:
        found = await call_blocking(lambda: os.access(_IBACM, os.F_OK), undo=lambda _: None)
        _ibacm = now, found
    return _ibacm[1]


class Resolving(Identifier):
    """How a connection id finds its peer.  Part of `ConnectionId`."""

    __slots__ = ()

    async def resolve_addr(
        self, dst: Address, src: Address | None = None, timeout: float = 2.0
    ) -> None:
        """Find the device and the neighbor for a numeric address (`rdma_resolve_addr(3)`).

        Args:
            dst: (address, port) of the peer.
            src: Local (address, port) to use, or None.
            timeout: Seconds.

        Raises:
            ValueError: An address is not numeric, or the limit is negative.
            AddressError: No route, no neighbor.
            ConnectTimeoutError: No answer in time.
            DeviceNotFoundError: The way there has no RDMA device.

        Cancellation: ends the wait; close the id then.
        """
        await self._find(dst, src, timeout, 0)
        self.stage = Stage.ADDRESS_RESOLVED

    async def find(
        self,
        dst: Address,
        src: Address | None = None,
        timeout: float = 2.0,
        *,
        limited: bool = False,
    ) -> None:
        """`resolve_addr` and `resolve_route`, which has as long again, in one step.

        Readers of the channel are not told of the first, unless ibacm runs: then the second can
        block, and goes to a thread.

        Args:
            dst: As `resolve_addr`.
            src: Likewise.
            timeout: Likewise, for each.
            limited: The caller has a limit for this and more, which will do if an event gets lost.

        Raises, cancellation: as those.
        """
        if await _route_call_can_block():
            await self.resolve_addr(dst, src, timeout)
            await self.resolve_route(timeout)
        else:
            limit = min(max(1, int(timeout * 1000)), _LONGEST_ROUTE_MS)
            await self._find(dst, src, timeout, limit, limited=limited)
            self.stage = Stage.ROUTE_RESOLVED

    async def _find(
        self,
        dst: Address,
        src: Address | None,
        timeout: float,
        route: int,
        *,
        limited: bool = False,
    ) -> None:
        """Resolve the address and, with milliseconds for it, the route.

        The kernel looks again when a neighbor becomes known, and at the end of the time.  Where
        the neighbor answers at once, as over a veth pair, the answer can come before the kernel
        waits for it, and the look at the end is the only one: so the first tries are short.
        """
        check_seconds("timeout", timeout, zero=True, none=False)
        self._need("rdma_resolve_addr", Stage.IDLE, Stage.BOUND)
        c_dst = to_sockaddr(dst)
        c_src = to_sockaddr(src) if src is not None else ffi.NULL
        answer = _ROUTE_RESOLVED if route else _ADDR_RESOLVED
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        patience = _FIRST_PATIENCE_S

        def call() -> None:
            limit = max(1, int(min(left, patience) * 1000))
            handle, source, destination = (
                int(ffi.cast("uintptr_t", pointer)) for pointer in (self._require(), c_src, c_dst)
            )
            code = CMEvents.resolve(handle, source, destination, limit, self._token, route)
            # Software iWARP refuses loopback here; Soft-RoCE has no route for it, ENODEV.
            if code == errno.EINVAL and is_loopback(dst):
                raise os_error(errno.ENODEV, "rdma_resolve_addr", detail=f"({dst[0]} is loopback)")
            if code:
                raise os_error(code, "rdma_resolve_addr")

        while True:
            left = max(0.001, deadline - loop.time())
            last = left <= patience
            # The kernel's own limit answers with an event; ours is for an event that got lost.  It
            # is that of all tries: a loop that is late must not ask again for what is resolved.
            late = None if limited else left + route / 1000 + 1.0
            self._trying = not last
            try:
                await self._step(call, answer, late)
                return
            except ConnectTimeoutError as exc:
                if last or exc.event == EventType.ROUTE_ERROR.name:
                    raise
                patience *= 2
            except asyncio.CancelledError:
                self.stage = Stage.FAILED  # the kernel goes on, and takes no other address
                raise
            finally:
                self._trying = False

    async def resolve_route(self, timeout: float = 2.0) -> None:
        """Find the path to the resolved address (`rdma_resolve_route(3)`).

        Args:
            timeout: Seconds.

        Raises:
            ValueError: The limit is negative.
            OSError: EINVAL before `resolve_addr`.
            RouteError: There is no path.

        Cancellation: ends the wait; close the id then.
        """
        check_seconds("timeout", timeout, zero=True, none=False)
        self._need("rdma_resolve_route", Stage.ADDRESS_RESOLVED)
        milliseconds = max(1, int(timeout * 1000))
        handle = self._require()

        def call() -> None:
            check_minus_one(lib.rdma_resolve_route(handle, milliseconds), "rdma_resolve_route")

        in_thread = await _route_call_can_block()
        try:
            await self._step(call, _ROUTE_RESOLVED, timeout + 1.0, in_thread=in_thread)
        except asyncio.CancelledError:
            self.stage = Stage.FAILED  # as after `resolve_addr`
            raise
        self.stage = Stage.ROUTE_RESOLVED
