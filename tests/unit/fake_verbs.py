"""A completion channel and its queues without a device, for the drain in `_ffi/glue.c`.

The drain is the compiled one, and so are `ibv_get_cq_event` and `ibv_ack_cq_events`.  Below them
stands what an adapter's library brings: the functions that poll a queue and arm it, which are this
file's.  An adapter completes whenever it likes.  Here it does so where the test says: at each call
of the drain there is a moment before it and a moment after it, and `Adapter.moment` is called in
each of them.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable
from typing import Any

from aiordma._ffi import ffi, lib

__all__ = ["AGAIN", "BATCH", "LOOK", "Adapter", "Queue"]

BATCH = 256  # completions that a drain may take at once
#: Bits of what `aio_drain` returns.
LOOK, AGAIN = 1 << 30, 1 << 29

_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_ARM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_CALL = ctypes.CFUNCTYPE(None)
# struct ibv_context: the device, and a table of functions.
_POLL_CQ, _REQ_NOTIFY_CQ = 1 + 11, 1 + 12
# In front of it libibverbs has a larger struct, with a pointer to tables of its own: of these a
# channel needs one function, `cq_event`, which has nothing to do.
_BEFORE, _WORDS, _PRIVATE = 128, 64, 512
_SEGMENTS = 64


class Queue:
    """One completion queue.

    Attributes:
        own: Its `struct aio_cq`.
        waiting: Ids of requests that have completed and were not polled.
        armed: None, or whether it was armed for solicited completions only.
        events: How many it has raised.
        polls: How often it was polled.
    """

    def __init__(self, adapter: Adapter, token: int, *, eager: bool, solicited: bool) -> None:
        self.waiting: list[tuple[int, bool]] = []
        self.armed: bool | None = solicited
        self.events = self.polls = 0
        self._adapter = adapter
        self.own = ffi.new("struct aio_cq *")
        self.own.token = token
        self.own.managed = 1
        self.own.eager, self.own.solicited = int(eager), int(solicited)
        self.cq = ffi.new("struct ibv_cq *")
        self.cq.context = adapter.context
        self.cq.cq_context = self.own

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self.cq))

    @property
    def acknowledged(self) -> int:
        """Events that were acknowledged: what `ibv_destroy_cq` waits for."""
        return int(self.cq.comp_events_completed)

    def complete(self, wr_id: int, *, solicited: bool = True) -> None:
        """A request completes."""
        self.waiting.append((wr_id, solicited))
        if self.armed is False or (self.armed and solicited):
            self.armed = None
            self.events += 1
            os.write(self._adapter.write_fd, self.address.to_bytes(8, "little"))


class Adapter:
    """A channel, its drain and its queues; use `with`.

    Attributes:
        moment: Called with a name ("before poll", "after arm", ...) and the queue.
        got: Ids of the completions that the drain has brought, with the token of their queue.
    """

    def __init__(self, moment: Callable[[str, Queue], None] = lambda name, queue: None) -> None:
        self.moment = moment
        self.got: list[tuple[int, int]] = []
        self.queues: dict[int, Queue] = {}
        self._wrong: BaseException | None = None
        self._calls = [_POLL(self._poll), _ARM(self._arm), _CALL(lambda: None)]
        poll, arm, nothing = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._calls)
        self._private = (ctypes.c_uint64 * _PRIVATE)(*[nothing] * _PRIVATE)
        tables = [ctypes.addressof(self._private)] * _BEFORE
        self._memory = (ctypes.c_uint64 * (_BEFORE + _WORDS))(*tables)
        self._memory[_BEFORE + _POLL_CQ], self._memory[_BEFORE + _REQ_NOTIFY_CQ] = poll, arm
        start = ctypes.addressof(self._memory) + _BEFORE * 8
        self.context = ffi.cast("struct ibv_context *", start)
        self._read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK)
        self._channel = ffi.new("struct ibv_comp_channel *")
        self._channel.fd = self._read_fd
        self.wcs = ffi.new("struct ibv_wc[]", BATCH)
        self._segments = ffi.new("struct aio_segment[]", _SEGMENTS)
        self.drain = ffi.new("struct aio_drain *")
        self.drain.channel = self._channel
        self.drain.segments, self.drain.max_segments = self._segments, _SEGMENTS

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._read_fd)
        os.close(self.write_fd)

    def queue(self, *, eager: bool = False, solicited: bool = False) -> Queue:
        """A queue that is armed."""
        queue = Queue(self, len(self.queues) + 1, eager=eager, solicited=solicited)
        self.queues[queue.address] = queue
        return queue

    @property
    def readable(self) -> bool:
        """Whether the loop would be woken."""
        return bool(select.select([self._read_fd], [], [], 0)[0])

    def run(self, cap: int = BATCH) -> int:
        """One call of the drain; what it returned."""
        took = int(lib.aio_drain(self.drain, self.wcs, cap))
        self._note(took)
        return took

    def serve(self, cap: int = BATCH, rounds: int = 1000) -> None:
        """Do what an event loop does, until it would sleep."""
        took = 0
        for _ in range(rounds):
            if took & AGAIN:
                self.drain.again = 1
            elif not (self.readable or self.drain.more):
                return
            took = self.run(cap)
        raise AssertionError("the drain does not come to an end")

    def _note(self, took: int) -> None:
        if self._wrong is not None:
            raise self._wrong
        assert not self.drain.error, os.strerror(self.drain.error)
        position = 0
        for i in range(self.drain.n_segments):
            token, count = self._segments[i].token, self._segments[i].count
            for j in range(max(count, 0)):
                self.got.append((token, self.wcs[position + j].wr_id))
            position += max(count, 0)
        assert position == took & 0xFFFF

    # What the adapter's library does

    def _at(self, name: str, queue: Queue) -> None:
        try:
            self.moment(name, queue)
        except BaseException as exc:  # C has no way to pass it on
            self._wrong = self._wrong or exc

    def _poll(self, address: int, room: int, wcs: int) -> int:
        queue = self.queues[address]
        self._at("before poll", queue)
        queue.polls += 1
        taken, queue.waiting = queue.waiting[:room], queue.waiting[room:]
        out: Any = ffi.cast("struct ibv_wc *", wcs)
        for i, (wr_id, _) in enumerate(taken):
            out[i].wr_id, out[i].status = wr_id, 0
        self._at("after poll", queue)
        return len(taken)

    def _arm(self, address: int, solicited_only: int) -> int:
        queue = self.queues[address]
        self._at("before arm", queue)
        queue.armed = bool(solicited_only)
        self._at("after arm", queue)
        return 0
