"""CompletionQueue: the queue of completed work requests.

If a completion queue overruns, completions are lost, and their tasks would wait forever.  So the
queue reserves room for all completions that are possible: for each queue pair, the depths of its
queues; for a shared receive queue, its depth, once, however many of its queue pairs complete here.
If there is not enough room, the queue grows, or the reservation is refused.  A queue pair that
begins with few slots reserves room for all that it can get, but the queue grows only when it gets
them.  Should the queue overrun all the same, through a fault of the device, the queue and all its
queue pairs fail.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, cast

from aiordma._core import QueueState
from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.arguments import check_kind, fitting, whole
from aiordma.errors import device_error, os_error, queue_error
from aiordma.loop import fork
from aiordma.loop.slots import SlotTable
from aiordma.loop.wait_line import WaitLine
from aiordma.verbs.async_event import AsyncEvent, dismiss, enroll, next_token
from aiordma.verbs.comp_channel import (
    MANAGED,
    CompletionChannel,
    Sink,
    refuse_unacknowledged,
    route,
)
from aiordma.verbs.context import Context, check_limit
from aiordma.verbs.enums import AsyncEventType
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import (
    WC_STRUCT,
    WCRecord,
    WorkCompletion,
    count_successes,
    flush_record,
)

if TYPE_CHECKING:
    from aiordma.verbs.qp import QueuePair

__all__ = ["CompletionQueue"]

# Queue pairs take their promises back where they are destroyed, in other threads.
_promises = fork.new_lock()
#: The events that end a queue, and the error that they are for the program.
_ENDS: dict[int, Callable[[], BaseException]] = {
    AsyncEventType.CQ_ERR: lambda: queue_error(AsyncEventType.CQ_ERR.name, "completion queue"),
    AsyncEventType.DEVICE_FATAL: device_error,
}
# Of C objects that could not be destroyed.
_REFUSED: list[QueueState] = []


class _Room:
    """The room of a queue, counted in completions.

    Attributes:
        size: How many the queue has room for now.
        most: The limit of the device.
        promised: How many were reserved.
        expected: How many of these have to have room now; the queue can grow for the others.
    """

    __slots__ = ("expected", "most", "promised", "size")

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        self.most = most
        self.promised = self.expected = 0

    def needed(self, depth: int, expected: int) -> int:
        """The size that the queue needs for another reservation."""
        promised = self.promised + depth
        if promised <= self.most or promised <= self.size:
            return self.expected + expected  # the queue can grow for the others
        return promised


class CompletionQueue(Resource):
    """A completion queue (`ibv_create_cq(3)`).

    A queue is used in one of two ways:

    - Managed: from the first awaited operation or `async for` on, the event loop polls the queue,
      and `poll` returns completions that nobody has awaited.
    - By hand: with `poll` alone, or with `req_notify`, `CompletionChannel.get_cq_event`, `poll` and
      `ack_events`.  The loop takes the events of a managed queue, so `req_notify` and
      `get_cq_event` refuse such a queue.

    Args:
        context: The device.
        cqe: The smallest number of completions to have room for.  The send and receive depths of
            the queue pairs, and the depths of their shared receive queues, have to fit; the queue
            grows for them if the device supports that.
        channel: The completion channel; without one the queue can only be polled.
        comp_vector: The completion vector, 0 to `context.num_comp_vectors - 1`, which selects the
            interrupt of the adapter for its events.

    Raises:
        ValueError: `cqe` is not positive, or there is no such completion vector.
        OSError: EINVAL, `cqe` exceeds the limit of the device.
    """

    __slots__ = (
        "_aio", "_error", "_queue", "_room", "_scratch", "_token", "_unacked", "_waiters",
        "channel", "context", "table",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        cqe: int,
        channel: CompletionChannel | None = None,
        comp_vector: int = 0,
    ) -> None:
        check_kind("context", context, Context, none=False)
        check_kind("channel", channel, CompletionChannel)
        cqe, comp_vector = whole("cqe", cqe), whole("comp_vector", comp_vector)
        if cqe <= 0:
            msg = f"a completion queue needs room for at least one completion, not {cqe}"
            raise ValueError(msg)
        if comp_vector and not 0 <= comp_vector < context.num_comp_vectors:
            msg = f"completion vector {comp_vector} is not in 0..{context.num_comp_vectors - 1}"
            raise ValueError(msg)
        most = context.attributes.max_cqe
        check_limit("ibv_create_cq", "cqe", cqe, most)
        self.context: Context = context
        self.channel: CompletionChannel | None = channel
        self.table: SlotTable[Sink] = SlotTable() if channel is None else channel.table
        self._token = next_token()
        self._aio = QueueState(self._token)
        channel_handle = ffi.NULL if channel is None else channel._require()
        handle = self._make(context._require(), cqe, channel_handle, comp_vector)
        self._room = _Room(int(handle.cqe), most)
        self._queue: deque[WorkCompletion] = deque()
        self._waiters: WaitLine[None] = WaitLine()
        self._scratch: Any = None
        self._unacked = 0
        # Makes the exception that ended it: one object raised many times would collect tracebacks.
        self._error: Callable[[], BaseException] | None = None
        super().__init__(handle, (context,) if channel is None else (context, channel))
        if channel is not None:
            channel._cqs[self._token] = self
        enroll(self._token, self)

    def _make(self, context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        """Return the C object."""
        handle = lib.aio_create_cq(context, cqe, self._aio.address, channel, comp_vector)
        return check_pointer(handle, "ibv_create_cq")

    @property
    def cqe(self) -> int:
        """How many completions the queue has room for, at least as many as were requested."""
        self._require()
        return self._room.size

    @property
    def managed(self) -> bool:
        """Whether the event loop polls the queue."""
        return bool(self._aio.managed)

    def manage(self, *, solicited_only: bool = False, unused: bool = False) -> None:
        """Have the running event loop poll the queue from now on.  Idempotent; cannot be undone.

        Args:
            solicited_only: Whether to wake the loop only for messages whose sender asks for it
                (`SendFlags.SOLICITED`).  Other completions are found together with those, or by a
                regular poll.  This is for queues of receives, because the completion of a send is
                never solicited.
            unused: Whether it is certain that nothing has completed yet.

        Raises:
            ValueError: The queue has no completion channel.
        """
        if self._aio.managed:
            return
        handle = self._require()
        if self.channel is None:
            msg = "only a completion queue with a channel can be awaited"
            raise ValueError(msg)
        self.channel._attach()
        solicited_only = self._aio.manage(solicited_only)
        check_errno(lib.ibv_req_notify_cq(handle, solicited_only), "ibv_req_notify_cq")
        if not unused:
            # Completions that arrived before the queue was armed raise no event.
            self.channel._sweep(self)
        self.channel._safety.watch(self)
        # A task that waits in `get_cq_event` may now wait in vain.
        self.channel._waiters.grant_all(None)

    # By hand

    def req_notify(self, *, solicited_only: bool = False) -> None:
        """Arm the queue: the next completion raises one event (`ibv_req_notify_cq(3)`).

        Several calls still result in one event, and completions that are in the queue already raise
        none.  So poll the queue after arming it.

        Args:
            solicited_only: Whether to raise the event only for messages whose sender asks for it
                (`SendFlags.SOLICITED`), and for failures.  Soft-RoCE raises no event for failures,
                since Linux 6.12 at the latest, and software iWARP raises no event at all then.

        Raises:
            RuntimeError: The queue is managed, and the event loop takes its events.
        """
        if self._aio.managed:
            raise RuntimeError(MANAGED)
        if self.channel is not None:
            self.channel._attach()
        check_errno(
            lib.ibv_req_notify_cq(self._require(), int(solicited_only)), "ibv_req_notify_cq"
        )

    def poll(self, n: int = 16) -> list[WorkCompletion]:
        """Return up to `n` completions, oldest first; empty if there is none (`ibv_poll_cq(3)`).

        Raises:
            ValueError: `n` is not positive.
            RdmaOSError: The queue has failed, and its last completions were returned before.  This
                is only noticed if an event loop reads the events of the device: after
                `req_notify`, `get_cq_event` or an awaited operation, or with `DeviceEvents`.
        """
        if n <= 0:
            msg = f"cannot poll for {n} completions"
            raise ValueError(msg)
        self._require()
        self._take_arrived(n)
        if not self._queue and self._error is not None:
            raise self._error()
        return [self._queue.popleft() for _ in range(min(n, len(self._queue)))]

    def poll_count(self, n: int = 256) -> int:
        """Remove up to `n` successful completions, and return only how many there were.

        This is cheaper than `poll`, because no `WorkCompletion` is made.  It stops before a failed
        completion, which `poll` then returns.

        Raises:
            CompletionError: The oldest completion has failed.
            ValueError, RdmaOSError: As `poll`.
        """
        if n <= 0:
            msg = f"cannot poll for {n} completions"
            raise ValueError(msg)
        self._require()
        count = 0
        if self._aio.managed:
            self._take_arrived(n)
        elif not self._queue:
            count = self._poll_adapter(n, counted=True)
        queue = self._queue
        while queue and count < n and queue[0].ok:
            queue.popleft()
            count += 1
        if not count:
            if queue:
                raise queue[0].error("a request")
            if self._error is not None:
                raise self._error()
        return count

    def _take_arrived(self, n: int) -> None:
        """Poll the adapter, until `n` completions can be returned or there are no more."""
        if self._aio.managed:
            assert self.channel is not None
            self.channel._sweep(self)
        elif len(self._queue) < n:
            self._poll_adapter(n - len(self._queue))

    def _take_all(self) -> None:
        """Poll all completions of the adapter, before the library adds some of its own."""
        if not self.closed:
            self._take_arrived(len(self._queue) + self._room.size)

    def _flush(self, qp_num: int, numbers: Iterable[int]) -> None:
        """Add flush completions for requests that were never posted, after all real ones."""
        self._take_all()
        record = flush_record(qp_num)
        for number in numbers:
            self._deliver(record, number)

    def _poll_adapter(self, n: int, *, counted: bool = False) -> int:
        """Poll up to `n` completions; if `counted`, return how many were only counted."""
        if self._scratch is None or len(self._scratch) < n:
            self._scratch = ffi.new("struct ibv_wc[]", n)
        arrived = lib.ibv_poll_cq(self._handle, n, self._scratch)
        if arrived < 0:
            raise os_error(errno.EIO, "ibv_poll_cq")
        if not arrived:
            return 0
        count, size = 0, WC_STRUCT.size
        used = ffi.buffer(self._scratch, arrived * size)
        if counted:
            count = count_successes(memoryview(used), self.table.get)
        for record in WC_STRUCT.iter_unpack(used[count * size :]):  # a copy
            route(record, self.table, self)
        return count

    def ack_events(self, n: int = 1) -> None:
        """Acknowledge `n` events that `get_cq_event` has returned (`ibv_ack_cq_events(3)`).

        Raises:
            ValueError: Fewer events are unacknowledged.
        """
        if not 0 < n <= self._unacked:
            msg = f"cannot acknowledge {n} events: {self._unacked} are unacknowledged"
            raise ValueError(msg)
        self._unacked -= n
        if self.channel is not None:
            self.channel._unacked -= n

    # Managed

    def _deliver(self, record: WCRecord, wr_id: int | None = None) -> None:
        self._queue.append(self._completion(record, wr_id))
        self._waiters.grant(None)

    def _completion(self, record: WCRecord, wr_id: int | None) -> WorkCompletion:
        return WorkCompletion.from_record(record, wr_id)

    def _fail(self, error: Callable[[], BaseException]) -> None:
        if self._error is None:
            self._error = error
        self._waiters.grant_all(None)

    @property
    def _device(self) -> Context:
        return self.context

    def _on_async_event(self, event: AsyncEvent) -> None:
        error = _ENDS.get(event.type)
        if error is None:
            return
        # Nothing that is awaited here may hang.
        self._fail(error)
        if self.channel is not None and not self.managed and not self.closed:
            self.channel._notify(self)  # a task that waits for an event polls, and finds out
        self._break_users(error)

    def _break_users(self, error: Callable[[], BaseException]) -> None:
        """Fail all queue pairs of the queue, whose completions will not arrive any more."""
        for user in cast("list[QueuePair]", self._living()):  # nothing else is made from it
            user._broken(error())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WorkCompletion:
        """The next completion of a request that was posted with the caller's own id.

        The iteration ends when the queue is closed.

        Raises:
            RdmaOSError: The queue has failed; its last completions were returned before.

        Cancellation: safe; no completion is lost.
        """
        if not self.closed:
            self.manage()
        while not self._queue:
            if self._error is not None:
                raise self._error()
            if self.closed:
                raise StopAsyncIteration
            await self._waiters.wait()
        return self._queue.popleft()

    # Room

    def _promise(self, depth: int, expected: int | None = None) -> None:
        """Reserve room for `depth` more completions, and grow if necessary.

        Args:
            depth: The number of completions.
            expected: How many of them need room now.  For the others `_expect` is called later,
                which grows the queue.  None: all of them.

        Raises:
            ValueError: There is not enough room, and the device cannot grow the queue.
            RdmaOSError: The queue has failed.
        """
        if self._error is not None:
            raise self._error()
        expected = depth if expected is None else expected
        with _promises:
            self._fit(depth, expected)
            # Add to the present values: other reservations may have ended meanwhile.
            self._room.promised += depth
            self._room.expected += expected

    def _make_room(self, depth: int, expected: int) -> bool:
        """Grow for a reservation if necessary; return False if that is not possible."""
        if self._error is not None:
            return False
        if self._room.needed(depth, expected) <= self._room.size:
            return True
        with _promises:
            try:
                self._fit(depth, expected)
            except (OSError, ValueError):
                return False
        return True

    def _can_expect(self, more: int) -> bool:
        """Whether the device supports a queue with room for `more` completions now."""
        return self._room.expected + more <= self._room.most

    def _expect(self, more: int) -> None:
        """Make room for `more` of the completions that were reserved before.

        Raises:
            OSError: There is not enough memory for the larger queue.
        """
        with _promises:
            self._grow(self._room.expected + more)
            self._room.expected += more

    def _fit(self, depth: int, expected: int) -> None:
        """Grow for a reservation, if necessary; with the lock held."""
        room = self._room
        needed = room.needed(depth, expected)
        if needed <= room.size:
            return
        try:
            self._grow(needed)
        except OSError as exc:
            msg = (
                f"the completion queue has room for {room.size} completions, {needed} could "
                "arrive; make it larger or the queue pair smaller"
            )
            raise ValueError(msg) from exc

    def _grow(self, needed: int) -> None:
        room = self._room
        if needed > room.size:
            # Twice as much at least: each growth makes a new ring.
            more = min(max(needed, 2 * room.size), room.most)
            self._resize(needed if needed > room.most else more)

    def _unpromise(self, depth: int, expected: int | None = None) -> None:
        with _promises:
            self._room.promised -= depth
            self._room.expected -= depth if expected is None else expected

    def resize(self, cqe: int) -> None:
        """Change the room to at least `cqe` completions (`ibv_resize_cq(3)`).

        Raises:
            ValueError: Less than the number of completions that its queue pairs may produce.
            OSError: The device cannot do it.
        """
        with _promises:
            if cqe < max(1, self._room.expected):
                msg = f"{self._room.expected} completions could arrive; {cqe} is too small"
                raise ValueError(msg)
            self._resize(cqe)

    def _resize(self, cqe: int) -> None:
        handle = self._require()
        check_errno(lib.ibv_resize_cq(handle, cqe), "ibv_resize_cq")
        self._room.size = int(handle.cqe)

    def moderate(self, count: int, period_us: int) -> None:
        """Have the adapter raise an event for several completions (`ibv_modify_cq(3)`).

        Args:
            count: Completions per event, 16 bits; 0 or 1 for an event each.
            period_us: Microseconds after which an event comes in any case, 16 bits.

        Raises:
            ValueError: A number is out of range.
            NotSupportedError: The device cannot do it; the software devices cannot.
            OSError: The device refused.
        """
        attr = ffi.new("struct ibv_modify_cq_attr *")
        attr.attr_mask = lib.IBV_CQ_ATTR_MODERATE
        attr.moderate.cq_count = fitting("count", count, 16)
        attr.moderate.cq_period = fitting("period_us", period_us, 16)
        check_errno(lib.ibv_modify_cq(self._require(), attr), "ibv_modify_cq")

    # Life

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        return None if self.channel is None else self.channel._home

    def _before_close(self) -> None:
        refuse_unacknowledged(self._unacked)

    def _on_close(self) -> None:
        if self.channel is not None:
            self.channel._forget(self)
        self._waiters.grant_all(None)

    def _destroy(self, handle: Any) -> None:
        self._aio.retire(int(ffi.cast("uintptr_t", handle)))
        dismiss(self._token)
        if code := lib.ibv_destroy_cq(handle):
            _REFUSED.append(self._aio)  # the C object stays, and has its address
        check_errno(code, "ibv_destroy_cq")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.value} managed={self.managed}>"
