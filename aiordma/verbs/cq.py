"""CompletionQueue: where finished work requests land."""

from __future__ import annotations

from collections import deque
from typing import Any, Self

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.errors import ResourceBusyError, ResourceClosedError, os_error
from aiordma.loop.slots import SlotTable
from aiordma.loop.waiters import Waiters
from aiordma.verbs.comp_channel import CompletionChannel, Sink
from aiordma.verbs.context import Context
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WC_STRUCT, WCRecord, WorkCompletion

__all__ = ["CompletionQueue"]


class CompletionQueue(Resource):
    """A completion queue (`ibv_create_cq(3)`).

    Two ways to use it, for each queue one:

    - managed: from the first awaited operation or `async for` on, the loop drains it; `poll`
      then returns what the loop has put aside.
    - by hand: `poll` alone, or `req_notify`, `CompletionChannel.get_cq_event`, `poll`,
      `ack_events`.

    Args:
        context: The device.
        cqe: Least number of completions that it has room for.  The sum of the send and receive
            depths of its queue pairs may not exceed it: an overrun loses completions.
        channel: Completion channel; without one the queue can only be polled.
        comp_vector: Completion vector, 0 to `context.num_comp_vectors - 1`.

    Raises:
        ValueError: `cqe` is not positive.
        OSError: Above the device's limit (EINVAL).
    """

    __slots__ = (
        "_aio", "_error", "_promised", "_queue", "_scratch", "_token", "_unacked", "_waiters",
        "channel", "context", "table",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        cqe: int,
        channel: CompletionChannel | None = None,
        comp_vector: int = 0,
    ) -> None:
        if cqe <= 0:
            msg = f"a completion queue needs room for at least one completion, not {cqe}"
            raise ValueError(msg)
        self.context = context
        self.channel = channel
        self.table: SlotTable[Sink] = SlotTable() if channel is None else channel.table
        self._aio = ffi.new("struct aio_cq *")
        self._token = self._aio.token = 0 if channel is None else next(channel._tokens)
        channel_handle = ffi.NULL if channel is None else channel._require()
        handle = lib.ibv_create_cq(context._require(), cqe, self._aio, channel_handle, comp_vector)
        check_pointer(handle, "ibv_create_cq")
        self._queue: deque[WorkCompletion] = deque()
        self._waiters = Waiters()
        self._scratch: Any = None
        self._promised = 0
        self._unacked = 0
        self._error: BaseException | None = None
        super().__init__(handle, (context,) if channel is None else (context, channel))
        if channel is not None:
            channel._cqs[self._token] = self

    @property
    def cqe(self) -> int:
        """Room for completions, at least what was asked for."""
        return int(self._require().cqe)

    @property
    def managed(self) -> bool:
        """Whether the loop drains the queue."""
        return bool(self._aio.managed)

    def manage(self) -> None:
        """Have the running loop drain the queue from now on.  Idempotent; not undone.

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
        self._aio.managed = 1
        check_errno(lib.ibv_req_notify_cq(handle, 0), "ibv_req_notify_cq")
        # Completions from before the arming raise no event.
        self.channel._sweep(self)
        self.channel._watch()

    # By hand

    def req_notify(self, *, solicited_only: bool = False) -> None:
        """Ask for one event at the next completion (`ibv_req_notify_cq(3)`).

        Requests do not add up, and completions that are there already raise no event: poll
        after arming.

        Args:
            solicited_only: Only for messages whose sender asked for it, and for failures.
        """
        if self.channel is not None:
            self.channel._attach()
        check_errno(
            lib.ibv_req_notify_cq(self._require(), int(solicited_only)), "ibv_req_notify_cq"
        )

    def poll(self, n: int = 16) -> list[WorkCompletion]:
        """Up to `n` completions, oldest first; empty if there is none (`ibv_poll_cq(3)`).

        Raises:
            ValueError: `n` is not positive.
        """
        if n <= 0:
            msg = f"cannot poll for {n} completions"
            raise ValueError(msg)
        handle = self._require()
        if self._aio.managed:
            assert self.channel is not None
            self.channel._sweep(self)
        elif len(self._queue) < n:
            self._poll_hardware(handle, n - len(self._queue))
        return [self._queue.popleft() for _ in range(min(n, len(self._queue)))]

    def _poll_hardware(self, handle: Any, n: int) -> None:
        if self._scratch is None or len(self._scratch) < n:
            self._scratch = ffi.new("struct ibv_wc[]", n)
        count = lib.ibv_poll_cq(handle, n, self._scratch)
        if count < 0:
            raise os_error(5, "ibv_poll_cq")
        for record in WC_STRUCT.iter_unpack(ffi.buffer(self._scratch)[: count * WC_STRUCT.size]):
            sink = self.table.get(record[0])
            if sink is not None:
                sink(record)
            else:
                self._deliver(record)

    def ack_events(self, n: int = 1) -> None:
        """Acknowledge `n` events that `get_cq_event` gave (`ibv_ack_cq_events(3)`).

        Raises:
            ValueError: Fewer are unacknowledged.
        """
        if not 0 < n <= self._unacked:
            msg = f"cannot acknowledge {n} events: {self._unacked} are unacknowledged"
            raise ValueError(msg)
        self._unacked -= n
        if self.channel is not None:
            self.channel._unacked -= n

    # Managed

    def _deliver(self, record: WCRecord, wr_id: int | None = None) -> None:
        self._queue.append(WorkCompletion.from_record(record, wr_id))
        self._waiters.wake()

    def _fail(self, exc: BaseException) -> None:
        self._error = exc
        self._waiters.wake_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WorkCompletion:
        """The next completion of a request that was posted with the caller's own id.

        Ends when the queue is closed.  Cancellation: safe; no completion is lost.
        """
        if not self.closed:
            self.manage()
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise StopAsyncIteration
            await self._waiters.wait()
        return self._queue.popleft()

    # Room

    def _promise(self, depth: int) -> None:
        """Reserve room for a queue pair's work requests; grow, or refuse.

        Raises:
            ValueError: There is not enough room and the device cannot grow the queue.
        """
        needed = self._promised + depth
        if needed > self.cqe:
            try:
                self.resize(needed)
            except OSError as exc:
                msg = (
                    f"the completion queue has room for {self.cqe} completions, {needed} could "
                    "arrive; make it larger or the queue pair smaller"
                )
                raise ValueError(msg) from exc
        self._promised = needed

    def _unpromise(self, depth: int) -> None:
        self._promised -= depth

    def resize(self, cqe: int) -> None:
        """Change the room to at least `cqe` completions (`ibv_resize_cq(3)`).

        Raises:
            ValueError: Less than what its queue pairs may produce.
            OSError: The device cannot do it.
        """
        if cqe < max(1, self._promised):
            msg = f"{self._promised} completions could arrive; {cqe} is too small"
            raise ValueError(msg)
        check_errno(lib.ibv_resize_cq(self._require(), cqe), "ibv_resize_cq")

    # Life

    def _before_close(self) -> None:
        if self._unacked:
            msg = f"{self._unacked} completion events are not acknowledged"
            raise ResourceBusyError(16, msg)

    def _on_close(self) -> None:
        if self.channel is not None:
            self.channel._forget(self)
        self._fail(ResourceClosedError("the completion queue was closed"))
        self._error = None

    def _destroy(self, handle: Any) -> None:
        check_errno(lib.ibv_destroy_cq(handle), "ibv_destroy_cq")

    def __repr__(self) -> str:
        return f"<CompletionQueue {self._state.value} managed={self.managed}>"
