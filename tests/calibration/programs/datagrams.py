"""Datagrams, ways to a peer, groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiordma._ffi import ffi, lib
from tests.calibration.scene import Memory, Path, Scene, muted, note, program

INIT, RTR, RTS = lib.IBV_QPS_INIT, lib.IBV_QPS_RTR, lib.IBV_QPS_RTS
QKEY = 0x11
GRH = 40
#: 239.0.0.1 as a GID.
GROUP = bytes(10) + b"\xff\xff\xef\x00\x00\x01"


@dataclass
class Post:
    """A queue pair for datagrams with what it needs."""

    qp: Any
    cq: Any
    memory: Memory


def office(scene: Scene, qkey: int = QKEY) -> Post:
    with muted():
        cq = scene.cq(32)
        qp = scene.qp(cq, type=lib.IBV_QPT_UD, path=Path())
        scene.modify(qp, state=INIT, pkey_index=0, port=1, qkey=qkey)
        scene.modify(qp, state=RTR)
        scene.modify(qp, state=RTS, sq_psn=7)
        return Post(qp, cq, scene.memory("L"))


def ah(scene: Scene, gid: bytes | None = None) -> Any:
    attr = ffi.new("struct ibv_ah_attr *")
    scene.fill_av(attr, gid)
    return lib.ibv_create_ah(scene.pd, attr)


def mail(
    scene: Scene, post: Post, wr_id: int, way: Any, qpn: int, length: int = 16, qkey: int = QKEY,
    **more: Any,
) -> int:  # fmt: skip
    wr = scene.wr(wr_id, [post.memory.at(0, length)] if length else [], **more)
    wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey = way, qpn, qkey
    return scene.post(post.qp, wr)


@program("roce")
def a_datagram(scene: Scene) -> None:
    """A datagram arrives after 40 bytes for a header, which says where it comes from."""
    first, second = office(scene), office(scene)
    first.memory.put(b"a datagram")
    scene.recv(second.qp, (1, [second.memory.at(0, 100)]))
    mail(scene, first, 2, ah(scene), second.qp.qp_num, 10)
    scene.wait(first.cq)
    scene.wait(second.cq)
    second.memory.show(GRH, 10)


@program("roce")
def a_datagram_without_bytes(scene: Scene) -> None:
    """A datagram of no bytes has a header all the same."""
    first, second = office(scene), office(scene)
    scene.recv(second.qp, (1, [second.memory.at(0, 100)]))
    mail(scene, first, 2, ah(scene), second.qp.qp_num, 0)
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def a_datagram_with_immediate_data(scene: Scene) -> None:
    """Immediate data arrive with a datagram."""
    first, second = office(scene), office(scene)
    scene.recv(second.qp, (1, [second.memory.at(0, 100)]))
    mail(scene, first, 2, ah(scene), second.qp.qp_num, opcode=lib.IBV_WR_SEND_WITH_IMM, imm=0x55)
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def an_inline_datagram(scene: Scene) -> None:
    """Inline bytes of a datagram."""
    first, second = office(scene), office(scene)
    scene.recv(second.qp, (1, [second.memory.at(0, 100)]))
    mail(
        scene, first, 2, ah(scene), second.qp.qp_num, 12,
        flags=lib.IBV_SEND_INLINE | lib.IBV_SEND_SIGNALED,
    )  # fmt: skip
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def a_wrong_qkey(scene: Scene) -> None:
    """A datagram with another Q_Key is silently dropped."""
    first, second = office(scene), office(scene)
    scene.recv(second.qp, (1, [second.memory.at(0, 100)]))
    way = ah(scene)
    mail(scene, first, 2, way, second.qp.qp_num, qkey=QKEY + 1)
    scene.wait(first.cq)
    scene.rest(second.cq)
    mail(scene, first, 3, way, second.qp.qp_num)
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def a_qkey_with_the_high_bit(scene: Scene) -> None:
    """A Q_Key with the highest bit stands for that of the sender's own queue pair."""
    first, second = office(scene), office(scene)
    scene.recv(second.qp, (1, [second.memory.at(0, 100)]))
    mail(scene, first, 2, ah(scene), second.qp.qp_num, qkey=0x80000000 | QKEY + 5)
    scene.wait(first.cq)
    scene.wait(second.cq, bound=0.5)


@program("roce")
def too_long_for_a_packet(scene: Scene) -> None:
    """A datagram that is longer than the MTU does not arrive."""
    first, second = office(scene), office(scene)
    scene.recv(second.qp, (1, [second.memory.at(0, 8192)]))
    mail(scene, first, 2, ah(scene), second.qp.qp_num, 5000)
    scene.wait(first.cq)
    scene.rest(second.cq)
    scene.state(first.qp)


@program("roce")
def too_long_for_the_receive(scene: Scene) -> None:
    """A datagram for which the receive has no room is dropped, and the receive stays."""
    first, second = office(scene), office(scene)
    scene.recv(second.qp, (1, [second.memory.at(0, 50)]))
    way = ah(scene)
    mail(scene, first, 2, way, second.qp.qp_num, 11)
    scene.wait(first.cq)
    scene.rest(second.cq)
    scene.state(second.qp)
    mail(scene, first, 3, way, second.qp.qp_num, 10)
    scene.wait(first.cq)
    scene.wait(second.cq, bound=0.5)


@program("roce")
def no_receive_for_a_datagram(scene: Scene) -> None:
    """Without a receive a datagram is dropped."""
    first, second = office(scene), office(scene)
    mail(scene, first, 1, ah(scene), second.qp.qp_num)
    scene.wait(first.cq)
    scene.recv(second.qp, (2, [second.memory.at(0, 100)]))
    scene.rest(second.cq)


@program("roce")
def a_datagram_to_nobody(scene: Scene) -> None:
    """A datagram to a queue pair that is not there, or does not listen, is sent with success."""
    first = office(scene)
    with muted():
        deaf = scene.qp(scene.cq(), type=lib.IBV_QPT_UD)
    way = ah(scene)
    mail(scene, first, 1, way, 0xABCDE)
    scene.wait(first.cq)
    mail(scene, first, 2, way, deaf.qp_num)
    scene.wait(first.cq)


@program("roce")
def datagrams_do_not_write(scene: Scene) -> None:
    """Queue pairs for datagrams send, and nothing else."""
    first, second = office(scene), office(scene)
    way = ah(scene)
    for opcode in (lib.IBV_WR_RDMA_WRITE, lib.IBV_WR_RDMA_READ, lib.IBV_WR_SEND_WITH_INV):
        mail(scene, first, 1, way, second.qp.qp_num, opcode=opcode)
        scene.rest(first.cq)
    scene.state(first.qp)


@program("roce")
def a_datagram_of_foreign_memory(scene: Scene) -> None:
    """A datagram with an unknown local key stops the send queue; receives continue."""
    first, second = office(scene), office(scene)
    wr = scene.wr(1, [(first.memory.address, 16, 0x7654321)])
    wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey = ah(scene), second.qp.qp_num, QKEY
    scene.post(first.qp, wr)
    scene.wait(first.cq)
    scene.state(first.qp)


@program("roce")
def datagrams_in_a_shared_queue(scene: Scene) -> None:
    """A queue pair for datagrams may take its receives from a shared queue."""
    first = office(scene)
    with muted():
        srq, cq, memory = scene.srq(4, 1), scene.cq(), scene.memory("L")
    qp = scene.qp(cq, type=lib.IBV_QPT_UD, srq=srq)
    with muted():
        scene.modify(qp, state=INIT, pkey_index=0, port=1, qkey=QKEY)
        scene.modify(qp, state=RTR)
    scene.recv(srq, (1, [memory.at(0, 100)]))
    mail(scene, first, 2, ah(scene), qp.qp_num)
    scene.wait(first.cq)
    scene.wait(cq)


@program("roce")
def ways_that_are_none(scene: Scene) -> None:
    """Address handles for a missing port or GID index, and without a global part."""
    for change in ("port", "index", "local"):
        attr = ffi.new("struct ibv_ah_attr *")
        scene.fill_av(attr)
        if change == "port":
            attr.port_num = 2
        elif change == "index":
            attr.grh.sgid_index = 200
        else:
            attr.is_global = 0
        lib.ibv_create_ah(scene.pd, attr)
    lib.ibv_destroy_ah(ah(scene))


@program("roce")
def a_way_keeps_its_domain(scene: Scene) -> None:
    """A domain is not deallocated while it has an address handle."""
    way = ah(scene)
    lib.ibv_dealloc_pd(scene.pd)
    lib.ibv_destroy_ah(way)
    lib.ibv_dealloc_pd(scene.pd)


@program("roce")
def the_way_back(scene: Scene) -> None:
    """What ibv_init_ah_from_wc() makes of a datagram leads back to its sender."""
    first, second = office(scene), office(scene)
    scene.recv(first.qp, (9, [first.memory.at(200, 100)]))
    scene.recv(second.qp, (1, [second.memory.at(0, 100)]))
    mail(scene, first, 2, ah(scene), second.qp.qp_num)
    scene.wait(first.cq)
    wc = scene.wait(second.cq)
    attr = ffi.new("struct ibv_ah_attr *")
    grh = ffi.cast("struct ibv_grh *", second.memory.address)
    lib.ibv_init_ah_from_wc(scene.context, 1, wc, grh, attr)
    note(f"to itself {bytes(attr.grh.dgid.raw) == scene.gid} {attr.is_global}")
    back = lib.ibv_create_ah(scene.pd, attr)
    if back:
        mail(scene, second, 3, back, wc.src_qp)
        scene.wait(second.cq)
        scene.wait(first.cq)


@program("roce")
def a_queue_pair_that_hears_itself(scene: Scene) -> None:
    """A datagram to the sender's own queue pair."""
    first = office(scene)
    scene.recv(first.qp, (1, [first.memory.at(100, 100)]))
    mail(scene, first, 2, ah(scene), first.qp.qp_num)
    scene.wait(first.cq, 2)


@program("roce")
def datagrams_in_the_error_state(scene: Scene) -> None:
    """ERR flushes receives for datagrams."""
    first = office(scene)
    scene.recv(first.qp, (1, [first.memory.at()]), (2, [first.memory.at()]))
    scene.to_error(first.qp)
    scene.wait(first.cq, 2)


# ---- groups


def group(gid: bytes = GROUP) -> Any:
    made = ffi.new("union ibv_gid *")
    ffi.buffer(made.raw)[:] = gid
    return made


@program("roce")
def a_group(scene: Scene) -> None:
    """Each member of a group gets a datagram to it, the sender as well if it is a member."""
    first, second = office(scene), office(scene)
    for post in (first, second):
        lib.ibv_attach_mcast(post.qp, group(), 0)
        scene.recv(post.qp, (1, [post.memory.at(100, 100)]))
    mail(scene, first, 2, ah(scene, GROUP), 0xFFFFFF)
    scene.wait(second.cq)
    scene.wait(first.cq, 2)
    lib.ibv_detach_mcast(second.qp, group(), 0)
    scene.recv(second.qp, (3, [second.memory.at(100, 100)]))
    mail(scene, first, 4, ah(scene, GROUP), 0xFFFFFF)
    scene.wait(first.cq)
    scene.rest(second.cq)


@program("roce")
def a_member_without_a_receive(scene: Scene) -> None:
    """A member without a receive misses the datagram; the others do not."""
    first, second, third = office(scene), office(scene), office(scene)
    for post in (second, third):
        lib.ibv_attach_mcast(post.qp, group(), 0)
    scene.recv(third.qp, (1, [third.memory.at(0, 100)]))
    mail(scene, first, 2, ah(scene, GROUP), 0xFFFFFF)
    scene.wait(first.cq)
    scene.wait(third.cq)
    scene.rest(second.cq)


@program("roce")
def membership_twice(scene: Scene) -> None:
    """Joining twice, and leaving without having joined."""
    first = office(scene)
    lib.ibv_attach_mcast(first.qp, group(), 0)
    lib.ibv_attach_mcast(first.qp, group(), 0)
    lib.ibv_detach_mcast(first.qp, group(), 0)
    lib.ibv_detach_mcast(first.qp, group(), 0)


@program("roce")
def groups_that_are_none(scene: Scene) -> None:
    """A group is for datagrams, and has the address of a group."""
    first = office(scene)
    lib.ibv_attach_mcast(first.qp, group(scene.gid), 0)
    with muted():
        end, _ = scene.pair()
    lib.ibv_attach_mcast(end.qp, group(), 0)


@program("roce")
def a_member_is_not_destroyed(scene: Scene) -> None:
    """A queue pair that is in a group is not destroyed."""
    first = office(scene)
    lib.ibv_attach_mcast(first.qp, group(), 0)
    lib.ibv_destroy_qp(first.qp)
    lib.ibv_detach_mcast(first.qp, group(), 0)
    lib.ibv_destroy_qp(first.qp)
