"""Lane: the state of a connection that C and Python share, so that plain messages need no Python.

Theory of operation
    Sender, Receiver and Window keep their numbers here, in a C struct, and hold the whole protocol.
    `_ffi/message.c` does the plain cases on the same numbers: it takes the completions of data
    messages and of sends, posts receives again, and sends when there is room.  When a case is not
    plain it changes nothing, and Python goes on from there.

    What is plain is said by two words.  `blocked` keeps C from sending: somebody waits for room,
    whose turn comes first, or the end has begun.  `want` has it tell Python of arrivals, because a
    task waits for one, or of every send that has completed.

    Slots of a pool come and go, which Python sees to (`memory.elastic`); C is told which there are
    by `fit`.  It gives a slot back by itself as long as none is to leave: nobody of the pool
    waits for slots, or the connection has only those that it is guaranteed.

    A lane without an adapter (`bind` was not called) never gets a completion; tests use such ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.plan import plan_of
from aiordma.memory.arena import Arena
from aiordma.memory.elastic import ElasticArena

__all__ = ["WANT_ARRIVAL", "WANT_SENT", "FreeSlots", "Lane"]

WANT_ARRIVAL = 1
WANT_SENT = 2


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 1


class FreeSlots:
    """Send slots for data that are free: a stack in C."""

    __slots__ = ("_c", "_slots")

    def __init__(self, c: Any, slots: Any) -> None:
        self._c = c
        self._slots = slots

    def __len__(self) -> int:
        return int(self._c.n_free)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._slots[0 : self._c.n_free]))

    def __contains__(self, slot: object) -> bool:
        return any(slot == free for free in self)

    def pop(self) -> int:
        """Take one."""
        if not self._c.n_free:
            msg = "no slot is free"
            raise IndexError(msg)
        self._c.n_free -= 1
        return int(self._slots[self._c.n_free])

    def append(self, slot: int) -> None:
        """Give one back."""
        self._slots[self._c.n_free] = slot
        self._c.n_free += 1

    def extend(self, slots: Iterable[int]) -> None:
        """Give some back."""
        for slot in slots:
            self.append(slot)

    def remove(self, slot: int) -> None:
        """Take that one."""
        rest = [free for free in self if free != slot]
        self._c.n_free = 0
        self.extend(rest)


class Lane:
    """What C and Python share for one connection.

    Args:
        config: Sizes.
        receives: Receive slots that there are now.
        sends: Send slots for data that there are now.

    Attributes:
        c: The `struct aio_lane`.
        free: Send slots for data that are free.
    """

    __slots__ = ("_arrivals", "_elastic", "_keys", "_operations", "c", "free")

    def __init__(self, config: ConnectionConfig, receives: int, sends: int) -> None:
        c = self.c = ffi.new("struct aio_lane *")
        slots = ffi.new("uint16_t[]", config.send_depth)
        self.free = FreeSlots(c, slots)
        plan = plan_of(config)
        self._arrivals = ffi.new("struct aio_arrival[]", plan.arrivals)
        # Both with slots of a pool only; the arenas keep alive what `crowded` is, too.
        self._elastic: tuple[ElasticArena, ...] = ()
        self._keys: tuple[Any, ...] = ()
        lib.aio_lane_init(
            c, slots, sends, config.send_depth, self._arrivals, plan.arrivals, receives,
            plan.control, config.raw,
        )  # fmt: skip

    def size(self, window: int) -> None:
        """Fit what follows from the data messages for which there are receive slots."""
        lib.aio_lane_size(self.c, window)

    def bind(self, qp: Any, send: Arena, recv: Arena, flags: int, inline_size: int) -> None:
        """Name the adapter's side.

        Args:
            qp: The `struct ibv_qp *`.
            send: Where the send slots are.
            recv: Where the receive slots are.
            flags: Of sends.
            inline_size: Bytes that go into a work request itself.
        """
        lib.aio_lane_bind(
            self.c, qp, flags, inline_size, send.addr, send.slot_size, send.lkey, send.count,
            recv.addr, recv.slot_size, recv.lkey, recv.count,
        )  # fmt: skip
        if isinstance(send, ElasticArena) and isinstance(recv, ElasticArena):
            self._elastic = send, recv
            self.c.crowded = recv.crowded
            self.c.send.step, self.c.recv.step = send.step, recv.step
            self.fit()

    def fit(self) -> None:
        """Tell C which slots of a pool there are: some have come, or gone."""
        if not self._elastic:
            return
        for slots, arena in zip((self.c.send, self.c.recv), self._elastic, strict=True):
            keys = arena.keys
            slots.more, slots.leaving, slots.full = any(keys), arena.some_leave, arena.full
            if slots.more:
                if not slots.keys:
                    self._keys += (ffi.new("uint32_t[]", len(keys)),)
                    slots.keys = self._keys[-1]
                slots.keys[0 : len(keys)] = keys

    def allow_operations(self, depth: int) -> None:
        """Make room for so many operations of the program to be under way."""
        c = self.c
        ring = _power_of_two(depth)
        free = ffi.new("uint16_t[]", list(range(depth)))
        self._operations = free, ffi.new("uint16_t[]", ring)
        c.done_mask = ring - 1
        c.operations_free, c.operations_done = self._operations
        c.n_operations = c.n_operations_free = depth

    @property
    def under_way(self) -> int:
        """What the adapter has: sends, receives, operations."""
        c = self.c
        return int(c.receives + c.sent - c.completed + c.operating)
