"""ExtendedCompletionQueue: completions with more fields, such as the adapter's timestamp."""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_pointer
from aiordma.arguments import check_kind
from aiordma.errors import os_error
from aiordma.verbs.comp_channel import CompletionChannel, route
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import WCFields
from aiordma.verbs.wc import WC_STRUCT, WCRecord, WorkCompletion

__all__ = ["ExtendedCompletion", "ExtendedCompletionQueue"]

#: The fields of a `WorkCompletion`; each queue is made for them.
_STANDARD = WCFields.BYTE_LEN | WCFields.IMM | WCFields.QP_NUM | WCFields.SRC_QP
_STANDARD |= WCFields.SLID | WCFields.SL | WCFields.DLID_PATH_BITS
_MORE = WCFields.COMPLETION_TIMESTAMP | WCFields.COMPLETION_TIMESTAMP_WALLCLOCK
_MORE |= WCFields.CVLAN | WCFields.FLOW_TAG


@dataclass(frozen=True, slots=True)
class ExtendedCompletion(WorkCompletion):
    """A completion of an `ExtendedCompletionQueue`.

    A field that the queue was not made for is None, and so are all of a failed request.

    Attributes:
        timestamp: When the request completed, in ticks of the adapter's clock; see
            `Context.query_clock` and `Context.read_clock`.
        wallclock_ns: The same in nanoseconds since 1970, if the adapter's clock is set.
        cvlan: Tag of the VLAN with which the packet came.
        flow_tag: Tag of the flow rule that directed the packet here.
    """

    timestamp: int | None = None
    wallclock_ns: int | None = None
    cvlan: int | None = None
    flow_tag: int | None = None


class ExtendedCompletionQueue(CompletionQueue):
    """A completion queue whose completions have more fields (`ibv_create_cq_ex(3)`).

    The program polls it: with `poll`, or with `req_notify`, `await channel.get_cq_event()`, `poll`
    and `ack_events`.  Each completion is an `ExtendedCompletion`.  The loop does not manage the
    queue, because an awaited operation has no place for the fields: awaited operations of its queue
    pairs, and `async for`, raise RuntimeError.

    Args:
        context: The device.
        cqe: As for `CompletionQueue`, like `channel` and `comp_vector`.
        channel: Completion channel.
        comp_vector: Completion vector.
        fields: The fields beside those of a `WorkCompletion`: COMPLETION_TIMESTAMP,
            COMPLETION_TIMESTAMP_WALLCLOCK, CVLAN, FLOW_TAG.

    Raises:
        ValueError: `fields` has another field, or as `CompletionQueue`.
        NotSupportedError: The device has no extended queues (software iWARP), or does not have
            these fields (Soft-RoCE).
        OSError: As `CompletionQueue`.

    Attributes:
        fields: All fields that the queue was made for.
    """

    __slots__ = ("_extra", "_extras", "fields")

    def __init__(
        self,
        context: Context,
        cqe: int,
        channel: CompletionChannel | None = None,
        comp_vector: int = 0,
        *,
        fields: WCFields,
    ) -> None:
        check_kind("fields", fields, int, none=False)
        if other := WCFields(fields) & ~(_STANDARD | _MORE):
            msg = f"fields: {other!r} is no field of an ExtendedCompletion"
            raise ValueError(msg)
        self.fields: WCFields = _STANDARD | fields
        self._extra: Any = None
        self._extras: Any = None
        super().__init__(context, cqe, channel, comp_vector)

    def _make(self, context: Any, cqe: int, channel: Any, comp_vector: int) -> Any:
        handle = lib.aio_create_cq_ex(
            context, cqe, self._aio.address, channel, comp_vector, int(self.fields)
        )
        if not handle and ffi.errno == errno.EOPNOTSUPP:
            detail = f"(the device has no extended completion queues, or none with {self.fields!r})"
            raise os_error(errno.EOPNOTSUPP, "ibv_create_cq_ex", detail=detail)
        return check_pointer(handle, "ibv_create_cq_ex")

    def manage(self, *, solicited_only: bool = False, unused: bool = False) -> NoReturn:
        """Refused: the program polls an extended queue.

        Raises:
            RuntimeError: Always.
        """
        msg = "the program polls an ExtendedCompletionQueue: use post_send, post_recv and poll"
        raise RuntimeError(msg)

    def poll(self, n: int = 16) -> list[WorkCompletion]:
        """Up to `n` completions, oldest first; empty if there is none (`ibv_start_poll`).

        Returns:
            Objects of the class `ExtendedCompletion`.

        Raises:
            ValueError, RdmaOSError: As `CompletionQueue.poll`.
        """
        return super().poll(n)

    def _poll_adapter(self, n: int, *, counted: bool = False) -> int:
        if self._scratch is None or len(self._scratch) < n:
            self._scratch = ffi.new("struct ibv_wc[]", n)
            self._extras = ffi.new("struct aio_wc_extra[]", n)
        arrived = lib.aio_poll_cq_ex(self._handle, n, int(self.fields), self._scratch, self._extras)
        if arrived < 0:
            raise os_error(-arrived, "ibv_start_poll")
        records = bytes(ffi.buffer(self._scratch, arrived * WC_STRUCT.size))
        try:
            for place, record in enumerate(WC_STRUCT.iter_unpack(records)):
                self._extra = self._extras[place]
                route(record, self.table, self)
        finally:
            self._extra = None
        return 0  # all are in the queue

    def _completion(self, record: WCRecord, wr_id: int | None) -> WorkCompletion:
        completion = ExtendedCompletion.from_record(record, wr_id)
        extra = self._extra
        if extra is None or not completion.ok:  # a request that the adapter never got has none
            return completion

        def only(field: WCFields, value: int) -> int | None:
            return value if self.fields & field else None

        return replace(
            completion,
            timestamp=only(WCFields.COMPLETION_TIMESTAMP, extra.timestamp),
            wallclock_ns=only(WCFields.COMPLETION_TIMESTAMP_WALLCLOCK, extra.wallclock_ns),
            cvlan=only(WCFields.CVLAN, extra.cvlan),
            flow_tag=only(WCFields.FLOW_TAG, extra.flow_tag),
        )
