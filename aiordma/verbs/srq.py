"""SharedReceiveQueue: receives that serve many queue pairs.

Theory of operation
    A receive that is posted here is taken by whichever queue pair's message comes next, and
    completes in the CQ of that queue pair.  So nothing completes in the order of the posts, and the
    in-order bookkeeping of a queue pair's own queue cannot be used: every receive has an entry of
    its own, which its completion finds by number.

    A receive counts as posted until its completion is seen: the count is a little more than the
    receives that the adapter still has, never less.  The count limits the posts to the queue's
    depth, is promised to every CQ in which the receives could complete, and is one of the two signs
    of the low-water mark.  The other is the adapter's own event, which also counts messages that
    have begun and not completed.  Either suffices, so neither a lost event nor a late completion
    makes the wait hang.

    A queue pair that fails in the middle of a message may keep the receive that it had taken
    (Soft-RoCE of Linux 6.12 does).  The receive stays posted here, with its memory, until the
    shared queue itself is destroyed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.arguments import fitting, whole
from aiordma.errors import (
    NotSupportedError,
    ResourceClosedError,
    busy_error,
    device_error,
    os_error,
    queue_error,
)
from aiordma.loop import fork
from aiordma.loop.credits import Credits
from aiordma.loop.slots import SUB_SHIFT, TAG_SHIFT, SlotTable
from aiordma.loop.steps import Steps
from aiordma.loop.uncopied import Uncopied
from aiordma.verbs import async_event
from aiordma.verbs.async_event import AsyncEvent
from aiordma.verbs.comp_channel import SHARED_TAG, shared_queues
from aiordma.verbs.context import Context, check_limit, copy_of
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import AsyncEventType, SRQAttrMask
from aiordma.verbs.mr import MemoryRegion, check_index, place_of
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WCRecord, WorkCompletion, record_error
from aiordma.verbs.wr import Buffers, RecvWR, build_recv, check_count, sge_list

if TYPE_CHECKING:
    from aiordma.verbs.qp import QueuePair

__all__ = ["PreparedReceives", "SRQAttributes", "SharedReceiveQueue"]

# Queue pairs leave where they are destroyed, in other threads.
_lock = fork.new_lock()
_ID_MASK = (1 << TAG_SHIFT) - 1
_numbers = itertools.count()
_MAX_QUEUES = 1 << 16


@dataclass(frozen=True, slots=True)
class SRQAttributes:
    """Attributes of a shared receive queue (`ibv_query_srq(3)`, same names)."""

    max_wr: int
    max_sge: int
    srq_limit: int


def _create(
    pd: ProtectionDomain, max_wr: int, max_sge: int, token: int
) -> tuple[Any, SRQAttributes]:
    """Make a queue, whose events carry `token`; return it and the limits that the device granted.

    Raises:
        ValueError: A size is not positive.
        NotSupportedError: The device has no shared receive queues.
        OSError: Above the device's limits (EINVAL), or out of resources.
    """
    device = pd.context.attributes
    for name, value, most in (
        ("max_wr", max_wr, device.max_srq_wr),
        ("max_sge", max_sge, device.max_srq_sge),
    ):
        if whole(name, value) <= 0:
            msg = f"{name} has to be positive, not {value}"
            raise ValueError(msg)
        if not device.max_srq:
            text = f"ibv_create_srq: the device {pd.context.name} has no shared receive queues"
            raise NotSupportedError(errno.EOPNOTSUPP, text)
        check_limit("ibv_create_srq", name, value, most)
    init = ffi.new("struct ibv_srq_init_attr *")
    init.srq_context = ffi.cast("void *", token)
    init.attr.max_wr = max_wr
    init.attr.max_sge = max_sge
    ffi.errno = 0  # not every driver gives a reason
    handle = check_pointer(lib.ibv_create_srq(pd._require(), init), "ibv_create_srq")
    return handle, SRQAttributes(init.attr.max_wr, init.attr.max_sge, 0)


class _Receive:
    """One posted receive."""

    __slots__ = ("caller_id", "future", "regions")

    def __init__(self, regions: tuple[MemoryRegion, ...], caller_id: int | None) -> None:
        self.regions = regions
        self.caller_id = caller_id
        self.future: asyncio.Future[WorkCompletion] | None = None

    def tell(self, record: WCRecord) -> None:
        """Set the future to the completion, or the error."""
        if self.future is None or self.future.done():
            return
        if record[1] == 0:
            self.future.set_result(WorkCompletion.from_record(record))
        else:
            self.future.set_exception(record_error("recv", record))

    def release_regions(self) -> None:
        """Release the memory."""
        regions, self.regions = self.regions, ()
        for region in regions:
            region._let_go()


class PreparedReceives(Uncopied):
    """Receives of a shared queue that are posted again and again.

    Made by `SharedReceiveQueue.prepare_recv`.  Each `execute()` posts the list once more; each
    receive is taken by whichever queue pair's message comes next, and completes there with the
    number that it had when it was posted.  A `with` block frees it at the end.
    """

    __slots__ = ("_caller_ids", "_first", "_keep", "_regions", "_srq")

    def __init__(
        self, srq: SharedReceiveQueue, chain: Sequence[RecvWR], first: Any, keep: list[Any]
    ) -> None:
        self._srq: SharedReceiveQueue | None = srq
        self._first, self._keep = first, keep
        self._caller_ids = [request.wr_id for request in chain]
        self._regions = [tuple(piece.mr for piece in request.sg_list) for request in chain]

    def __len__(self) -> int:
        """Number of receives in the list."""
        return len(self._caller_ids)

    def _open(self) -> SharedReceiveQueue:
        if self._srq is None:
            msg = "the prepared receives were freed"
            raise ResourceClosedError(msg)
        self._srq._require()
        return self._srq

    def execute(self) -> Self:
        """Post the list once more (`ibv_post_srq_recv(3)`); returns itself.

        Raises:
            RdmaOSError: The queue has not enough free places; nothing was posted (EAGAIN).
            ResourceClosedError: It was freed, or the queue or a region is closed.
            RdmaOSError: The device has reported the queue as failed.
            OSError: The post failed; the receives in front of the failed receive are posted.
        """
        srq = self._open()
        for used in self._regions:
            for region in used:
                region._require()
        srq._take(len(self))
        srq._ring(self._first, self._regions, self._caller_ids)
        return self

    def patch(
        self,
        request: int = 0,
        *,
        wr_id: int | None = None,
        piece: int = 0,
        region: MemoryRegion | None = None,
        offset: int | None = None,
        length: int | None = None,
    ) -> Self:
        """Change a receive in place, for the executions from now on; returns itself.

        Args:
            request: The receive, counted from 0.
            wr_id: The number of its completion.
            piece: The piece that `region`, `offset` and `length` are for, counted from 0.
            region: The region that the piece is in.
            offset: First byte of the piece, from the start of the region.
            length: Bytes of the piece.

        Raises:
            TypeError, ValueError, IndexError: As `PreparedPost.patch`; nothing was changed.
            ResourceClosedError: It was freed, or a region is closed.
        """
        srq = self._open()
        check_index("request", request, len(self))
        number = self._caller_ids[request] if wr_id is None else fitting("wr_id", wr_id, 64)
        if region is not None or offset is not None or length is not None:
            regions = list(self._regions[request])
            check_index("piece", piece, len(regions))
            sge = self._first[request].sg_list[piece]
            used, addr, size = place_of(sge, regions[piece], region, offset, length, srq.pd)
            sge.addr, sge.length, sge.lkey = addr, size, used.lkey
            regions[piece] = used
            self._regions[request] = tuple(regions)
        self._caller_ids[request] = number
        return self

    def free(self) -> None:
        """Free the prepared receives.  Idempotent; receives under way go on."""
        self._srq, self._first, self._keep, self._regions = None, None, [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"<PreparedReceives requests={len(self)}{' freed' * (self._srq is None)}>"


def _free_number() -> int:
    """A number that no living shared queue has; ids have 16 bits for it."""
    for number in itertools.islice(_numbers, _MAX_QUEUES):
        if number % _MAX_QUEUES not in shared_queues:
            return number % _MAX_QUEUES
    raise os_error(errno.ENOMEM, "ibv_create_srq", detail="(65,536 shared receive queues)")


class SharedReceiveQueue(Resource):
    """A shared receive queue (`ibv_create_srq(3)`).

    Queue pairs are made with it (`QPInitAttr.srq`) and then have no receives of their own.  All of
    them, and the memory of the receives, belong to the same protection domain.

    Args:
        pd: Protection domain.
        max_wr: Receives that may be posted at a time, at least 1.
        max_sge: Pieces per receive.

    Raises:
        ValueError: A size is not positive.
        NotSupportedError: The device has no shared receive queues.
        OSError: Above the device's limits (EINVAL), or out of resources.

    Ownership: the memory of a receive stays registered until its completion has been seen, or the
    queue is destroyed, which happens after its last queue pair.

    Attributes:
        limits: The limits that the device has granted, at least as large as requested.
        room: Places for posts: of the depth that was requested, even if the device granted more.
    """

    __slots__ = (
        "_armed", "_awaited", "_cqs", "_loop", "_marks", "_number", "_table", "_takers", "_token",
        "_unwatch", "limits", "max_wr", "pd", "room",
    )  # fmt: skip

    limits: SRQAttributes

    def __init__(self, pd: ProtectionDomain, max_wr: int = 128, max_sge: int = 1) -> None:
        self._number = _free_number()
        self._token = async_event.next_token()
        handle, self.limits = _create(pd, max_wr, max_sge, self._token)
        self.pd: ProtectionDomain = pd
        self.max_wr: int = max_wr
        self.room: Credits = Credits(max_wr)
        self._table: SlotTable[_Receive] = SlotTable()
        self._takers: weakref.WeakValueDictionary[int, QueuePair] = weakref.WeakValueDictionary()
        self._cqs: Counter[CompletionQueue] = Counter()  # queue pairs that complete there
        self._marks: dict[asyncio.Future[None], int] = {}  # low-water marks that are waited for
        self._armed = 0  # the device's own limit, as far as is known here; 0 for none
        self._awaited = False  # whether the loop drains every CQ in which a receive could complete
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unwatch: Callable[[], None] | None = None
        super().__init__(handle, (pd,))
        shared_queues[self._number] = self
        async_event.enroll(self._token, self)

    # Queue pairs

    def _admit(self, cq: CompletionQueue) -> None:
        """Note that a queue pair which completes in `cq` is made: any receive may arrive there."""
        if self._awaited:
            cq.manage()
        with _lock:
            if not self._cqs[cq]:
                cq._promise(self.max_wr)
            self._cqs[cq] += 1

    def _dismiss(self, cq: CompletionQueue) -> None:
        """Forget a queue pair that is destroyed; in any thread."""
        with _lock:
            self._cqs[cq] -= 1
            if not self._cqs[cq]:
                del self._cqs[cq]
                cq._unpromise(self.max_wr)

    # Posting

    @property
    def outstanding(self) -> int:
        """Number of posted receives whose completion has not been seen."""
        return len(self._table)

    def post_recv(self, requests: RecvWR | Sequence[RecvWR]) -> None:
        """Post `requests`, one receive or a list (`ibv_post_srq_recv(3)`).

        The completion of each comes out of the receive CQ of the queue pair that took it, with the
        caller's `wr_id` and the number of that queue pair.

        Raises:
            RdmaOSError: There are not enough free places; nothing was posted (EAGAIN).
            ValueError: A number is out of range, or a receive has more pieces than `max_sge`.
            RdmaOSError: The device has reported the queue as failed.
            OSError: The post failed; the receives in front of the failed receive are posted.
        """
        self._require()
        chain = [requests] if isinstance(requests, RecvWR) else list(requests)
        if not chain:
            return
        self._take(len(chain))
        self._post(chain, [request.wr_id for request in chain])

    def _take(self, count: int) -> None:
        """Take places for a list at once, or refuse it."""
        if not self.room.try_acquire(count):
            msg = f"the queue has {self.room.free} free places, {count} are needed"
            raise busy_error(msg, errno.EAGAIN)

    def prepare_recv(self, requests: RecvWR | Sequence[RecvWR]) -> PreparedReceives:
        """Build one receive or a list once, to be posted many times.

        Args:
            requests: As for `post_recv`; later changes of the objects have no effect.

        Returns:
            The prepared receives, to be freed by the caller, or with the queue.

        Raises:
            ValueError: As `post_recv`, or the list is empty or longer than the queue.
            ResourceClosedError: The queue or a region is closed.
        """
        self._require()
        chain = [requests] if isinstance(requests, RecvWR) else list(requests)
        if not 0 < len(chain) <= self.max_wr:
            msg = f"a prepared list needs 1 to {self.max_wr} receives, the places of the queue"
            raise ValueError(msg)
        return PreparedReceives(self, chain, *self._built(chain))

    def _built(self, chain: Sequence[RecvWR]) -> tuple[Any, list[Any]]:
        for request in chain:
            check_count(len(request.sg_list), "limits.max_sge", self.limits.max_sge)
        return build_recv(chain)

    def _post(self, chain: Sequence[RecvWR], caller_ids: Sequence[int | None]) -> list[_Receive]:
        """Post a list; its places were taken from `room` before."""
        try:
            self._require()
            self._check_alive()
            first, keep = self._built(chain)
        except BaseException:
            self.room.release(len(chain))
            raise
        regions = [tuple(piece.mr for piece in request.sg_list) for request in chain]
        try:
            return self._ring(first, regions, caller_ids)
        finally:
            del keep

    def _ring(
        self,
        first: Any,
        regions: Sequence[tuple[MemoryRegion, ...]],
        caller_ids: Sequence[int | None],
    ) -> list[_Receive]:
        """Post a C list whose regions are open."""
        entered: list[_Receive] = []
        numbers: list[int] = []
        for i, (used, caller_id) in enumerate(zip(regions, caller_ids, strict=True)):
            receive = _Receive(used, caller_id)
            for region in used:
                region._retain()
            number = self._table.add(receive)
            entered.append(receive)
            numbers.append(number)
            first[i].wr_id = number & _ID_MASK | SHARED_TAG << TAG_SHIFT | self._number << SUB_SHIFT
        bad = ffi.new("struct ibv_recv_wr **")
        code = lib.ibv_post_srq_recv(self._require(), first, bad)
        if code:
            # The receives before the failed receive are posted; if it has no name, all may be.
            refused = bad[0] - first if bad[0] != ffi.NULL else len(entered)
            for number in numbers[refused:]:
                self._take_out(number)
            raise os_error(code, "ibv_post_srq_recv")
        return entered

    def _check_alive(self) -> None:
        """Raise the error that has ended the queue, if any: `room` keeps it."""
        self.room.try_acquire(0)

    async def recv(self, buffers: Buffers) -> WorkCompletion:
        """Post a receive and await the message that takes it, from whichever queue pair.

        Args:
            buffers: Regions or pieces of regions, filled in order.

        Returns:
            The completion; `qp_num` is the queue pair, `byte_len` the length.

        Waits for a free place first, and without a time limit, as peers need not send.

        Raises:
            ValueError: A receive CQ of a queue pair has no channel, so that it cannot be awaited.
            CompletionError: The queue pair that took it failed; the subclass says why.
            ResourceClosedError: The queue or a region is closed.
            RdmaOSError: The device has reported the queue as failed.

        Cancellation: ends the wait.  The receive stays posted and takes a message that no task
        sees; its memory stays registered until then.
        """
        self._require()
        for cq in list(self._cqs):
            cq.manage()
        self._awaited = True
        self._loop = asyncio.get_running_loop()
        request = RecvWR(sg_list=sge_list(buffers))
        await self.room.acquire()
        (receive,) = self._post([request], [None])
        future = receive.future = self._loop.create_future()
        try:
            completion: WorkCompletion = await future
        finally:
            del future, receive  # its exception has this frame: a cycle
        return completion

    # Completions

    def _take_out(self, number: int) -> _Receive | None:
        receive = self._table.remove(number)
        if receive is not None:
            receive.release_regions()
            self.room.release()
        return receive

    def _complete(self, record: WCRecord, cq: CompletionQueue | None) -> None:
        """One of the receives has completed, in this CQ."""
        receive = self._take_out(record[0])
        if receive is None:
            return
        if record[1] and (taker := self._takers.get(record[6])) is not None:
            taker._failed("recv", record)
        if receive.caller_id is None:
            receive.tell(record)
        elif cq is not None:
            cq._deliver(record, receive.caller_id)
        if self._marks:
            self._reached(self.outstanding)

    # Low-water mark

    async def low_water(self, limit: int) -> int:
        """Wait until fewer than `limit` receives are posted; return the number of free places.

        Args:
            limit: 1 to `max_wr`.

        Returns at once if that is so already.  Otherwise arms the device's limit
        (`ibv_modify_srq(3)`, IBV_EVENT_SRQ_LIMIT_REACHED) and watches the completions as well, so
        that a lost event delays nothing.  With CQs that the program polls, it can return before
        the completions were polled, which frees the places.  It can also return early, for the
        event of an earlier, canceled call.

        It has no time limit of its own, as peers need not send: use `asyncio.timeout`.

        Raises:
            ValueError: `limit` is out of range.
            OSError: The device has no limit to arm.
            RdmaOSError: The device has reported the queue as failed.
            ResourceClosedError: The queue was closed.

        Cancellation: safe; nothing is lost, as the next call looks for itself.
        """
        self._require()
        if not 1 <= limit <= self.max_wr:
            msg = f"limit {limit} is not in 1..{self.max_wr}"
            raise ValueError(msg)
        self._check_alive()
        if self.outstanding >= limit:
            self._loop = asyncio.get_running_loop()
            if self._unwatch is None:
                self._unwatch = async_event.watch(self.pd.context)
            mark = self._loop.create_future()
            self._marks[mark] = limit
            try:
                self._arm_highest()
                await mark
            finally:
                del self._marks[mark]
        return self.room.free

    def refills(self, limit: int) -> AsyncIterator[int]:
        """Iterate over the moments at which fewer than `limit` receives are posted.

        Each step yields the number of free places; if the body of the loop posts too few receives,
        the next step follows at once.  Ends when the queue is closed.  Raises and cancellation: as
        `low_water`.
        """
        steps = itertools.count()

        async def step() -> int:
            if next(steps):
                await asyncio.sleep(0)  # other tasks get a turn even if the body posted nothing
            return await self.low_water(limit)

        return Steps(step)

    def _arm_highest(self) -> None:
        """Have the device say when its own count falls below the highest mark."""
        waiting = (limit for mark, limit in self._marks.items() if not mark.done())
        highest = max(waiting, default=0)
        if highest and highest != self._armed:
            self.modify(limit=highest)

    def _reached(self, below: int) -> None:
        """Fewer receives than any mark above `below` are posted."""
        for mark, limit in self._marks.items():
            if limit > below and not mark.done():
                mark.set_result(None)

    @property
    def _device(self) -> Context:
        return self.pd.context

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        return self._loop

    def _on_async_event(self, event: AsyncEvent) -> None:
        if event.type == AsyncEventType.SRQ_LIMIT_REACHED:
            armed, self._armed = self._armed, 0  # the device has disarmed it
            if armed:
                self._reached(armed - 1)
            if not self.closed:
                self._arm_highest()
        elif event.type == AsyncEventType.SRQ_ERR:
            self._fail(lambda: queue_error(event.type.name, "shared receive queue"))
        elif event.type == AsyncEventType.DEVICE_FATAL:
            self._fail(device_error)

    def _fail(self, error: Callable[[], BaseException]) -> None:
        """End all waits with an error: nothing will be received any more."""
        self.room.fail(error)
        futures: list[asyncio.Future[Any]] = list(self._marks)
        futures += [r.future for r in self._table.entries() if r.future is not None]
        for future in futures:
            if not future.done():
                future.set_exception(error())

    # Attributes

    def query(self) -> SRQAttributes:
        """Ask the device for the current attributes (`ibv_query_srq(3)`).

        `srq_limit` is 0 once the limit was reached.

        Raises:
            OSError: The device or its driver does not answer.
        """
        attr = ffi.new("struct ibv_srq_attr *")
        check_errno(lib.ibv_query_srq(self._require(), attr), "ibv_query_srq")
        return copy_of(SRQAttributes, attr)

    def modify(self, *, max_wr: int | None = None, limit: int | None = None) -> None:
        """Change the depth or arm the limit (`ibv_modify_srq(3)`).

        Args:
            max_wr: New depth; every CQ of its queue pairs has to have room for it.
            limit: The device raises SRQ_LIMIT_REACHED, once, when it takes a receive and fewer than
                this many are left; 0 disarms it.  `low_water` does this by itself.

        Raises:
            ValueError: Fewer places than receives are posted, or a CQ cannot grow.
            OSError: The device cannot do it, or the number is beyond its limits (EINVAL).
        """
        attr = ffi.new("struct ibv_srq_attr *")
        mask = 0
        if limit is not None:
            if not 0 <= limit <= self.limits.max_wr:
                msg = f"limit {limit} is not in 0..{self.limits.max_wr}"
                raise ValueError(msg)
            attr.srq_limit, mask = limit, mask | SRQAttrMask.LIMIT
        if max_wr is not None:
            if max_wr < max(1, self.outstanding):
                msg = f"{self.outstanding} receives are posted; {max_wr} places are too few"
                raise ValueError(msg)
            attr.max_wr, mask = max_wr, mask | SRQAttrMask.MAX_WR
        more = 0 if max_wr is None else max_wr - self.max_wr
        with _lock, contextlib.ExitStack() as undo:
            for cq in list(self._cqs):
                cq._promise(max(0, more))
                undo.callback(cq._unpromise, max(0, more))
            check_errno(lib.ibv_modify_srq(self._require(), attr, mask), "ibv_modify_srq")
            undo.pop_all()
            for cq in list(self._cqs):
                cq._unpromise(max(0, -more))
            self.max_wr += more
        if limit is not None:
            self._armed = limit
        if max_wr is not None:
            self.room.release(more)
            self.limits = SRQAttributes(max(max_wr, attr.max_wr), self.limits.max_sge, 0)

    # Life

    def _on_close(self) -> None:
        self._fail(lambda: ResourceClosedError("the shared receive queue was closed"))
        if self._unwatch is not None:
            self._unwatch()
        # The adapter forgets the memory when the queue is destroyed: so the queue keeps it from
        # now on, instead of the receives.
        receives = self._table.entries()
        self._hold(region for receive in receives for region in receive.regions)
        for receive in receives:
            receive.release_regions()

    def _destroy(self, handle: Any) -> None:
        async_event.dismiss(self._token)
        check_errno(lib.ibv_destroy_srq(handle), "ibv_destroy_srq")

    def __repr__(self) -> str:
        return (
            f"<SharedReceiveQueue {self._state.value} posted={self.outstanding} of {self.max_wr}>"
        )
