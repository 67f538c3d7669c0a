"""Slots for datagrams: who has which, and what stays pinned how long."""

from __future__ import annotations

from typing import Any

import pytest

from aiordma._core import SUB_RECV
from aiordma._ffi import ffi, lib, load_error
from aiordma.datagram.slots import RecvSlots, SendSlots

pytestmark = pytest.mark.skipif(load_error() is not None, reason="rdma-core is not installed")

BASE = 0xA1 << 56


class FakeRegion:
    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))
        self.addr = 0x10000
        self.lkey = 7


class FakeHandle:
    users = 0

    def _require(self) -> Any:
        return ffi.NULL

    def _retain(self) -> None:
        self.users += 1

    def _let_go(self) -> None:
        self.users -= 1
        assert self.users >= 0


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What reached the adapter."""
    seen: list[tuple[int, ...]] = []

    def send(_: Any, wr: Any, bad: Any) -> int:
        sge = wr.sg_list
        ud = wr.wr.ud
        seen.append((wr.wr_id, sge.addr, sge.length, sge.lkey, ud.remote_qpn, ud.remote_qkey))
        return 0

    def recv(_: Any, base: int, addr: int, size: int, lkey: int, numbers: Any, count: int) -> int:
        seen.append((base, addr, size, lkey, *numbers[0:count]))
        return 0

    monkeypatch.setitem(lib.__dict__, "ibv_post_send", send)
    monkeypatch.setitem(lib.__dict__, "aio_post_recv_slots", recv)
    return seen


def test_sending(posted: list[tuple[int, ...]]) -> None:
    region: Any = FakeRegion(30)
    handle = FakeHandle()
    slots = SendSlots(region, 3, 10)
    ah: Any = handle
    for n in range(3):
        assert not slots.full
        assert slots.post(None, BASE, b"%d" % n * (n + 1), ah, 17, 5) == 0
    assert slots.full
    assert len(slots) == handle.users == 3
    numbers = [(wr_id - BASE) >> 24 for wr_id, *_ in posted]
    assert sorted(numbers) == [0, 1, 2]
    for n, (slot, (_, addr, length, *rest)) in enumerate(zip(numbers, posted, strict=True)):
        assert (addr, length, rest) == (0x10000 + 10 * slot, n + 1, [7, 17, 5])
        assert bytes(region.view[10 * slot : 10 * slot + n + 1]) == b"%d" % n * (n + 1)
    slots.done(numbers[1])
    assert (len(slots), handle.users, slots.full) == (2, 2, False)
    slots.all_done()
    assert (len(slots), handle.users) == (0, 0)
    for _ in range(3):
        slots.post(None, BASE, b"", ah, 17, 5)
    assert slots.pinned() == [ah] * 3
    assert handle.users == 3, "whoever took them lets go"


def test_receiving(posted: list[tuple[int, ...]]) -> None:
    region: Any = FakeRegion(40)
    slots = RecvSlots(region, 4, 10)
    slots.post(None, BASE, range(4))
    assert posted == [(BASE + (SUB_RECV << 24), 0x10000, 10, 7, 0, 1, 2, 3)]
    assert len(slots) == 4
    region.view[20:25] = b"hello"
    slots.filled(2)
    slots.filled(0)
    assert bytes(slots.view(2, 5)) == b"hello"
    assert len(slots) == 2
    slots.keep((0,))
    # After a reset: what the adapter had and what was kept, but not what the program has.
    assert sorted(slots.take_all()) == [0, 1, 3]
    assert slots.take_all() == []
    assert len(slots) == 0
