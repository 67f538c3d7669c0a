"""Prepared posts: a list of requests that is built once and posted many times.

Theory of operation
    jVerbs calls this a stateful verb method.  An ordinary post checks its requests, translates them
    into C structures and notes each; here this is done once.  An execution is one C call
    (`aio_execute` in _ffi/posting.c) and the accounting around it, and neither leaves an object.

    Each request of the list has one entry in the slot table for the life of the prepared post, and
    stands in the queue's order once for each execution that is under way.  The
    sub-index of a completion's id names its execution: 16 bits of the number of the
    execution.  So the accounting stays exact although an unsignaled request may fail in the middle
    of many equal ones, and the caller's numbers may be changed between two executions.

    The memory is pinned once, until the prepared post is freed and its last execution has
    completed, or the queue pair is gone.  A region that a patch has replaced is pinned until the
    executions from before the patch have completed.

    Whether a request is signaled decides which requests end with it, and one entry stands for all
    of its executions: so SIGNALED can change only while none is under way.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from aiordma._ffi import ffi, lib
from aiordma.arguments import fitting
from aiordma.errors import ResourceClosedError, busy_error
from aiordma.loop.slots import sub_index
from aiordma.loop.uncopied import Uncopied
from aiordma.verbs.enums import SendFlags
from aiordma.verbs.mr import SGE, MemoryRegion, check_index, place_of
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.work_queue import Posted, WorkQueue
from aiordma.verbs.wr import (
    ATOMICS,
    WITH_IMM,
    WITH_REMOTE,
    Built,
    Planned,
    RecvWR,
    SendWR,
)
from aiordma.verbs.wr_check import check_atomic, check_inline

__all__ = ["PreparedPost"]

_NUMBERS = 1 << 16  # executions under way that have ids of their own


class _Entry(Posted):
    """One request of a prepared post: in the queue once for each execution under way."""

    __slots__ = ("leaving", "position", "post", "retired")

    def __init__(
        self, queue: WorkQueue, planned: Planned, post: PreparedPost, position: int
    ) -> None:
        self.post = post
        self.position = position
        self.retired = 0  # executions that have left the queue, modulo 2**32 as in C
        # Regions that were replaced, and the executions that have to leave the queue before them.
        self.leaving: list[tuple[int, Resource]] = []
        super().__init__(queue, planned)

    def retire(self) -> None:
        self.retired = (self.retired + 1) & 0xFFFFFFFF
        if self.leaving:
            self.leave()
        if self.post._freed:
            self.post._settle()

    def swap(self, piece: int, region: Resource) -> None:
        """Have another region pinned for a piece, and the one before it until it is unused."""
        region._retain()
        regions = list(self.regions)
        self.leaving.append((int(self.post._c.executions), regions[piece]))
        regions[piece] = region
        self.regions = tuple(regions)
        self.leave()

    def leave(self) -> None:
        """Let go of replaced regions that no execution uses any more."""
        while self.leaving and (self.retired - self.leaving[0][0]) & 0xFFFFFFFF < 1 << 31:
            self.leaving.pop(0)[1]._let_go()

    def release_regions(self) -> None:
        leaving, self.leaving = self.leaving, []
        for _, region in leaving:
            region._let_go()
        super().release_regions()

    def count(self, wr_id: int) -> bool:
        if self.muted or self.silent or self.retired & 0xFFFF != sub_index(wr_id):
            return False
        return self.queue.end_with(self)

    def is_stale(self, record: WCRecord) -> bool:
        ahead = (sub_index(record[0]) - self.retired) % _NUMBERS
        under_way = (int(self.post._c.executions) - self.retired) & 0xFFFFFFFF
        return ahead >= under_way

    def is_next(self, record: WCRecord) -> bool:
        return self.retired % _NUMBERS == sub_index(record[0])

    def number(self, record: WCRecord) -> int:
        return self.post._number(sub_index(record[0]), self.position)

    def number_ahead(self, occurrence: int) -> int:
        return self.post._number(self.retired + occurrence, self.position)


class PreparedPost(Uncopied):
    """Requests that are posted again and again: the stateful verb method of jVerbs.

    Made by `QueuePair.prepare_send` and `QueuePair.prepare_recv`.  Each `execute()` posts the list
    once more with one doorbell, and its completions come out of the CQ with the caller's numbers.
    Between two executions `patch` changes numbers, pieces and remote addresses in place.  A `with`
    block frees it at the end.

    The adapter reads the buffers when it executes the requests: as with every post, the memory
    belongs to the adapter until the completion, except for INLINE requests.
    """

    __slots__ = (
        "_c", "_count", "_entries", "_freed", "_keep", "_pinned", "_queue", "_requests",
        "_signaled", "_success", "_tail", "_verb", "_wrs",
    )  # fmt: skip

    def __init__(self, queue: WorkQueue, requests: Sequence[SendWR | RecvWR], built: Built) -> None:
        count = len(requests)
        if not 0 < count <= queue.depth:
            msg = f"a prepared list needs 1 to {queue.depth} requests, the places of the queue"
            raise ValueError(msg)
        rows = 1 << (queue.depth // count).bit_length()
        if rows > _NUMBERS:
            msg = f"a queue of {queue.depth} places is too deep for {count} prepared requests"
            raise ValueError(msg)
        first, plan = built.first, built.plan
        self._queue = queue
        self._verb = built.verb
        self._count = count
        self._requests = [replace(wr, sg_list=tuple(wr.sg_list)) for wr in requests]
        self._wrs = [first[i] for i in range(count)]
        self._signaled = any(planned.signaled for planned in plan)
        self._tail = queue.unsignaled_after(plan) if self._signaled else count
        self._pinned = _distinct(plan)
        self._success = True
        self._freed = False
        self._entries: list[_Entry] = []
        try:
            for position, planned in enumerate(plan):
                self._entries.append(_Entry(queue, planned, self, position))
        except BaseException:
            for entry in self._entries:
                entry.release()
            raise
        # Fields of a C struct keep nothing alive; `_keep` does.
        entries = ffi.new("uint64_t[]", [entry.wr_id for entry in self._entries])
        caller = ffi.new("uint64_t[]", [request.wr_id for request in requests])
        history = ffi.new("uint64_t[]", rows * count)
        self._keep = (*built.keep, entries, caller, history)
        self._c = ffi.new("struct aio_prepared *")
        self._c.qp = queue.qp._require()
        if isinstance(requests[0], SendWR):
            self._c.send = first
        else:
            self._c.recv = first
        self._c.entries, self._c.caller, self._c.history = entries, caller, history
        self._c.count, self._c.history_mask = count, rows - 1
        queue.prepared[self] = None

    def __len__(self) -> int:
        """Number of requests in the list."""
        return self._count

    @property
    def is_success(self) -> bool:
        """Whether the last `execute()` posted; True before the first.

        The completions, not this flag, report how the requests ended.
        """
        return self._success

    def execute(self) -> Self:
        """Post the list once more, with one doorbell; returns itself.

        Makes no C structure and keeps no Python object.  In the error state of the queue pair the
        requests complete as flushed, as with an ordinary post.

        Raises:
            RdmaOSError: The queue has not enough free places; nothing was posted (EAGAIN).
            ValueError: Unsignaled requests would fill the queue; nothing was posted.
            ResourceClosedError: The post was freed, or the queue pair or a region is closed.
            OSError: The post failed; the queue pair is in the error state.

        Man page: `ibv_post_send(3)`, `ibv_post_recv(3)`.
        """
        self._success = False
        if self._freed:
            msg = "the prepared post was freed"
            raise ResourceClosedError(msg)
        queue = self._queue
        queue.qp._require()
        for resource in self._pinned:
            resource._require()
        if queue.qp._in_error:
            numbers = ffi.unpack(self._c.caller, self._count)
            queue.cq._flush(queue.qp.num, numbers)
        else:
            unsignaled = self._tail if self._signaled else queue.unsignaled + self._tail
            queue.take(self._count, unsignaled)
            queue.enter_again(self._entries, unsignaled)
            code = lib.aio_execute(self._c)
            if code:
                raise queue.post_failed(self._verb, code)
        self._success = True
        return self

    def _number(self, execution: int, position: int) -> int:
        row = execution & self._c.history_mask
        return int(self._c.history[row * self._count + position])

    # Patching

    def patch(
        self,
        request: int = 0,
        *,
        wr_id: int | None = None,
        piece: int = 0,
        region: MemoryRegion | None = None,
        offset: int | None = None,
        length: int | None = None,
        send_flags: SendFlags | None = None,
        remote_addr: int | None = None,
        rkey: int | None = None,
        imm_data: int | None = None,
        compare_add: int | None = None,
        swap: int | None = None,
    ) -> Self:
        """Change a request in place, for the executions from now on; returns itself.

        Executions under way are not touched: the adapter has taken its own copy.

        Args:
            request: Its place in the list.
            wr_id: The number of its completion, 64 bits.
            piece: Which of its pieces `region`, `offset` and `length` are for.
            region: Another region for the piece, of the same protection domain, which then begins
                at its start unless `offset` is given.  The one before may be closed: it stays
                registered until the executions that use it have completed.
            offset: First byte of the piece, from the start of its region.
            length: Bytes of the piece.
            send_flags: Flags of a send request.  SIGNALED can change only while no execution is
                under way.
            remote_addr: Remote address of a one-sided request.
            rkey: Key of a one-sided request.
            imm_data: Immediate of a request that carries one.
            compare_add: Compare value, or the value to add, of an atomic request.
            swap: Value that a compare-and-swap stores.

        Raises:
            ValueError: A number is out of range, the piece is not inside its region, or this kind
                of request has no such field.
            TypeError: Not a region, or not flags.
            IndexError: There is no such request or piece.
            RdmaOSError: SIGNALED would change, and executions are under way (EBUSY).
            ResourceClosedError: The post was freed, or the region is closed.

        After an exception nothing has changed.
        """
        if self._freed:
            msg = "the prepared post was freed"
            raise ResourceClosedError(msg)
        check_index("request", request, self._count)
        wr, made = self._wrs[request], self._requests[request]
        # Everything is checked first, then everything is set.
        number = None if wr_id is None else fitting("wr_id", wr_id, 64)
        memory = None
        flags = made.send_flags if isinstance(made, SendWR) else SendFlags(0)
        planned: Planned | None = None
        if send_flags is not None:
            flags, planned = self._checked_flags(request, send_flags)
        if offset is not None or length is not None or region is not None:
            memory = self._checked_piece(wr, made, flags, piece, region, offset, length)
        elif planned is not None:
            self._check_sizes(wr, made, flags, [wr.sg_list[i].length for i in range(wr.num_sge)])
        targets: list[tuple[Any, str, int]] = []
        if not (remote_addr is rkey is imm_data is compare_add is swap is None):
            targets = _checked_targets(
                wr, made, remote_addr=remote_addr, rkey=rkey, imm_data=imm_data,
                compare_add=compare_add, swap=swap,
            )  # fmt: skip
        if number is not None:
            self._c.caller[request] = number
        if planned is not None:
            self._set_flags(request, flags, planned)
        if region is not None:
            self._set_region(request, piece, region)
        if memory is not None:
            sge = wr.sg_list[piece]
            sge.addr, sge.length = memory
        for struct, name, value in targets:
            setattr(struct, name, value)
        return self

    def _checked_piece(
        self,
        wr: Any,
        made: SendWR | RecvWR,
        flags: SendFlags,
        piece: int,
        other: MemoryRegion | None,
        offset: int | None,
        length: int | None,
    ) -> tuple[int, int]:
        """Address and length that the piece is to have."""
        check_index("piece", piece, len(made.sg_list))
        region, sge = made.sg_list[piece].mr, wr.sg_list[piece]
        _, addr, size = place_of(sge, region, other, offset, length, self._queue.qp.pd)
        sizes = [wr.sg_list[i].length for i in range(wr.num_sge)]
        sizes[piece] = size
        self._check_sizes(wr, made, flags, sizes)
        return addr, size

    def _check_sizes(
        self, wr: Any, made: SendWR | RecvWR, flags: SendFlags, sizes: list[int]
    ) -> None:
        if isinstance(made, SendWR):
            if made.opcode in ATOMICS:
                check_atomic(sizes, 0)
            if flags != made.send_flags:
                made = replace(made, send_flags=flags)
            qp = self._queue.qp
            (qp._rules or qp._choose_rules()).check_sizes(made, sizes)

    def _checked_flags(self, request: int, flags: SendFlags) -> tuple[SendFlags, Planned]:
        """The flags, and the note of the queue about a request that has them."""
        made, entry, qp = self._requests[request], self._entries[request], self._queue.qp
        if not isinstance(made, SendWR):
            msg = "a receive has no send_flags"
            raise ValueError(msg)
        flags = SendFlags(fitting("send_flags", flags, 32))
        changed = replace(made, send_flags=flags)
        check_inline(changed)
        planned = (qp._rules or qp._choose_rules()).plan(changed)
        differs = (planned.signaled, planned.silent) != (entry.signaled, entry.silent)
        if differs and any(one.retired != self._c.executions for one in self._entries):
            msg = "SIGNALED cannot change while executions are under way: await their completions"
            raise busy_error(msg)
        return flags, planned

    def _set_flags(self, request: int, flags: SendFlags, planned: Planned) -> None:
        entry, made = self._entries[request], self._requests[request]
        assert isinstance(made, SendWR)
        entry.signaled, entry.silent = planned.signaled, planned.silent
        self._requests[request] = replace(made, send_flags=flags)
        self._wrs[request].send_flags = int(flags) | SendFlags.SIGNALED * planned.signaled
        self._signaled = any(one.signaled for one in self._entries)
        plan = [Planned(one.operation, (), one.signaled) for one in self._entries]
        self._tail = self._queue.unsignaled_after(plan) if self._signaled else self._count

    def _set_region(self, request: int, piece: int, region: MemoryRegion) -> None:
        made = self._requests[request]
        self._entries[request].swap(piece, region)
        pieces = list(made.sg_list)
        pieces[piece] = SGE(region)
        self._requests[request] = replace(made, sg_list=tuple(pieces))
        self._wrs[request].sg_list[piece].lkey = region.lkey
        self._pinned = _distinct(self._entries)

    # Life

    def free(self) -> None:
        """Free the prepared post.  Idempotent.

        Executions under way go on, and their memory stays pinned until they have completed or the
        queue pair is gone.  Closing the queue pair frees all its prepared posts.
        """
        if self._freed:
            return
        self._freed = True
        self._queue.prepared.pop(self, None)
        self._settle()

    def _settle(self) -> None:
        """Release the entries and the memory, once freed and idle."""
        if not self._freed or any(one.retired != self._c.executions for one in self._entries):
            return
        entries, self._entries = self._entries, []
        for entry in entries:
            entry.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.free()

    def __repr__(self) -> str:
        kind = "recv" if isinstance(self._requests[0], RecvWR) else "send"
        state = " freed" if self._freed else ""
        return (
            f"<PreparedPost {kind} requests={self._count} executions={self._c.executions}{state}>"
        )


def _distinct(requests: Sequence[Planned | Posted]) -> tuple[Resource, ...]:
    """The regions of some requests, each once."""
    return tuple(dict.fromkeys(region for each in requests for region in each.regions))


def _checked_targets(
    wr: Any, made: SendWR | RecvWR, **values: int | None
) -> list[tuple[Any, str, int]]:
    """C struct, field and value for each value that is not None."""
    homes: dict[str, Any] = {}
    opcode = made.opcode if isinstance(made, SendWR) else None
    if opcode in ATOMICS:
        atomic = wr.wr.atomic
        homes = dict.fromkeys(("remote_addr", "rkey", "compare_add", "swap"), atomic)
    elif opcode in WITH_REMOTE:
        homes = dict.fromkeys(("remote_addr", "rkey"), wr.wr.rdma)
    if opcode in WITH_IMM:
        homes["imm_data"] = wr
    targets = []
    for name, value in values.items():
        if value is None:
            continue
        if name not in homes:
            msg = f"a {opcode.name if opcode is not None else 'receive'} has no {name}"
            raise ValueError(msg)
        number = fitting(name, value, 32 if name in ("rkey", "imm_data") else 64)
        if name == "remote_addr" and opcode in ATOMICS:
            check_atomic([8], number)
        targets.append((homes[name], name, socket.htonl(number) if name == "imm_data" else number))
    return targets
