"""Lane: the state of a connection that C and Python share, so that plain messages need no Python.

Theory of operation
    Sender, Receiver and Window keep their numbers here, in a C struct, and hold the whole protocol.
    `_ffi/message.c` does the plain cases on the same numbers: it takes the completions of data
    messages and of sends, posts receives again, and sends when there is room.  When a case is not
    plain it changes nothing, and Python goes on from there.

    What is plain is said by two words.  `blocked` keeps C from sending: somebody waits for room,
    whose turn comes first, or the end has begun.  `want` has it tell Python of arrivals, because a
    task waits for one, or of every send that has completed.

    A lane without an adapter (`bind` was not called) never gets a completion; tests use such ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma.endpoint.config import ConnectionConfig
from aiordma.memory.arena import Arena

__all__ = ["WANT_ARRIVAL", "WANT_SENT", "FreeSlots", "Lane"]

WANT_ARRIVAL = 1
WANT_SENT = 2
_CHAIN = 8  # receives that are posted together, at most


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

    __slots__ = ("_arrivals", "_operations", "c", "free")

    def __init__(self, config: ConnectionConfig, receives: int, sends: int) -> None:
        c = self.c = ffi.new("struct aio_lane *")
        slots = ffi.new("uint16_t[]", config.send_depth)
        self.free = FreeSlots(c, slots)
        arrivals = _power_of_two(config.receives)
        self._arrivals = ffi.new("struct aio_arrival[]", arrivals)
        chain = min(_CHAIN, max(1, config.recv_depth // 8))
        # A pool's slots come and go, so that Python posts, and sees to all completions of sends.
        # Until the peer's depth is known nothing may be sent; see also `Sender._plain`.
        lib.aio_lane_init(
            c, slots, sends, config.send_depth, self._arrivals, arrivals, receives,
            config.control_depth, chain, config.raw, config.shared_slots is not None,
        )  # fmt: skip

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
            self.c, qp, flags, inline_size, send.addr, send.slot_size, send.lkey,
            recv.addr, recv.slot_size, recv.lkey,
        )  # fmt: skip

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
