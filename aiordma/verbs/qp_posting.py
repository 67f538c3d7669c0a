"""Raw posting: requests with the caller's own numbers; their completions come out of the CQ."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiordma._ffi import ffi, lib
from aiordma.errors import os_error
from aiordma.verbs.enums import MWType, Opcode, SendFlags
from aiordma.verbs.qp_attr import QPLimits
from aiordma.verbs.resource import Resource
from aiordma.verbs.srq import SharedReceiveQueue
from aiordma.verbs.work_queue import Planned, WorkQueue
from aiordma.verbs.wr import RecvWR, SendWR, build_recv, build_send, check_requests, pinned
from aiordma.verbs.wr_check import WRRules

__all__ = ["Built", "RawPosting"]


class Built(NamedTuple):
    """Requests, ready to be posted: the C list, what keeps it alive, and what is to be noted."""

    first: Any
    keep: list[Any]
    plan: list[Planned]


class RawPosting(Resource):
    """What a queue pair can do with requests that carry the caller's number.

    Part of `QueuePair`, which sets the attributes and defines `to_error`.
    """

    __slots__ = ("_in_error", "_queues", "_rules", "limits", "num", "srq")

    _in_error: bool
    _queues: tuple[WorkQueue, WorkQueue] | None  # a connection posts in C, and needs none
    _rules: WRRules
    limits: QPLimits
    num: int
    srq: SharedReceiveQueue | None

    def to_error(self) -> None:
        """Move to the error state."""
        raise NotImplementedError

    def _make_queues(self) -> tuple[WorkQueue, WorkQueue]:
        """The accounts of the send and the receive queue."""
        raise NotImplementedError

    @property
    def _sq(self) -> WorkQueue:
        return (self._queues or self._make_queues())[0]

    @property
    def _rq(self) -> WorkQueue:
        return (self._queues or self._make_queues())[1]

    def post_send(self, requests: SendWR | Sequence[SendWR]) -> None:
        """Post one send request or a list, with one doorbell (`ibv_post_send(3)`).

        The completions of signaled requests, and of failed ones, come out of the CQ with the
        caller's `wr_id`.  A completion also ends the unsignaled requests before it.  The regions
        stay registered until then, even if they are closed; bytes of an INLINE request may be
        reused at once.

        Args:
            requests: What to do, in this order.

        Raises:
            ResourceBusyError: The queue has not enough free places.
            ValueError: A number does not fit into its field, a limit of the queue pair (`limits`)
                is exceeded, or unsignaled requests would fill the queue, which then could never
                complete any.
            NotSupportedError: Device, transport or type of queue pair cannot do it.
            ResourceClosedError: The queue pair or a region is closed.
            OSError: The post failed; the queue pair is in the error state.

        After all but the last nothing was posted, of a list neither what was valid.
        """
        chain = [requests] if isinstance(requests, SendWR) else list(requests)
        self._post_raw(self._sq, chain, self._build_send(chain))

    def post_recv(self, requests: RecvWR | Sequence[RecvWR]) -> None:
        """Post one receive request or a list (`ibv_post_recv(3)`).

        Args:
            requests: The receives, in the order in which they are to be used.

        Raises and completions: as `post_send`; ValueError also if the queue pair uses a shared
        receive queue.
        """
        chain = [requests] if isinstance(requests, RecvWR) else list(requests)
        self._post_raw(self._rq, chain, self._build_recv(chain))

    def _build_send(self, chain: Sequence[SendWR]) -> Built:
        """Checked and translated for the adapter; see `build_send`."""
        self._require()
        try:
            self._rules.check_send(chain)
            first, keep = build_send(chain)
            plan = [self._rules.plan(request) for request in chain]
            for i, planned in enumerate(plan):
                if planned.signaled:
                    first[i].send_flags |= SendFlags.SIGNALED
            for request in chain:
                piece = request.bind
                if request.mw is not None and piece is not None and len(piece):
                    request.mw._binding(self, piece.mr)
        except AttributeError:
            check_requests(chain, SendWR)
            raise
        return Built(first, keep, plan)

    def _build_recv(self, chain: Sequence[RecvWR]) -> Built:
        self._require()
        if self.srq is not None:
            msg = "the queue pair takes its receives from its SharedReceiveQueue: post them there"
            raise ValueError(msg)
        try:
            self._rules.check_recv(chain)
            plan = [Planned("recv", pinned(request)) for request in chain]
            return Built(*build_recv(chain), plan)
        except AttributeError:
            check_requests(chain, RecvWR)
            raise

    def _post_raw(
        self, queue: WorkQueue, chain: Sequence[SendWR] | Sequence[RecvWR], built: Built
    ) -> None:
        if not chain:
            return
        if self._in_error:
            queue.cq._flush(self.num, [request.wr_id for request in chain])
            return
        unsignaled = queue.unsignaled_after(built.plan)
        queue.take(len(chain), unsignaled)
        for i, posted in enumerate(queue.enter(built.plan, unsignaled)):
            posted.caller_id = chain[i].wr_id
            built.first[i].wr_id = posted.wr_id
        self._ring(queue, built.first)

    def _ring(self, queue: WorkQueue, first: Any) -> None:
        """Hand a list to the adapter.

        After a failure the list may have been queued all the same: Soft-RoCE writes its ring
        first and rings the doorbell by a system call that can fail.  So nothing is taken back; the
        queue pair goes to the error state and the memory stays until its destruction.
        """
        handle = self._require()
        wr = first[0]
        if queue is self._sq and wr.opcode == Opcode.BIND_MW and _is_type_1(wr):
            # A call of its own, in which the device's library chooses the key.
            bind = ffi.new("struct ibv_mw_bind *")
            bind.wr_id = wr.wr_id
            bind.send_flags = wr.send_flags
            bind.bind_info = wr.bind_mw.bind_info
            code = lib.ibv_bind_mw(handle, wr.bind_mw.mw, bind)
        elif queue is self._sq:
            bad = ffi.new("struct ibv_send_wr **")
            code = lib.ibv_post_send(handle, first, bad)
        else:
            bad = ffi.new("struct ibv_recv_wr **")
            code = lib.ibv_post_recv(handle, first, bad)
        if code:
            raise self._post_failed(queue, code)

    def _post_failed(self, queue: WorkQueue, code: int) -> OSError:
        with contextlib.suppress(OSError):
            self.to_error()
        return os_error(code, "ibv_post_send" if queue is self._sq else "ibv_post_recv")


def _is_type_1(wr: Any) -> bool:
    return bool(wr.bind_mw.mw.type == MWType.TYPE_1)
