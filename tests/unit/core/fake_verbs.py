"""A completion channel and its queues without a device, for the drain in `_core/drain.c`.

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

from aiordma._core import Drain, QueueState
from aiordma._ffi import ffi
from aiordma.verbs.enums import WCOpcode

__all__ = ["BATCH", "Adapter", "Queue"]

BATCH = 256  # completions that a drain may take at once

_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_ARM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_CALL = ctypes.CFUNCTYPE(None)
# struct ibv_context: the device, and a table of functions.
_POLL_CQ, _REQ_NOTIFY_CQ = 1 + 11, 1 + 12
# In front of it libibverbs has a larger struct, with a pointer to tables of its own: of these a
# channel needs one function, `cq_event`, which has nothing to do.
_BEFORE, _WORDS, _PRIVATE = 128, 64, 512
_NOTHING = bytes(ffi.sizeof("struct ibv_wc"))
_RECEIVED = int(WCOpcode.RECV)


class Queue:
    """One completion queue.

    Attributes:
        own: What the drain knows of it.
        waiting: Ids of requests that have completed and were not polled, lengths, statuses.
        armed: None, or whether it was armed for solicited completions only.
        events: How many it has raised.
        polls: How often it was polled.
        broken: It cannot be polled.
    """

    def __init__(
        self, adapter: Adapter, token: int, *, late: bool, solicited: bool, managed: bool
    ) -> None:
        self.waiting: list[tuple[int, int, int]] = []
        self.armed: bool | None = solicited
        self.events = self.polls = 0
        self.broken = False
        self._adapter = adapter
        self.own = QueueState(token)
        if managed:
            self.own.manage(solicited)
        self.own.want_arm_late(late)
        self.cq = ffi.new("struct ibv_cq *")
        self.cq.context = adapter.context
        self.cq.cq_context = ffi.cast("void *", self.own.address)

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self.cq))

    @property
    def acknowledged(self) -> int:
        """Events that were acknowledged: what `ibv_destroy_cq` waits for."""
        return int(self.cq.comp_events_completed)

    def retire(self) -> None:
        """It is going to be destroyed."""
        self.own.retire(self.address)

    def complete(
        self, wr_id: int, *, solicited: bool = True, length: int = 0, status: int = 0
    ) -> None:
        """A request completes."""
        self.waiting.append((wr_id, length, status))
        if self.armed is False or (self.armed and solicited):
            self.armed = None
            self.events += 1
            os.write(self._adapter.write_fd, self.address.to_bytes(8, "little"))


class Adapter:
    """A channel, its drain and its queues; use `with`.

    Args:
        moment: Called with a name ("before poll", "after arm", ...) and the queue.
        most: Completions that a drain takes at most.

    Attributes:
        read_fd: Readable while there is an event.
        got: Ids of the completions that the drain has brought, with the token of their queue.
        told: Tokens of the queues that the program polls, for each event of theirs.
        more: There is more, which raises no event.
    """

    def __init__(
        self,
        moment: Callable[[str, Queue], None] = lambda name, queue: None,
        most: int = BATCH,
    ) -> None:
        self.moment = moment
        self.got: list[tuple[int, int]] = []
        self.told: list[int] = []
        self.more = False
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
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK)
        self._channel = ffi.new("struct ibv_comp_channel *")
        self._channel.fd = self.read_fd
        self.drain = Drain(int(ffi.cast("uintptr_t", self._channel)), most)

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)

    def queue(self, *, late: bool = False, solicited: bool = False, managed: bool = True) -> Queue:
        """A queue that is armed."""
        queue = Queue(self, len(self.queues) + 1, late=late, solicited=solicited, managed=managed)
        self.queues[queue.address] = queue
        return queue

    @property
    def readable(self) -> bool:
        """Whether the loop would be woken."""
        return bool(select.select([self.read_fd], [], [], 0)[0])

    def run(self) -> None:
        """One call of the drain."""
        self.more = False
        if self.drain.drain():
            self._check()
        else:
            self.note()

    def serve(self, rounds: int = 1000) -> None:
        """Do what an event loop does, until it would sleep."""
        for _ in range(rounds):
            if not (self.readable or self.more):
                return
            self.run()
        raise AssertionError("the drain does not come to an end")

    def _check(self) -> None:
        if self._wrong is not None:
            raise self._wrong

    def note(self) -> list[Any]:
        """What the last drain has left for Python."""
        self._check()
        segments, self.more, error, call = self.drain.result()
        assert not error, f"{call}: {os.strerror(error)}"
        for token, records in segments:
            if records is None:
                self.told.append(token)
            else:
                self.got += [(token, record[0]) for record in records]
        return segments

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
        if queue.broken:
            return -1
        taken, queue.waiting = queue.waiting[:room], queue.waiting[room:]
        out: Any = ffi.cast("struct ibv_wc *", wcs)
        for i, (wr_id, length, status) in enumerate(taken):
            ffi.memmove(out + i, _NOTHING, len(_NOTHING))
            out[i].wr_id, out[i].opcode, out[i].byte_len = wr_id, _RECEIVED, length
            out[i].status = status
        self._at("after poll", queue)
        return len(taken)

    def _arm(self, address: int, solicited_only: int) -> int:
        queue = self.queues[address]
        self._at("before arm", queue)
        queue.armed = bool(solicited_only)
        self._at("after arm", queue)
        return 0
