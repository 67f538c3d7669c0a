"""Multicast: the groups that a datagram id is a member of.

Theory of operation
    Joining is a step of the id: a call, and an event that brings the way to the group.  What
    librdmacm would do with a queue pair of its own, attaching it to the group, is done here.  A
    send-only member is not attached: it needs the way and nothing else.

    Leaving can block, so a thread does it.  The next join waits for it: only then can no event of
    the old membership be taken for one of the new.  A join that is canceled or fails is left again;
    an id that is closed leaves all.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma.cm.address import Address, to_sockaddr
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType, JoinFlags, JoinMask, PortSpace
from aiordma.cm.identifier import Identifier, Stage
from aiordma.errors import ConnectTimeoutError, ResourceBusyError, cm_error, os_error
from aiordma.loop.job import Job
from aiordma.loop.limit import Limit
from aiordma.loop.workers import reaper
from aiordma.verbs.ah import AHAttributes

if TYPE_CHECKING:
    from aiordma.cm.event_channel import EventChannel

__all__ = ["Multicast", "group_host"]

_log = logging.getLogger("aiordma")
_ENOTSUPP = 524  # the kernel's own, which no header of the C library has


def group_host(group: str | Address) -> str:
    """The address of a multicast group, in its one spelling.

    Raises:
        ValueError: Not a numeric multicast address.
    """
    host = group if isinstance(group, str) else group[0]
    ip = ipaddress.ip_address(host)
    if not ip.is_multicast:
        msg = f"{host} is not a multicast address"
        raise ValueError(msg)
    return str(ip)


@dataclass(slots=True)
class _Membership:
    """One group: its address for C, and what came of joining it."""

    sockaddr: Any
    send_only: bool
    way: AHAttributes | None = None
    attached: bool = False


class Multicast(Identifier):
    """The multicast side of a connection id.  Part of `ConnectionId`."""

    __slots__ = ("_joined", "_leaves")

    _joined: dict[str, _Membership]
    _leaves: list[Job[None]]

    def _setup(
        self, channel: EventChannel, handle: Any, port_space: PortSpace, stage: Stage
    ) -> None:
        self._joined = {}
        self._leaves = []
        super()._setup(channel, handle, port_space, stage)

    @property
    def is_datagram(self) -> bool:
        """Whether its port space is one of datagrams."""
        space = self.port_space
        return space is not PortSpace.TCP and space in (PortSpace.UDP, PortSpace.IPOIB)

    def _need_datagrams(self, verb: str) -> None:
        self._require()
        if not self.is_datagram:
            raise os_error(errno.EINVAL, verb, detail="(not an id for datagrams: PortSpace.UDP)")
        if self.context is not None and self.context.is_iwarp:
            raise os_error(errno.EOPNOTSUPP, verb, detail="(iWARP has no datagrams)")

    @property
    def groups(self) -> tuple[str, ...]:
        """Addresses of the multicast groups that it is a member of."""
        return tuple(host for host, member in self._joined.items() if member.way is not None)

    async def join_multicast(
        self, group: str | Address, *, send_only: bool = False, timeout: float = 5.0
    ) -> ConnectionEvent:
        """Join a multicast group (`rdma_join_multicast_ex(3)`); the MULTICAST_JOIN event.

        Its `ah_attr`, `qp_num` (0xFFFFFF) and `qkey` are what a datagram to the group needs.  The
        id's queue pair, unless `send_only`, receives what is sent to the group from then on; what
        it sends itself comes back to it, too.

        Args:
            group: Numeric address, alone or with a port, which does not matter.
            send_only: Be a member that only sends; the id then needs no queue pair.
            timeout: Seconds.

        Raises:
            ValueError: Not a multicast address.
            OSError: EINVAL if the id is not bound to a device by `bind_addr` or `resolve_addr`,
                or has gone on to a connection, or has no queue pair; EADDRINUSE if it is a
                member; NotSupportedError on iWARP, and on RoCE v2 for IPv6 groups.
            MulticastError: The network said no.
            ConnectTimeoutError: It did not answer.

        Cancellation: the group is left again.
        """
        host = group_host(group)
        self._need_datagrams("rdma_join_multicast")
        self._need("rdma_join_multicast", Stage.BOUND, Stage.ADDRESS_RESOLVED)
        if self.context is None:
            self._refuse_join(errno.EINVAL, "the id is bound to no device")
        if self.qp is None and not send_only:
            self._refuse_join(errno.EINVAL, "no queue pair")
        if host in self._joined:
            self._refuse_join(errno.EADDRINUSE, f"it is a member of {host}")
        member = self._joined[host] = _Membership(to_sockaddr((host, 0)), send_only)
        entered = False

        def call() -> None:
            nonlocal entered
            self._join(member)
            entered = True

        try:
            await self._until_left(timeout)
            answers = frozenset({EventType.MULTICAST_JOIN, EventType.MULTICAST_ERROR})
            event = await self._step(call, answers, timeout)
            if event.type == EventType.MULTICAST_ERROR:
                raise cm_error(event.type.name, event.status)
            if not send_only:
                self._attach(member, event)
            member.way = event.ah_attr
        except BaseException:
            self._joined.pop(host, None)
            if entered and not self.closed:
                self._leave(member)
            raise
        return event

    def _refuse_join(self, code: int, reason: str) -> None:
        raise os_error(code, "rdma_join_multicast", detail=f"({reason})")

    def _join(self, member: _Membership) -> None:
        attr = ffi.new("struct rdma_cm_join_mc_attr_ex *")
        attr.comp_mask = JoinMask.ADDRESS | JoinMask.JOIN_FLAGS
        attr.addr = ffi.cast("struct sockaddr *", member.sockaddr)
        attr.join_flags = (
            JoinFlags.SENDONLY_FULLMEMBER if member.send_only else JoinFlags.FULLMEMBER
        )
        if lib.rdma_join_multicast_ex(self._require(), attr, ffi.NULL):
            code = ffi.errno
            if code == _ENOTSUPP:
                self._refuse_join(errno.EOPNOTSUPP, "on RoCE v2 only IPv4 groups can be joined")
            raise os_error(code or errno.EIO, "rdma_join_multicast")

    def _attach(self, member: _Membership, event: ConnectionEvent) -> None:
        assert event.ah_attr is not None
        if self.qp is None or self.qp.closed:
            self._refuse_join(errno.EINVAL, "the queue pair was closed")
        assert self.qp is not None
        self.qp.attach_mcast(event.ah_attr.dgid, event.ah_attr.dlid)
        member.attached = True

    async def _until_left(self, timeout: float) -> None:
        """Wait until groups that are being left are left."""
        self._leaves = [done for done in self._leaves if not done.done]
        if not self._leaves:
            return
        left, late = await asyncio.wait([done.future() for done in self._leaves], timeout=timeout)
        for done in left:
            done.exception()  # whoever left has seen it, or has gone
        if late:
            msg = f"an earlier group was not left within {timeout} s"
            raise ConnectTimeoutError(errno.ETIMEDOUT, msg)

    async def leave_multicast(self, group: str | Address, *, timeout: float = 5.0) -> None:
        """Leave a multicast group (`rdma_leave_multicast(3)`).

        The queue pair receives nothing that is sent to the group from the call on.

        Args:
            group: As in `join_multicast`.
            timeout: Seconds; leaving goes on after them.

        Raises:
            ValueError: Not a multicast address.
            OSError: EADDRNOTAVAIL if it is no member.
            ResourceBusyError: Joining is still under way.
            TimeoutError: It takes longer.

        Cancellation: ends the wait; the group is left all the same.
        """
        host = group_host(group)
        self._need_datagrams("rdma_leave_multicast")
        member = self._joined.get(host)
        if member is None:
            detail = f"(not a member of {host})"
            raise os_error(errno.EADDRNOTAVAIL, "rdma_leave_multicast", detail=detail)
        if member.way is None:
            msg = f"joining {host} is under way"
            raise ResourceBusyError(errno.EBUSY, msg)
        del self._joined[host]
        self._detach(member)
        with Limit(timeout, f"leaving the group {host}", "it goes on in its thread"):
            await self._leave(member).future()

    def _detach(self, member: _Membership) -> None:
        if not member.attached or self.qp is None or self.qp.closed:
            return
        assert member.way is not None
        try:
            self.qp.detach_mcast(member.way.dgid, member.way.dlid)
        except OSError as exc:
            _log.debug("queue pair %d: %s", self.qp.num, exc)

    def _leave(self, member: _Membership) -> Job[None]:
        """Leave in a thread; the C id outlives the call."""
        self._retain()
        handle = self._handle

        def run() -> None:
            try:
                self._leave_now(handle, member)
            finally:
                self._let_go()

        done = reaper.submit(run)
        self._leaves.append(done)
        return done

    @staticmethod
    def _leave_now(handle: Any, member: _Membership) -> None:
        sockaddr = ffi.cast("struct sockaddr *", member.sockaddr)
        check_minus_one(lib.rdma_leave_multicast(handle, sockaddr), "rdma_leave_multicast")

    def _on_close(self) -> None:
        for member in self._joined.values():
            self._detach(member)
        super()._on_close()

    def _destroy(self, handle: Any) -> None:
        # The kernel would do it; librdmacm would lose its own record of the membership.
        for member in self._joined.values():
            try:
                self._leave_now(handle, member)
            except OSError as exc:
                _log.debug("leaving a group: %s", exc)
        super()._destroy(handle)
