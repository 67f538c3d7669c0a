"""The states of a queue pair, what may lead from one to another, and limits of objects."""

from __future__ import annotations

from typing import Any

from aiordma._ffi import ffi, lib
from tests.calibration.scene import USUAL, Path, Scene, muted, note, program

INIT, RTR, RTS = lib.IBV_QPS_INIT, lib.IBV_QPS_RTR, lib.IBV_QPS_RTS
SQD, ERR, RESET = lib.IBV_QPS_SQD, lib.IBV_QPS_ERR, lib.IBV_QPS_RESET


def fresh(scene: Scene, path: Path = USUAL) -> tuple[Any, Any]:
    with muted():
        cq = scene.cq(16)
        return scene.qp(cq, path=path), cq


def ready(scene: Scene) -> Any:
    """A queue pair in RTS whose peer is itself."""
    with muted():
        qp, _ = fresh(scene)
        scene.to_init(qp)
        scene.to_rtr(qp, qp.qp_num)
        scene.to_rts(qp)
    return qp


@program("roce")
def states_in_order(scene: Scene) -> None:
    """RESET, INIT, RTR and RTS follow one another, with the attributes of the manual."""
    qp, _ = fresh(scene)
    scene.state(qp)
    scene.to_init(qp)
    scene.state(qp)
    scene.to_rtr(qp, qp.qp_num)
    scene.state(qp)
    scene.to_rts(qp)
    scene.state(qp)


@program()
def states_cannot_be_left_out(scene: Scene) -> None:
    """From RESET nothing leads to RTR, RTS or SQD, from INIT nothing to RTS or SQD."""
    qp, _ = fresh(scene)
    for state in (RTR, RTS, SQD):
        scene.modify(qp, state=state)
    scene.to_init(qp)
    for state in (RTS, SQD):
        scene.modify(qp, state=state)
    scene.state(qp)


@program("roce")
def states_do_not_go_back(scene: Scene) -> None:
    """From RTS nothing leads back to INIT or RTR."""
    qp = ready(scene)
    scene.to_init(qp)
    scene.to_rtr(qp, 5)
    scene.state(qp)


@program()
def init_needs_its_attributes(scene: Scene) -> None:
    """INIT without a port, a P_Key index or rights is refused."""
    qp, _ = fresh(scene)
    scene.modify(qp, state=INIT)
    scene.modify(qp, state=INIT, pkey_index=0, access="L")
    scene.modify(qp, state=INIT, port=1, access="L")
    scene.modify(qp, state=INIT, pkey_index=0, port=1)
    scene.state(qp)


@program("roce")
def init_with_a_bad_port(scene: Scene) -> None:
    """Ports begin with 1, and this adapter has one."""
    qp, _ = fresh(scene)
    for port in (0, 2):
        scene.modify(qp, state=INIT, pkey_index=0, port=port, access="L")


@program("roce")
def init_with_a_bad_pkey(scene: Scene) -> None:
    """An index beyond the table of P_Keys."""
    qp, _ = fresh(scene)
    scene.modify(qp, state=INIT, pkey_index=1000, port=1, access="L")


@program("roce")
def init_again_changes_rights(scene: Scene) -> None:
    """INIT to INIT is allowed, and changes what is given."""
    qp, _ = fresh(scene)
    scene.to_init(qp)
    scene.modify(qp, state=INIT, access="LR")
    attr, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
    lib.ibv_query_qp(qp, attr, lib.IBV_QP_STATE | lib.IBV_QP_ACCESS_FLAGS, init)


@program("roce")
def rtr_needs_its_attributes(scene: Scene) -> None:
    """RTR without one of its attributes is refused."""
    qp, _ = fresh(scene)
    scene.to_init(qp)
    whole: dict[str, Any] = {
        "av": None,
        "mtu": 3,
        "dest": 5,
        "rq_psn": 7,
        "dest_rd": 1,
        "min_rnr": 1,
    }
    for missing in whole:
        rest = {name: value for name, value in whole.items() if name != missing}
        scene.modify(qp, state=RTR, **rest)
    scene.state(qp)


@program("roce")
def rts_needs_its_attributes(scene: Scene) -> None:
    """RTS without one of its attributes is refused."""
    qp, _ = fresh(scene)
    with muted():
        scene.to_init(qp)
        scene.to_rtr(qp, 5)
    whole = {"timeout": 10, "retry": 1, "rnr_retry": 1, "sq_psn": 7, "rd": 1}
    for missing in whole:
        rest = {name: value for name, value in whole.items() if name != missing}
        scene.modify(qp, state=RTS, **rest)
    scene.state(qp)


@program("roce")
def attributes_of_another_step(scene: Scene) -> None:
    """An attribute that does not belong to the step is refused."""
    qp, _ = fresh(scene)
    scene.modify(qp, state=INIT, pkey_index=0, port=1, access="L", timeout=10)
    scene.to_init(qp)
    scene.modify(qp, sq_psn=5)
    scene.modify(qp, state=INIT, dest=5)


@program("roce")
def values_out_of_range(scene: Scene) -> None:
    """Depths, MTU, timers and counters have bounds."""
    qp, _ = fresh(scene)
    with muted():
        scene.to_init(qp)
    for path in (Path(mtu=9), Path(mtu=0), Path(dest_rd=255), Path(min_rnr=32)):
        scene.to_rtr(qp, 5, path)
        scene.modify(qp, state=RESET)
        scene.to_init(qp)
    scene.to_rtr(qp, 5)
    for path in (Path(rd=255), Path(retry=8), Path(rnr_retry=8), Path(timeout=32)):
        scene.to_rts(qp, path)
        with muted():
            scene.modify(qp, state=RESET)
            scene.to_init(qp)
            scene.to_rtr(qp, 5)


@program("roce")
def error_and_back(scene: Scene) -> None:
    """Each state leads to ERR and to RESET, and ERR only to RESET."""
    qp, _ = fresh(scene)
    scene.to_error(qp)
    scene.state(qp)
    scene.to_init(qp)
    scene.modify(qp, state=RESET)
    scene.to_init(qp)
    scene.to_error(qp)
    scene.modify(qp, state=RESET)
    scene.state(qp)
    scene.to_init(qp)


@program("roce")
def rts_changes_some(scene: Scene) -> None:
    """In RTS the rights and the RNR timer may change, and nothing else."""
    qp = ready(scene)
    scene.modify(qp, state=RTS, access="LR")
    scene.modify(qp, access="L")
    scene.modify(qp, state=RTS, min_rnr=5)
    scene.modify(qp, state=RTS, dest=5)
    scene.modify(qp, state=RTS, timeout=5)
    scene.modify(qp, state=RTS, rd=2)
    scene.state(qp)


@program("roce")
def current_state_is_checked(scene: Scene) -> None:
    """A CUR_STATE that is not the current state is refused."""
    qp = ready(scene)
    scene.modify(qp, state=RTS, cur=RTS, access="L")
    scene.modify(qp, state=RTS, cur=INIT, access="L")
    scene.state(qp)


@program("roce")
def drained_and_on(scene: Scene) -> None:
    """From RTS to SQD and back."""
    qp = ready(scene)
    scene.modify(qp, state=SQD)
    scene.state(qp)
    scene.modify(qp, state=RTS)
    scene.state(qp)


@program("roce")
def drained_tells(scene: Scene) -> None:
    """SQD with a request for it gives the event SQ_DRAINED."""
    qp = ready(scene)
    scene.modify(qp, state=SQD, notify=1)
    scene.async_event()
    scene.modify(qp, state=SQD, timeout=11)
    scene.modify(qp, state=SQD, av=None)
    scene.modify(qp, state=RTS)


@program("roce")
def drained_sends_nothing(scene: Scene) -> None:
    """What is posted in SQD waits for RTS."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.modify(first.qp, state=SQD)
    scene.send(first.qp, 2, [first.memory.at()])
    scene.rest(first.cq)
    scene.modify(first.qp, state=RTS)
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def mask_without_meaning(scene: Scene) -> None:
    """Undefined bits of the mask."""
    qp = ready(scene)
    scene.modify(qp, extra_mask=1 << 26, state=RTS)
    scene.modify(qp, extra_mask=lib.IBV_QP_RATE_LIMIT, state=RTS)
    scene.modify(qp)


@program("roce")
def datagram_states(scene: Scene) -> None:
    """A queue pair for datagrams needs a Q_Key in INIT, and later only a PSN."""
    with muted():
        qp = scene.qp(scene.cq(), type=lib.IBV_QPT_UD)
    scene.modify(qp, state=INIT, pkey_index=0, port=1)
    scene.modify(qp, state=INIT, pkey_index=0, port=1, qkey=17, access="L")
    scene.modify(qp, state=INIT, pkey_index=0, port=1, qkey=17)
    scene.modify(qp, state=RTR, mtu=3)
    scene.modify(qp, state=RTR)
    scene.modify(qp, state=RTS)
    scene.modify(qp, state=RTS, sq_psn=7)
    scene.modify(qp, state=RTS, qkey=18)
    scene.state(qp)


@program("roce")
def iwarp_has_none_of_this(scene: Scene) -> None:
    """RTR accepts a peer's address that nobody has."""
    qp, _ = fresh(scene)
    scene.to_init(qp)
    scene.modify(
        qp, state=RTR, av=bytes(10) + b"\xff\xff\x0a\x50\x00\x63", mtu=3, dest=5, rq_psn=7,
        dest_rd=1, min_rnr=1,
    )  # fmt: skip
    scene.state(qp)


@program("iwarp")
def iwarp_states(scene: Scene) -> None:
    """On iWARP only the connection manager moves to RTR and RTS."""
    qp, _ = fresh(scene)
    scene.state(qp)
    scene.to_init(qp)
    scene.modify(qp, state=RTR)
    scene.modify(qp, state=RTS)
    scene.to_error(qp)
    scene.state(qp)
    scene.modify(qp, state=RESET)


@program()
def posts_in_each_state(scene: Scene) -> None:
    """Receives may be posted from INIT on, sends from RTS on."""
    with muted():
        memory = scene.memory()
    qp, cq = fresh(scene)
    for step in (None, scene.to_init):
        if step:
            step(qp)
        scene.send(qp, 1, [memory.at()])
        scene.recv(qp, (2, [memory.at()]))
    if not scene.iwarp:
        scene.to_rtr(qp, qp.qp_num)
        scene.send(qp, 3, [memory.at()])
    scene.rest(cq)


@program()
def limits_of_a_queue_pair(scene: Scene) -> None:
    """More requests, pieces or inline bytes than the adapter has are refused."""
    with muted():
        cq = scene.cq()
    attr = ffi.new("struct ibv_device_attr *")
    lib.ibv_query_device(scene.context, attr)
    scene.qp(cq, path=Path(send_wr=attr.max_qp_wr + 1))
    scene.qp(cq, path=Path(recv_wr=attr.max_qp_wr + 1))
    scene.qp(cq, path=Path(sges=attr.max_sge + 1))
    scene.qp(cq, path=Path(inline=1 << 20))
    scene.qp(cq, path=Path(send_wr=0, recv_wr=0, sges=1, inline=0))
    scene.qp(cq, path=Path(send_wr=0, recv_wr=0, sges=0, inline=0))


@program()
def what_a_queue_pair_gets(scene: Scene) -> None:
    """The capacities of a queue pair are at least those that were asked for."""
    with muted():
        cq = scene.cq()
    for path in (Path(), Path(send_wr=1, recv_wr=1, sges=1, inline=0), Path(send_wr=16, inline=17)):
        qp = scene.qp(cq, path=path)
        attr, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        if qp:
            lib.ibv_query_qp(qp, attr, lib.IBV_QP_CAP, init)


@program()
def kinds_of_queue_pairs(scene: Scene) -> None:
    """Kinds that the adapter does not have are refused."""
    with muted():
        cq = scene.cq()
    for kind in (lib.IBV_QPT_RC, lib.IBV_QPT_UD, lib.IBV_QPT_RAW_PACKET, 77):
        scene.qp(cq, type=kind)


@program()
def limits_of_a_completion_queue(scene: Scene) -> None:
    """No entries, more than the adapter has, and a vector that does not exist."""
    attr = ffi.new("struct ibv_device_attr *")
    lib.ibv_query_device(scene.context, attr)
    for cqe in (0, -1, attr.max_cqe + 1):
        note(f"cqe {'most + 1' if cqe > 1 else cqe}")
        with muted():
            made = scene.cq(cqe)
        note("made" if made else f"errno {ffi.errno}")
    lib.ibv_create_cq(scene.context, 4, ffi.NULL, ffi.NULL, 1000)
    scene.cq(1)
    scene.cq(4)


@program()
def what_is_in_use_stays(scene: Scene) -> None:
    """Domains, queues and channels are not destroyed while something needs them."""
    channel = scene.channel()
    cq = scene.cq(4, channel)
    srq = scene.srq()
    memory = scene.memory()
    qp = scene.qp(cq, srq=srq)
    lib.ibv_destroy_comp_channel(channel)
    lib.ibv_destroy_cq(cq)
    lib.ibv_destroy_srq(srq)
    lib.ibv_dealloc_pd(scene.pd)
    lib.ibv_destroy_qp(qp)
    lib.ibv_destroy_cq(cq)
    lib.ibv_destroy_comp_channel(channel)
    lib.ibv_destroy_srq(srq)
    lib.ibv_dealloc_pd(scene.pd)
    lib.ibv_dereg_mr(memory.mr)
    lib.ibv_dealloc_pd(scene.pd)


@program()
def what_the_adapter_says(scene: Scene) -> None:
    """The limits that an adapter reports."""
    attr = ffi.new("struct ibv_device_attr *")
    lib.ibv_query_device(scene.context, attr)
    note(f"firmware {ffi.string(attr.fw_ver).decode()!r}")
    for name in (
        "max_mr_size", "page_size_cap", "vendor_id", "vendor_part_id", "hw_ver", "max_qp",
        "max_qp_wr", "max_sge", "max_sge_rd", "max_cq", "max_cqe", "max_mr", "max_pd",
        "max_qp_rd_atom", "max_res_rd_atom", "max_qp_init_rd_atom", "atomic_cap", "max_mw",
        "max_mcast_grp", "max_mcast_qp_attach", "max_total_mcast_qp_attach", "max_ah", "max_srq",
        "max_srq_wr", "max_srq_sge", "max_pkeys", "local_ca_ack_delay", "phys_port_cnt",
    ):  # fmt: skip
        note(f"{name} {getattr(attr, name):#x}")
    for bit in range(32):
        if attr.device_cap_flags & 1 << bit:
            note(f"capability bit {bit}")


@program()
def what_the_port_says(scene: Scene) -> None:
    """The state and the limits that a port reports."""
    port = ffi.new("struct ibv_port_attr *")
    note(f"query {lib.ibv_query_port(scene.context, 1, port)}")
    for name in (
        "state", "max_mtu", "gid_tbl_len", "max_msg_sz", "pkey_tbl_len", "lid",
        "sm_lid", "lmc", "max_vl_num", "active_width", "active_speed", "phys_state", "link_layer",
        "flags",
    ):  # fmt: skip
        note(f"{name} {int(getattr(port, name)):#x}")
    note(f"query port 0: {lib.ibv_query_port(scene.context, 0, port)}")
    note(f"query port 2: {lib.ibv_query_port(scene.context, 2, port)}")
    key = ffi.new("uint16_t *")
    note(f"pkey {lib.ibv_query_pkey(scene.context, 1, 0, key)} {key[0]:#x}")
    note(f"pkey out of range {lib.ibv_query_pkey(scene.context, 1, 10000, key)}")
