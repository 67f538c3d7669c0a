"""Multicast: the groups that a datagram id is a member of.

Theory of operation
    Joining is a step of the id: a call, and an event that brings the way to the group.  librdmacm
    would attach a queue pair of its own to the group; for aiordma's queue pairs this file does it.
    A send-only member is not attached: it needs the way and nothing else.

    Leaving can block, so a thread does it.  The next join waits for it: otherwise an event of the
    old membership could be taken for an event of the new.  If a join is canceled or fails, the
    group is left again.  An id that is closed leaves all groups.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma.cm.address import Address, to_sockaddr
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.errors import ConnectTimeoutError, busy_error, cm_error, os_error
from aiordma.logs import log_of
from aiordma.loop.lasting import result_of
from aiordma.loop.limit import Limit
from aiordma.loop.workers import reaper
from aiordma.verbs.ah import AHAttributes
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.resource import Resource

__all__ = ["Memberships", "group_host", "refuse_join"]

_log = log_of()
_ENOTSUPP = 524  # of the kernel; no header of the C library has it
_ANSWERS = frozenset({EventType.MULTICAST_JOIN, EventType.MULTICAST_ERROR})


def group_host(group: str | Address) -> str:
    """The address of a multicast group in its normal form.

    Raises:
        ValueError: Not a numeric multicast address.
    """
    host = group if isinstance(group, str) else group[0]
    ip = ipaddress.ip_address(host)
    if not ip.is_multicast:
        msg = f"{host} is not a multicast address"
        raise ValueError(msg)
    return str(ip)


def refuse_join(code: int, reason: str) -> NoReturn:
    """Raise for a join that the id cannot make."""
    raise os_error(code, "rdma_join_multicast", detail=f"({reason})")


@dataclass(slots=True)
class _Membership:
    """One group: its address for C, the way to it, and the queue pair that is attached to it."""

    sockaddr: Any
    way: AHAttributes | None = None
    qp: QueuePair | None = None


class Memberships:
    """The groups of one connection id, by address."""

    __slots__ = ("_joined", "_leaves")

    def __init__(self) -> None:
        self._joined: dict[str, _Membership] = {}
        self._leaves: list[Future[None]] = []

    @property
    def hosts(self) -> tuple[str, ...]:
        """Addresses of the groups of which the id is a member."""
        return tuple(host for host, member in self._joined.items() if member.way is not None)

    async def join(
        self,
        cm_id: Resource,
        run: Callable[[Callable[[], None], frozenset[EventType]], Awaitable[ConnectionEvent]],
        host: str,
        qp: QueuePair | None,
        timeout: float,
    ) -> ConnectionEvent:
        """`ConnectionId.join_multicast`; without `qp`, of a member that only sends.

        `run` makes a call, and awaits its answer, as a step of the id; `timeout` limits the wait
        for groups that are being left.
        """
        if host in self._joined:
            refuse_join(errno.EADDRINUSE, f"it is a member of {host}")
        member = self._joined[host] = _Membership(to_sockaddr((host, 0)))
        entered = False

        def call() -> None:
            nonlocal entered
            _join(cm_id, member, send_only=qp is None)
            entered = True

        try:
            await self._until_left(timeout)
            event = await run(call, _ANSWERS)
            if event.type == EventType.MULTICAST_ERROR:
                raise cm_error(event.type.name, event.status)
            if qp is not None:
                assert event.ah_attr is not None
                if qp.closed:
                    refuse_join(errno.EINVAL, "the queue pair was closed")
                qp.attach_mcast(event.ah_attr.dgid, event.ah_attr.dlid)
                member.qp = qp
            member.way = event.ah_attr
        except BaseException:
            self._joined.pop(host, None)
            if entered and not cm_id.closed:
                self._leave(cm_id, member)
            raise
        return event

    async def _until_left(self, timeout: float) -> None:
        """Wait until groups that are being left are left."""
        self._leaves = [done for done in self._leaves if not done.done()]
        if not self._leaves:
            return
        leaves = [asyncio.wrap_future(done) for done in self._leaves]
        for each in leaves:
            each.add_done_callback(lambda done: done.cancelled() or done.exception())
        _, late = await asyncio.wait(leaves, timeout=timeout)
        if late:
            msg = f"an earlier group was not left within {timeout} s"
            raise ConnectTimeoutError(errno.ETIMEDOUT, msg)

    async def leave(self, cm_id: Resource, host: str, timeout: float) -> None:
        """`ConnectionId.leave_multicast`."""
        member = self._joined.get(host)
        if member is None:
            detail = f"(not a member of {host})"
            raise os_error(errno.EADDRNOTAVAIL, "rdma_leave_multicast", detail=detail)
        if member.way is None:
            msg = f"joining {host} is under way"
            raise busy_error(msg)
        del self._joined[host]
        _detach(member)
        with Limit(timeout, f"leaving the group {host}", "it goes on in its thread"):
            await result_of(asyncio.wrap_future(self._leave(cm_id, member)))

    def _leave(self, cm_id: Resource, member: _Membership) -> Future[None]:
        """Leave in a thread; the C id outlives the call."""
        handle = cm_id._require()
        cm_id._retain()

        def run() -> None:
            try:
                _leave_now(handle, member)
            finally:
                cm_id._let_go()

        done = reaper.submit(run)
        self._leaves.append(done)
        return done

    def detach(self) -> None:
        """Have the queue pair receive nothing more from any group: the id is closed."""
        for member in self._joined.values():
            _detach(member)

    def leave_all(self, handle: Any) -> None:
        """Leave all groups, before the id is destroyed; in any thread.

        The kernel would do it by itself, but librdmacm would leak its record of the membership.
        """
        for member in self._joined.values():
            try:
                _leave_now(handle, member)
            except OSError as exc:
                _log.debug("leaving a group: %s", exc)


def _join(cm_id: Resource, member: _Membership, *, send_only: bool) -> None:
    attr = ffi.new("struct rdma_cm_join_mc_attr_ex *")
    attr.comp_mask = lib.RDMA_CM_JOIN_MC_ATTR_ADDRESS | lib.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
    attr.addr = ffi.cast("struct sockaddr *", member.sockaddr)
    full, sends = lib.RDMA_MC_JOIN_FLAG_FULLMEMBER, lib.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER
    attr.join_flags = sends if send_only else full  # a number, not a bit set
    if lib.rdma_join_multicast_ex(cm_id._require(), attr, ffi.NULL):
        code = ffi.errno
        if code == _ENOTSUPP:
            refuse_join(errno.EOPNOTSUPP, "on RoCE v2 only IPv4 groups can be joined")
        raise os_error(code or errno.EIO, "rdma_join_multicast")


def _leave_now(handle: Any, member: _Membership) -> None:
    sockaddr = ffi.cast("struct sockaddr *", member.sockaddr)
    check_minus_one(lib.rdma_leave_multicast(handle, sockaddr), "rdma_leave_multicast")


def _detach(member: _Membership) -> None:
    qp, member.qp = member.qp, None
    if qp is None or qp.closed:
        return
    assert member.way is not None
    try:
        qp.detach_mcast(member.way.dgid, member.way.dlid)
    except OSError as exc:
        _log.debug("queue pair %d: %s", qp.num, exc)
