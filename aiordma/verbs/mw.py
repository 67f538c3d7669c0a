"""MemoryWindow: a part of a region that is opened to a peer, and closed again, at little cost.

Theory of operation
    A window is bound by a request of the send queue: it then has a key of its own for a part of a
    region, with rights of its own.  Binding it again, invalidating or closing it ends that key;
    the region stays registered.

    From the moment a bind is posted, the window holds the region that it opens, and a window of
    type 2 also its queue pair: C would refuse to destroy them, or wait.  They are released when a
    completion has shown that the window is closed, or the window is gone.  A bind that failed, or
    whose completion was never seen, proves nothing: then only `close()` releases them.

    Closing the region or the queue pair shuts the peer out, and so it closes the window.

    A change runs in a task of its own: canceling the wait for it does not stop it, and its result
    has to be noted all the same.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aiordma._ffi import lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.errors import NotSupportedError, busy_error
from aiordma.loop import background
from aiordma.loop.lasting import result_of
from aiordma.verbs.enums import Access, DeviceCapFlags, MWType
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WorkCompletion

if TYPE_CHECKING:
    from aiordma.verbs.qp import QueuePair

__all__ = ["MemoryWindow"]

_WRITES = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_RIGHTS = Access.REMOTE_READ | _WRITES
_CAPABILITY = {
    MWType.TYPE_1: DeviceCapFlags.MEM_WINDOW,
    MWType.TYPE_2: DeviceCapFlags.MEM_WINDOW_TYPE_2A | DeviceCapFlags.MEM_WINDOW_TYPE_2B,
}


class MemoryWindow(Resource):
    """A memory window (`ibv_alloc_mw(3)`).

    Args:
        pd: Protection domain of the window, of the region that it opens, and of the queue pairs.
        type: TYPE_1: the device chooses the key; the window can be bound again at any time; any
            queue pair of the domain serves the peer.  TYPE_2: the caller chooses the last byte of
            the key; the window has to be invalidated before it is bound again; only the queue pair
            on which it was bound serves the peer, and the peer can invalidate it.

    Raises:
        NotSupportedError: The device has no windows of this type; software iWARP has none at all.
        OSError: Resources ran out.

    Soft-RoCE of Linux 6.12 needs care.  It does not enforce the bounds of a window, only its rights
    and its end: if the bounds matter, register exactly these bytes.  And with windows of type 2 a
    peer can crash its kernel: use type 1 there.

    Attributes:
        pd: The protection domain.
        type: The window's type.
        addr: Address of the first byte for the peer while bound, else 0.
        length: Bytes while bound, else 0.
        access: The peer's rights while bound, else none.
        bound: Whether the peer has access, as far as completions have shown.
    """

    _use = "unfinished work request"
    __slots__ = (
        "_held", "_qp", "_task", "access", "addr", "bound", "length", "pd", "type",
    )  # fmt: skip

    addr: int
    length: int

    def __init__(self, pd: ProtectionDomain, type: MWType = MWType.TYPE_1) -> None:
        type = MWType(type)
        flags = pd.context.attributes.device_cap_flags
        if not flags & _CAPABILITY.get(type, 0):
            text = f"ibv_alloc_mw: the device {pd.context.name} has no memory windows of {type!r}"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        self.pd: ProtectionDomain = pd
        self.type: MWType = type
        self._held: list[Resource] = []
        self._qp: QueuePair | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed_to_peers()
        handle = check_pointer(lib.ibv_alloc_mw(pd._require(), int(type)), "ibv_alloc_mw")
        super().__init__(handle, (pd,))

    def _is_closed_to_peers(self) -> None:
        self.bound: bool = False
        self.addr = self.length = 0
        self.access: Access = Access(0)

    @property
    def rkey(self) -> int:
        """The key for the peer; each bind changes it.

        A program that posts BIND_MW requests raw sets it to the key of a bind of type 2 when that
        has completed.  `bind()` does so by itself.

        Raises:
            ResourceClosedError: The window is closed.
        """
        return int(self._require().rkey)

    @rkey.setter
    def rkey(self, value: int) -> None:
        self._require().rkey = value

    async def bind(
        self,
        qp: QueuePair,
        mr: MemoryRegion,
        offset: int = 0,
        length: int | None = None,
        access: Access = Access.REMOTE_READ,
        *,
        key: int | None = None,
    ) -> None:
        """Open a part of a region to the peer (`ibv_bind_mw(3)`, or a BIND_MW request).

        Args:
            qp: Carries out the bind, in order with its other sends.
            mr: The region; it was registered with MW_BIND, and with LOCAL_WRITE if the peer may
                write.  Closing it closes the window.
            offset: First byte, from the region's start.
            length: Bytes, at least 1; None for all from `offset` on.
            access: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC or several; for type 2 also
                ZERO_BASED: the peer counts addresses from 0.
            key: Type 2: last byte of the new key, 0 to 255; None for the next.

        Returns when the peer has access.  An earlier bind of a window of type 1 has then ended.

        Raises:
            ValueError: The part is empty or not inside the region, or the rights, the protection
                domains or the key do not suit the window.
            RdmaOSError: A change is under way, or the window is of type 2 and bound (EBUSY).
            ResourceClosedError: The window, the region or the queue pair is closed.
            CompletionError: The device refused it, or the queue pair failed; the window can only
                be closed then.

        Cancellation: ends the wait; the bind takes place.
        """
        qp._require_places()
        await self._bind(qp, mr, offset, length, access, key)

    async def _bind(
        self,
        qp: QueuePair,
        mr: MemoryRegion,
        offset: int,
        length: int | None,
        access: Access,
        key: int | None = None,
    ) -> None:
        """As `bind`, for a queue pair whose places the caller counts."""
        end = mr.length if length is None else offset + length
        self._check(qp, mr, offset, end, access, key)
        rkey = self.rkey
        if self.type == MWType.TYPE_2:
            tag = rkey + 1 if key is None else key
            rkey = (rkey & ~0xFF) | (tag & 0xFF)

        def opened() -> None:
            if self.type == MWType.TYPE_2:
                self.rkey = rkey  # for type 1 ibv_bind_mw sets the rkey
            self.bound = True
            self.addr = 0 if access & Access.ZERO_BASED else mr.addr + offset
            self.length = end - offset
            self.access = Access(access & _RIGHTS)

        await self._change(qp, qp._bind_mw(self, mr, offset, end - offset, access, rkey), opened)

    async def invalidate(self, qp: QueuePair | None = None) -> None:
        """End the peer's access; the window can then be bound again.

        A window of type 2 is invalidated by a LOCAL_INV request on the queue pair of the bind, a
        window of type 1 by a bind to no bytes.  Returns when no access is possible any more; a
        later access ends the peer's connection, with `RemoteAccessError` there.

        Args:
            qp: Carries it out; None for the queue pair of the bind.

        Raises:
            ValueError: The window is not bound, or is of type 2 and bound on another queue pair.
            RdmaOSError: A change is under way (EBUSY).
            ResourceClosedError: The window or the queue pair is closed.
            CompletionError: The queue pair failed; close the window instead.

        Cancellation: ends the wait; the invalidation takes place.
        """
        self._require()
        self._refuse_while_changing()
        if not self.bound or self._qp is None:
            msg = "the window is not bound"
            raise ValueError(msg)
        if qp is None:
            qp = self._qp
        elif self.type == MWType.TYPE_2 and qp is not self._qp:
            msg = "a window of type 2 is invalidated on the queue pair on which it was bound"
            raise ValueError(msg)
        change: Coroutine[Any, Any, WorkCompletion]
        if self.type == MWType.TYPE_2:
            change = qp.local_invalidate(self.rkey)
        else:
            region = next(held for held in self._held if isinstance(held, MemoryRegion))
            change = qp._bind_mw(self, region, 0, 0, Access(0), self.rkey)
        await self._change(qp, change, self._is_closed_to_peers)

    def remotely_invalidated(self, completion: WorkCompletion) -> None:
        """Note that the peer has invalidated the window by its message (SEND_WITH_INV).

        Args:
            completion: The completion of the message's receive.

        Raises:
            ValueError: It names another key, or none: the peer's claim is false.
        """
        if not self.bound or completion.invalidated_rkey != self.rkey:
            msg = f"the message did not invalidate this window: {completion.invalidated_rkey}"
            raise ValueError(msg)
        self._is_closed_to_peers()
        self._let_all_go()

    def _check(
        self,
        qp: QueuePair,
        mr: MemoryRegion,
        offset: int,
        end: int,
        access: Access,
        key: int | None,
    ) -> None:
        """Refuse a bind that the device would answer with the end of the connection."""
        for resource in (self, mr, qp):
            resource._require()
        self._refuse_while_changing()
        if self.type == MWType.TYPE_2 and self.bound:
            msg = "the window is bound: invalidate it first"
            raise busy_error(msg)
        if not 0 <= offset < end <= mr.length:
            msg = f"bytes {offset} to {end} are not inside a region of {mr.length} bytes"
            raise ValueError(msg)
        if mr.pd is not self.pd or qp.pd is not self.pd:
            msg = "window, region and queue pair need the same protection domain"
            raise ValueError(msg)
        if not mr.access & Access.MW_BIND:
            msg = "the region was registered without MW_BIND"
            raise ValueError(msg)
        if access & _WRITES and not mr.access & Access.LOCAL_WRITE:
            msg = "the region was registered without LOCAL_WRITE"
            raise ValueError(msg)
        allowed = _RIGHTS if self.type == MWType.TYPE_1 else _RIGHTS | Access.ZERO_BASED
        if not access & _RIGHTS or access & ~allowed:
            msg = f"not the rights of a window of {self.type.name}: {access!r}"
            raise ValueError(msg)
        if key is not None and (self.type == MWType.TYPE_1 or not 0 <= key <= 255):
            msg = f"key is the last byte of the key of a window of type 2, not {key}"
            raise ValueError(msg)

    def _refuse_while_changing(self) -> None:
        if self._task is not None:
            msg = "a change of the window is under way"
            raise busy_error(msg)

    def _binding(self, qp: Resource, mr: MemoryRegion) -> None:
        """Hold the resources that C must not destroy while the window is open; before the bind."""
        held: list[Resource] = [mr, qp] if self.type == MWType.TYPE_2 else [mr]
        self._hold(held)
        self._held += held

    async def _change(
        self,
        qp: QueuePair,
        request: Coroutine[Any, Any, WorkCompletion],
        succeeded: Callable[[], None],
    ) -> None:
        before = len(self._held)

        async def change() -> None:
            try:
                await request
                succeeded()
                self._qp = qp if self.bound else None
                # Memory that an earlier bind held, and that of an invalidation.
                self._let_all_go(keep=self._held[before:] if self.bound else [])
            finally:
                self._task = None

        self._task = task = background.start(asyncio.get_running_loop(), change)
        if task is None:  # the loop is ending, and takes no task any more
            await change()
            return
        await result_of(task)

    def _let_all_go(self, keep: list[Resource] | None = None) -> None:
        released, self._held = self._held, keep or []
        if not self.closed:
            self._release(resource for resource in released if resource not in self._held)

    def _parent_closing(self, parent: Resource) -> None:
        if parent is not self.pd:
            self.close()

    def _destroy(self, handle: Any) -> None:
        self._held = []
        self._qp = None
        check_errno(lib.ibv_dealloc_mw(handle), "ibv_dealloc_mw")

    def __repr__(self) -> str:
        what = f"{self.length} bytes" if self.bound else "not bound"
        return f"<MemoryWindow {self._state.value} {self.type.name} {what} {self.access!r}>"
