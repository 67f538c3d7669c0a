"""Slots of registered memory to send datagrams from and to receive them in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiordma._core import SUB_RECV, SUB_SHIFT
from aiordma._ffi import ffi, lib
from aiordma.verbs.ah import AddressHandle
from aiordma.verbs.enums import Opcode, SendFlags
from aiordma.verbs.mr import MemoryRegion

# The sub-index of a wr_id: SUB_RECV and n for receive slot n, n alone for send slot n.
__all__ = ["RecvSlots", "SendSlots"]


class SendSlots:
    """Slots to send from: a datagram is copied into a slot, which it has until its completion."""

    __slots__ = ("_bad", "_free", "_pins", "_sge", "_wr", "mr", "size")

    def __init__(self, mr: MemoryRegion, count: int, size: int) -> None:
        self.mr: MemoryRegion = mr
        self.size: int = size
        self._free = list(range(count))
        self._pins: dict[int, AddressHandle] = {}  # the adapter looks at a handle when it sends
        # The same request is filled in for each post: the adapter copies it then.
        self._sge = ffi.new("struct ibv_sge *")
        self._sge.lkey = mr.lkey
        self._wr = ffi.new("struct ibv_send_wr *")
        self._wr.sg_list = self._sge
        self._wr.num_sge = 1
        self._wr.opcode = int(Opcode.SEND)
        self._wr.send_flags = int(SendFlags.SIGNALED)
        self._bad = ffi.new("struct ibv_send_wr **")

    def __len__(self) -> int:
        """Number of datagrams that the adapter has."""
        return len(self._pins)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free

    def post(
        self, qp_handle: Any, base: int, data: Any, ah: AddressHandle, qpn: int, qkey: int
    ) -> int:
        """Copy a datagram into a free slot and post it; return the result of `ibv_post_send(3)`.

        The slot is taken in any case: the adapter may have queued a request that it refused.
        """
        ud = self._wr.wr.ud
        ud.ah = ah._require()
        ud.remote_qpn = qpn
        ud.remote_qkey = qkey
        slot = self._free.pop()
        length = len(data)
        start = slot * self.size
        self.mr.view[start : start + length] = data
        self._sge.addr = self.mr.addr + start
        self._sge.length = length
        self._wr.wr_id = base + (slot << SUB_SHIFT)
        ah._retain()
        self._pins[slot] = ah
        return int(lib.ibv_post_send(qp_handle, self._wr, self._bad))

    def done(self, slot: int) -> None:
        """Free a slot: its datagram has completed."""
        self._pins.pop(slot)._let_go()
        self._free.append(slot)

    def all_done(self) -> None:
        """Free all slots: the queue pair was reset."""
        for slot in list(self._pins):
            self.done(slot)

    def pinned(self) -> list[AddressHandle]:
        """Return the address handles that are in use; the caller releases them."""
        pins = list(self._pins.values())
        self._pins.clear()
        return pins


class RecvSlots:
    """Slots to receive in: each takes `size` bytes, header and datagram."""

    __slots__ = ("_back", "_lent", "_numbers", "count", "mr", "size")

    def __init__(self, mr: MemoryRegion, count: int, size: int) -> None:
        self.mr: MemoryRegion = mr
        self.count: int = count
        self.size: int = size
        self._numbers = ffi.new("uint16_t[]", count)
        self._lent: set[int] = set()
        self._back: list[int] = []

    def __len__(self) -> int:
        """Number of slots that are posted."""
        return len(self._lent)

    def post(self, qp_handle: Any, base: int, slots: Iterable[int]) -> int:
        """Post slots, in one chain; return the result of `ibv_post_recv(3)`."""
        count = 0
        for slot in slots:
            self._numbers[count] = slot
            self._lent.add(slot)
            count += 1
        return int(
            lib.aio_post_recv_slots(
                qp_handle, base + (SUB_RECV << SUB_SHIFT), self.mr.addr, self.size, self.mr.lkey,
                self._numbers, count,
            )
        )  # fmt: skip

    def filled(self, slot: int) -> None:
        """Note that a slot holds a datagram."""
        self._lent.discard(slot)

    def keep(self, slots: Iterable[int]) -> None:
        """Keep slots that cannot be posted now."""
        self._back += slots

    def take_all(self) -> list[int]:
        """Return all slots that hold no datagram; the queue pair was reset."""
        slots = [*self._lent, *self._back]
        self._lent.clear()
        self._back.clear()
        return slots

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first bytes of a slot: header and datagram."""
        start = slot * self.size
        return self.mr.view[start : start + length]
