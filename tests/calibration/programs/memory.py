"""Registration of memory, invalidation, and memory windows."""

from __future__ import annotations

import mmap
from typing import Any

from aiordma._ffi import ffi, lib
from tests.calibration.scene import (
    End,
    Memory,
    Path,
    Scene,
    access,
    direct,
    muted,
    note,
    pointer,
    program,
)


@program()
def rights_need_one_another(scene: Scene) -> None:
    """REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE."""
    memory = scene.bare()
    for rights in ("", "L", "R", "W", "LW", "A", "LA", "B", "LB"):
        if not (scene.iwarp and "A" in rights):
            scene.reg(memory, rights)


@program()
def rights_that_are_none(scene: Scene) -> None:
    """Undefined flags."""
    memory = scene.bare()
    start = ffi.cast("void *", memory.address)
    lib.ibv_reg_mr(scene.pd, start, 4096, 1 << 19)
    lib.ibv_reg_mr(scene.pd, start, 4096, lib.IBV_ACCESS_RELAXED_ORDERING | 1)


@program()
def memory_that_is_not_there(scene: Scene) -> None:
    """Memory that is not mapped, or may not be written."""
    lib.ibv_reg_mr(scene.pd, ffi.cast("void *", 4096), 4096, access("L"))
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    start = int(ffi.cast("uintptr_t", ffi.from_buffer(page)))
    lib.ibv_reg_mr(scene.pd, ffi.cast("void *", start), 4096, access("L"))
    lib.ibv_reg_mr(scene.pd, ffi.cast("void *", start), 4096, access("R"))


@program()
def lengths_of_regions(scene: Scene) -> None:
    """A region of no bytes, one that is longer than the memory, and one at an odd address."""
    memory = scene.bare(4096)
    scene.reg(memory, "L", 0)
    scene.reg(memory, "L", 1)
    scene.reg(Memory(memory.address + 3, 7), "L")
    lib.ibv_reg_mr(scene.pd, ffi.cast("void *", memory.address), 1 << 45, access("L"))


@program("roce")
def an_address_of_ones_own(scene: Scene) -> None:
    """ibv_reg_mr_iova() chooses the address by which the region is called."""
    first, _second = scene.pair()
    bare = scene.bare()
    start = ffi.cast("void *", bare.address)
    mr = lib.ibv_reg_mr_iova(scene.pd, start, bare.size, 0x100000, access("LWR"))
    if mr:
        first.memory.put(b"iova")
        scene.write(first.qp, 1, [first.memory.at(0, 4)], (0x100008, mr.rkey))
        scene.wait(first.cq)
        bare.show(8, 4)


@program("roce")
def addresses_from_zero(scene: Scene) -> None:
    """A region that is based on zero."""
    first, _second = scene.pair()
    with muted():
        memory = scene.bare()
    mr = scene.reg(memory, "LWRZ")
    if mr:
        first.memory.put(b"zero")
        scene.write(first.qp, 1, [first.memory.at(0, 4)], (8, mr.rkey))
        scene.wait(first.cq)
        memory.show(8, 4)


@program("roce")
def rights_that_change(scene: Scene) -> None:
    """ibv_rereg_mr() changes the rights of a region."""
    first, second = scene.pair()
    flags = 4  # IBV_REREG_MR_CHANGE_ACCESS
    direct.ibv_rereg_mr(pointer(second.memory.mr), flags, None, None, 0, access("L"))
    scene.write(first.qp, 1, [first.memory.at()], second.memory.to())
    scene.wait(first.cq)


@program("roce")
def a_message_that_invalidates_a_region(scene: Scene) -> None:
    """SEND_WITH_INV of a region of ibv_reg_mr(): only windows can be invalidated."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(
        first.qp, 2, [first.memory.at()], opcode=lib.IBV_WR_SEND_WITH_INV,
        key=second.memory.mr.rkey,
    )  # fmt: skip
    scene.wait(first.cq)
    scene.wait(second.cq)
    scene.state(second.qp)


@program("roce")
def a_message_that_invalidates_nothing(scene: Scene) -> None:
    """SEND_WITH_INV of a key that was never given out."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()], opcode=lib.IBV_WR_SEND_WITH_INV, key=0x7654321)
    scene.wait(first.cq)
    scene.wait(second.cq)
    scene.state(second.qp)


@program("roce")
def a_region_invalidated_here(scene: Scene) -> None:
    """LOCAL_INV of a region of ibv_reg_mr()."""
    first, _ = scene.pair()
    scene.send(first.qp, 1, [], opcode=lib.IBV_WR_LOCAL_INV, key=first.memory.mr.rkey)
    scene.wait(first.cq)
    scene.state(first.qp)


# ---- windows


def bindable(scene: Scene, end: End, rights: str = "LWRAB") -> Memory:
    with muted():
        return scene.memory(rights, pd=end.pd)


def bind_1(
    scene: Scene, end: End, mw: Any, memory: Memory, rights: str, offset: int = 0, length: int = 64
) -> int:
    """ibv_bind_mw(), for windows of type 1."""
    bind = ffi.new("struct ibv_mw_bind *")
    bind.wr_id, bind.send_flags = 70, lib.IBV_SEND_SIGNALED
    bind.bind_info.mr = memory.mr
    bind.bind_info.addr, bind.bind_info.length = memory.address + offset, length
    bind.bind_info.mw_access_flags = access(rights)
    return int(lib.ibv_bind_mw(end.qp, mw, bind))


def bind_2(
    scene: Scene, end: End, mw: Any, memory: Memory, rights: str, offset: int = 0, length: int = 64
) -> int:
    """A request to bind, for windows of type 2; returns the new key."""
    wr = scene.wr(71, [], opcode=lib.IBV_WR_BIND_MW)
    key = (mw.rkey & 0xFFFFFF00) | ((mw.rkey + 1) & 0xFF)
    wr.bind_mw.mw, wr.bind_mw.rkey = mw, key
    wr.bind_mw.bind_info.mr = memory.mr
    wr.bind_mw.bind_info.addr = memory.address + offset
    wr.bind_mw.bind_info.length = length
    wr.bind_mw.bind_info.mw_access_flags = access(rights)
    scene.post(end.qp, wr)
    return int(key)


@program()
def windows_that_there_are(scene: Scene) -> None:
    """Windows of type 1 and 2, and of a type that does not exist."""
    for kind in (1, 2, 3):
        mw = lib.ibv_alloc_mw(scene.pd, kind)
        if mw:
            lib.ibv_dealloc_mw(mw)


@program("roce")
def a_window_of_type_1(scene: Scene) -> None:
    """A window opens a part of a region, by its own key."""
    first, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 1)
    bind_1(scene, second, mw, memory, "WR", 16, 64)
    scene.wait(second.cq)
    first.memory.put(b"window")
    scene.write(first.qp, 1, [first.memory.at(0, 6)], (memory.address + 16, mw.rkey))
    scene.wait(first.cq)
    memory.show(16, 6)
    scene.read(first.qp, 2, [first.memory.at(100, 6)], (memory.address + 16, mw.rkey))
    scene.wait(first.cq)


@program("roce")
def a_window_closed_by_binding(scene: Scene) -> None:
    """A window that is bound to no bytes opens nothing, and its old key is dead."""
    first, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 1)
    bind_1(scene, second, mw, memory, "WR")
    scene.wait(second.cq)
    key = mw.rkey
    bind_1(scene, second, mw, memory, "WR", 0, 0)
    scene.wait(second.cq)
    note(f"another key {mw.rkey != key}")
    scene.write(first.qp, 1, [first.memory.at()], (memory.address, key))
    scene.wait(first.cq)


@program("roce")
def bounds_of_a_window(scene: Scene) -> None:
    """A write beyond the window, within its region, is refused."""
    first, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 1)
    bind_1(scene, second, mw, memory, "W", 0, 64)
    scene.wait(second.cq)
    scene.write(first.qp, 1, [first.memory.at()], (memory.address + 60, mw.rkey))
    scene.wait(first.cq)


@program("roce")
def rights_of_a_window(scene: Scene) -> None:
    """A window for reads cannot be written."""
    first, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 1)
    bind_1(scene, second, mw, memory, "R")
    scene.wait(second.cq)
    scene.write(first.qp, 1, [first.memory.at()], (memory.address, mw.rkey))
    scene.wait(first.cq)


@program("roce")
def a_window_in_a_region_without_the_right(scene: Scene) -> None:
    """A region needs MW_BIND, and LOCAL_WRITE if the window is to be written."""
    for rights in ("LWR", "RB"):
        _, second = scene.pair()
        memory = bindable(scene, second, rights)
        mw = lib.ibv_alloc_mw(second.pd, 1)
        bind_1(scene, second, mw, memory, "W")
        scene.rest(second.cq)
        scene.state(second.qp)


@program("roce")
def a_window_beyond_its_region(scene: Scene) -> None:
    """A window may not be larger than its region."""
    _, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 1)
    bind_1(scene, second, mw, memory, "W", 8000, 1000)
    scene.rest(second.cq)
    scene.state(second.qp)


@program("roce")
def a_region_with_a_window(scene: Scene) -> None:
    """A region with a window is not deregistered."""
    _, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 1)
    bind_1(scene, second, mw, memory, "W")
    scene.wait(second.cq)
    lib.ibv_dereg_mr(memory.mr)
    lib.ibv_dealloc_mw(mw)
    lib.ibv_dereg_mr(memory.mr)


@program("roce")
def a_window_that_is_gone(scene: Scene) -> None:
    """The key of a window that no longer exists."""
    first, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 1)
    bind_1(scene, second, mw, memory, "W")
    scene.wait(second.cq)
    key = mw.rkey
    lib.ibv_dealloc_mw(mw)
    scene.write(first.qp, 1, [first.memory.at()], (memory.address, key))
    scene.wait(first.cq)


@program("roce")
def windows_of_the_other_type(scene: Scene) -> None:
    """ibv_bind_mw() is for type 1, a posted request for type 2."""
    _, second = scene.pair()
    memory = bindable(scene, second)
    one, two = lib.ibv_alloc_mw(second.pd, 1), lib.ibv_alloc_mw(second.pd, 2)
    bind_1(scene, second, two, memory, "W")
    scene.rest(second.cq)
    bind_2(scene, second, one, memory, "W")
    scene.rest(second.cq)
    scene.state(second.qp)


@program("roce")
def a_window_of_type_2(scene: Scene) -> None:
    """A window of type 2 has the key that its request names, and its peer's message closes it."""
    first, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 2)
    key = bind_2(scene, second, mw, memory, "WR")
    scene.wait(second.cq)
    scene.write(first.qp, 1, [first.memory.at()], (memory.address, key))
    scene.wait(first.cq)
    scene.recv(second.qp, (2, [second.memory.at()]))
    scene.send(first.qp, 3, [first.memory.at()], opcode=lib.IBV_WR_SEND_WITH_INV, key=key)
    scene.wait(first.cq)
    scene.wait(second.cq)
    scene.write(first.qp, 4, [first.memory.at()], (memory.address, key))
    scene.wait(first.cq)


@program("roce")
def a_window_invalidated_here(scene: Scene) -> None:
    """LOCAL_INV closes a window of type 2, and it can be bound again."""
    _, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 2)
    key = bind_2(scene, second, mw, memory, "WR")
    scene.wait(second.cq)
    scene.send(second.qp, 1, [], opcode=lib.IBV_WR_LOCAL_INV, key=key)
    scene.wait(second.cq)
    bind_2(scene, second, mw, memory, "WR")
    scene.wait(second.cq)


@program("roce")
def a_window_of_type_2_twice(scene: Scene) -> None:
    """A window of type 2 that is bound is not bound again."""
    _, second = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 2)
    bind_2(scene, second, mw, memory, "WR")
    scene.wait(second.cq)
    bind_2(scene, second, mw, memory, "WR")
    scene.wait(second.cq)
    scene.state(second.qp)


@program("roce")
def a_window_of_another_queue_pair(scene: Scene) -> None:
    """A window of type 2 opens its memory only to the queue pair that bound it."""
    first, second = scene.pair(Path(), Path())
    third, fourth = scene.pair()
    memory = bindable(scene, second)
    mw = lib.ibv_alloc_mw(second.pd, 2)
    key = bind_2(scene, second, mw, memory, "WR")
    scene.wait(second.cq)
    scene.write(third.qp, 1, [third.memory.at()], (memory.address, key))
    scene.wait(third.cq)
    scene.state(fourth.qp)
    scene.write(first.qp, 2, [first.memory.at()], (memory.address, key))
    scene.wait(first.cq)
