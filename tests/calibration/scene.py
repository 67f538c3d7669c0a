"""What the programs of the calibration stand on: thin calls of libibverbs and librdmacm.

The recorder (recorder.c) writes what a program calls.  What only prepares the scene is muted, so
that a trace has the lines that its program is about.  Every wait has a bound; what did not come in
time is a line of the trace, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiordma._ffi import ffi, lib

__all__ = [
    "ADDRESS",
    "ALL",
    "PROGRAMS",
    "USUAL",
    "Agent",
    "End",
    "FurtherError",
    "Memory",
    "Path",
    "Program",
    "Scene",
    "access",
    "address",
    "direct",
    "muted",
    "note",
    "open_trace",
    "pointer",
    "program",
]

#: Of the guest's adapter, and of the first one of the fabric.
ADDRESS = "10.80.0.1"

#: How long something that has to come may take, and something that has not to.
LONG_S, SHORT_S = 4.0, 0.15

#: Functions that the compiled module of aiordma does not declare, and those of the recorder.
direct = ctypes.CDLL(None, use_errno=True)

_ACCESS = {
    "L": lib.IBV_ACCESS_LOCAL_WRITE,
    "W": lib.IBV_ACCESS_REMOTE_WRITE,
    "R": lib.IBV_ACCESS_REMOTE_READ,
    "A": lib.IBV_ACCESS_REMOTE_ATOMIC,
    "B": lib.IBV_ACCESS_MW_BIND,
    "Z": lib.IBV_ACCESS_ZERO_BASED,
}

#: Local write, remote write, read and atomics.
ALL = "LWRA"


def access(letters: str) -> int:
    """The flags of letters: Local write, remote Write, Read, Atomic, Bind, Zero based."""
    return sum(_ACCESS[letter] for letter in letters)


def pointer(thing: Any) -> ctypes.c_void_p:
    """Something of cffi for a function of ctypes."""
    return ctypes.c_void_p(int(ffi.cast("uintptr_t", thing)))


def open_trace(path: str) -> None:
    if direct.recorder_open(path.encode()):
        raise OSError(f"{path}: cannot be written")


def note(text: str) -> None:
    """Write a line of the program's own."""
    direct.recorder_note(text.encode())


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Write no lines meanwhile."""
    global _mutes
    _mutes += 1
    direct.recorder_mute(1)
    try:
        yield
    finally:
        _mutes -= 1
        direct.recorder_mute(_mutes)


_mutes = 0


class FurtherError(Exception):
    """A program cannot go on: what it is about does not exist here."""


@dataclass(frozen=True)
class Program:
    name: str
    rule: str
    run: Callable[[Scene], None]
    #: "roce": queue pairs are made by hand, or do what iWARP has not; "iwarp"; "": any.
    needs: str


PROGRAMS: dict[str, Program] = {}


def program(needs: str = "") -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Put a function among the programs; its name and docstring are the rule that it shows."""

    def add(run: Callable[[Scene], None]) -> Callable[[Scene], None]:
        if run.__name__ in PROGRAMS or not run.__doc__:
            raise ValueError(f"{run.__name__}: a second one, or without a rule")
        PROGRAMS[run.__name__] = Program(run.__name__, run.__doc__, run, needs)
        return run

    return add


@dataclass
class Memory:
    """A region, or memory that is to be one."""

    address: int
    size: int
    mr: Any = None

    def at(self, offset: int = 0, length: int = 16) -> tuple[int, int, int]:
        """A piece of it, for a list of pieces."""
        return self.address + offset, length, self.mr.lkey

    def to(self, offset: int = 0) -> tuple[int, int]:
        """What the peer writes to or reads from."""
        return self.address + offset, self.mr.rkey

    @property
    def view(self) -> Any:
        return ffi.buffer(ffi.cast("char *", self.address), self.size)

    def put(self, text: bytes, offset: int = 0) -> None:
        self.view[offset : offset + len(text)] = text

    def show(self, offset: int = 0, length: int = 16) -> None:
        """Write what is in it."""
        note(f"memory {bytes(self.view[offset : offset + length])!r}")


@dataclass
class End:
    """A queue pair with what it needs."""

    qp: Any
    cq: Any
    pd: Any
    memory: Memory


@dataclass(frozen=True)
class Path:
    """What a queue pair is told about its way and its peer."""

    access: str = ALL
    rd: int = 4
    dest_rd: int = 4
    min_rnr: int = 1
    timeout: int = 10
    retry: int = 3
    rnr_retry: int = 7
    mtu: int = 3
    send_wr: int = 8
    recv_wr: int = 8
    sges: int = 4
    inline: int = 64
    sig_all: int = 0


#: What most programs have.
USUAL = Path()


@dataclass(frozen=True)
class Event:
    type: int
    id: Any
    status: int


class Agent:
    """An event channel, with the ids that are made on it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.channel = lib.rdma_create_event_channel()

    def id(self, space: int = lib.RDMA_PS_TCP) -> Any:
        box = ffi.new("struct rdma_cm_id **")
        if lib.rdma_create_id(self.channel, box, ffi.NULL, space):
            raise FurtherError
        return box[0]

    def has_event(self) -> None:
        """Wait until there is an event, and leave it there."""
        readable, _, _ = select.select([self.channel.fd], [], [], LONG_S)
        if not readable:
            note("no cm event")

    def unacked(self, bound: float = LONG_S) -> Any:
        """The next event; NULL, and a line, if none comes."""
        readable, _, _ = select.select([self.channel.fd], [], [], bound)
        if not readable:
            note("no cm event")
            return ffi.NULL
        box = ffi.new("struct rdma_cm_event **")
        if lib.rdma_get_cm_event(self.channel, box):
            return ffi.NULL
        return box[0]

    def next(self, bound: float = LONG_S) -> Event:
        """The next event, acknowledged."""
        event = self.unacked(bound)
        if not event:
            return Event(-1, ffi.NULL, 0)
        seen = Event(event.event, event.id, event.status)
        lib.rdma_ack_cm_event(event)
        return seen

    def listener(
        self, port: int = 0, space: int = lib.RDMA_PS_TCP, backlog: int = 8
    ) -> tuple[Any, int]:
        """An id that listens, and its port."""
        made = self.id(space)
        if lib.rdma_bind_addr(made, address(port=port)) or lib.rdma_listen(made, backlog):
            raise OSError("rdma_listen")
        return made, socket.ntohs(made.route.addr.src_sin.sin_port)

    def resolved(self, port: int, space: int = lib.RDMA_PS_TCP) -> Any:
        """An id that knows the way to a port; muted, because this is the same in every program."""
        with muted():
            made = self.id(space)
            if lib.rdma_resolve_addr(made, ffi.NULL, address(port=port), 2000):
                raise OSError("rdma_resolve_addr")
            self.next()
            if lib.rdma_resolve_route(made, 2000):
                raise OSError("rdma_resolve_route")
            self.next()
        return made


_kept: list[Any] = []


def address(host: str = ADDRESS, port: int = 0) -> Any:
    """A struct sockaddr, which lives as long as the process."""
    made = ffi.new("struct sockaddr_in *")
    made.sin_family = lib.AF_INET
    made.sin_port = socket.htons(port)
    packed = socket.inet_aton(host)
    made.sin_addr.s_addr = int.from_bytes(packed, "little")
    _kept.append(made)
    return ffi.cast("struct sockaddr *", made)


@dataclass
class Scene:
    """A device that is open, and calls with few words."""

    context: Any = None
    pd: Any = None
    device: Any = None
    _pds: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with muted():
            self.device = lib.ibv_get_device_list(ffi.NULL)[0]
            self.context = lib.ibv_open_device(self.device)
            self.pd = lib.ibv_alloc_pd(self.context)
        self.gid_index, self.gid = 0, b"\0" * 16
        if not self.iwarp:
            self._find_gid()

    @property
    def iwarp(self) -> bool:
        return bool(self.device.transport_type == lib.IBV_TRANSPORT_IWARP)

    def _find_gid(self) -> None:
        wanted = b"\0" * 10 + b"\xff\xff" + socket.inet_aton(ADDRESS)
        entries = ffi.new("struct ibv_gid_entry[64]")
        for entry in entries[0 : lib.ibv_query_gid_table(self.context, entries, 64, 0)]:
            if bytes(entry.gid.raw) == wanted and entry.gid_type == lib.IBV_GID_TYPE_ROCE_V2:
                self.gid_index, self.gid = entry.gid_index, wanted
                return
        raise OSError(f"no GID for {ADDRESS}")

    # ---- objects

    def cq(self, cqe: int = 16, channel: Any = ffi.NULL, context: Any = None) -> Any:
        return lib.ibv_create_cq(context or self.context, cqe, ffi.NULL, channel, 0)

    def channel(self, context: Any = None) -> Any:
        return lib.ibv_create_comp_channel(context or self.context)

    def bare(self, size: int = 8192) -> Memory:
        """Memory that is not registered."""
        return Memory(int(ffi.cast("uintptr_t", lib.aio_map(size))), size)

    def memory(self, rights: str = ALL, size: int = 8192, pd: Any = None) -> Memory:
        """Memory with a region over all of it."""
        made = self.bare(size)
        made.mr = self.reg(made, rights, pd=pd)
        return made

    def reg(self, memory: Memory, rights: str, size: int | None = None, pd: Any = None) -> Any:
        if self.iwarp:
            rights = rights.replace("A", "")
        start = ffi.cast("void *", memory.address)
        length = memory.size if size is None else size
        return lib.ibv_reg_mr(pd or self.pd, start, length, access(rights))

    def srq(self, wr: int = 8, sge: int = 2, limit: int = 0, pd: Any = None) -> Any:
        init = ffi.new("struct ibv_srq_init_attr *")
        init.attr.max_wr, init.attr.max_sge, init.attr.srq_limit = wr, sge, limit
        return lib.ibv_create_srq(pd or self.pd, init)

    def init_attr(
        self,
        cq: Any,
        type: int = lib.IBV_QPT_RC,
        recv_cq: Any = None,
        srq: Any = ffi.NULL,
        path: Path = USUAL,
    ) -> Any:
        init = ffi.new("struct ibv_qp_init_attr *")
        init.send_cq, init.recv_cq, init.srq = cq, recv_cq or cq, srq
        init.qp_type, init.sq_sig_all = type, path.sig_all
        init.cap.max_send_wr, init.cap.max_recv_wr = path.send_wr, path.recv_wr
        init.cap.max_send_sge, init.cap.max_recv_sge = path.sges, path.sges
        init.cap.max_inline_data = path.inline
        return init

    def qp(self, cq: Any, **more: Any) -> Any:
        return lib.ibv_create_qp(more.pop("pd", self.pd), self.init_attr(cq, **more))

    # ---- states

    def modify(self, qp: Any, extra_mask: int = 0, **values: Any) -> int:
        """ibv_modify_qp() with these attributes, and no others."""
        attr, mask = ffi.new("struct ibv_qp_attr *"), extra_mask
        for name, value in values.items():
            member, bit = _ATTRIBUTES[name]
            mask |= bit
            if name == "av":
                self.fill_av(attr.ah_attr, value)
            else:
                setattr(attr, member, access(value) if name == "access" else value)
        return int(lib.ibv_modify_qp(qp, attr, mask))

    def fill_av(self, av: Any, gid: bytes | None = None) -> None:
        """The way to a GID; to this adapter itself, if none is given."""
        av.is_global, av.port_num = 1, 1
        av.grh.sgid_index, av.grh.hop_limit = self.gid_index, 64
        ffi.buffer(av.grh.dgid.raw)[:] = gid or self.gid

    def to_init(self, qp: Any, path: Path = USUAL) -> int:
        return self.modify(qp, state=lib.IBV_QPS_INIT, pkey_index=0, port=1, access=path.access)

    def to_rtr(self, qp: Any, dest: int, path: Path = USUAL) -> int:
        return self.modify(
            qp, state=lib.IBV_QPS_RTR, av=None, mtu=path.mtu, dest=dest, rq_psn=7,
            dest_rd=path.dest_rd, min_rnr=path.min_rnr,
        )  # fmt: skip

    def to_rts(self, qp: Any, path: Path = USUAL) -> int:
        return self.modify(
            qp, state=lib.IBV_QPS_RTS, timeout=path.timeout, retry=path.retry,
            rnr_retry=path.rnr_retry, sq_psn=7, rd=path.rd,
        )  # fmt: skip

    def to_error(self, qp: Any) -> int:
        return self.modify(qp, state=lib.IBV_QPS_ERR)

    def state(self, qp: Any) -> None:
        """Write in which state a queue pair is."""
        attr, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        lib.ibv_query_qp(qp, attr, lib.IBV_QP_STATE, init)

    def state_becomes(self, qp: Any, state: int) -> None:
        """Wait for a state, and write in which one it ended."""
        attr, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        with muted():
            for _ in _until(LONG_S):
                lib.ibv_query_qp(qp, attr, lib.IBV_QP_STATE, init)
                if attr.qp_state == state:
                    break
        self.state(qp)

    # ---- pairs

    def pair(
        self,
        path: Path = USUAL,
        other: Path | None = None,
        cqe: int = 32,
        srq: bool = False,
        channel: bool = False,
        pds: int = 1,
    ) -> tuple[End, End]:
        """Two queue pairs of RC that are connected; nothing of it is written.

        Args:
            path: Of the first one.
            other: Of the second one, if it differs.
            cqe: Of the completion queue that each has.
            srq: Whether the second one takes its receives from a shared queue, `end.qp.srq`.
            channel: Whether their completion queues have channels.
            pds: In how many domains they are.
        """
        with muted():
            if self.iwarp:
                return self._pair_by_cm(path, other or path, cqe, srq, channel)
            return self._pair_by_hand(path, other or path, cqe, srq, channel, pds)

    def _pair_by_hand(
        self, path: Path, other: Path, cqe: int, srq: bool, channel: bool, pds: int
    ) -> tuple[End, End]:
        ends = []
        for number, own in enumerate((path, other)):
            pd = lib.ibv_alloc_pd(self.context) if number and pds > 1 else self.pd
            cq = self.cq(cqe, self.channel() if channel else ffi.NULL)
            queue = self.srq(pd=pd) if srq and number else ffi.NULL
            qp = self.qp(cq, srq=queue, path=own, pd=pd)
            ends.append(End(qp, cq, pd, self.memory(pd=pd)))
        first, second = ends
        for end, peer, own in ((first, second, path), (second, first, other)):
            if (
                self.to_init(end.qp, own)
                or self.to_rtr(end.qp, peer.qp.qp_num, own)
                or self.to_rts(end.qp, own)
            ):
                raise OSError("ibv_modify_qp")
        return first, second

    def _pair_by_cm(
        self, path: Path, other: Path, cqe: int, srq: bool, channel: bool
    ) -> tuple[End, End]:
        server, client = Agent(self), Agent(self)
        _, port = server.listener()
        out = client.resolved(port)
        first = self.equip(out, path, cqe=cqe, channel=channel)
        lib.rdma_connect(out, self.conn(path))
        taken = server.next().id
        second = self.equip(taken, other, cqe=cqe, srq=srq, channel=channel)
        lib.rdma_accept(taken, self.conn(other))
        if client.next().type != lib.RDMA_CM_EVENT_ESTABLISHED:
            raise OSError("not connected")
        server.next()
        return first, second

    def pd_of(self, id: Any) -> Any:
        """A domain in the context of an id."""
        key = int(ffi.cast("uintptr_t", id.verbs))
        if key not in self._pds:
            self._pds[key] = lib.ibv_alloc_pd(id.verbs)
        return self._pds[key]

    def equip(
        self,
        id: Any,
        path: Path = USUAL,
        cqe: int = 32,
        srq: bool = False,
        channel: bool = False,
        type: int = lib.IBV_QPT_RC,
    ) -> End:
        """Give an id a queue pair, by rdma_create_qp()."""
        pd = self.pd_of(id)
        cq = self.cq(cqe, self.channel(id.verbs) if channel else ffi.NULL, context=id.verbs)
        queue = self.srq(pd=pd) if srq else ffi.NULL
        init = self.init_attr(cq, type, srq=queue, path=path)
        direct.rdma_create_qp(pointer(id), pointer(pd), pointer(init))
        return End(id.qp, cq, pd, self.memory(pd=pd))

    def conn(self, path: Path = USUAL, data: bytes = b"", **more: int) -> Any:
        """The parameter of rdma_connect() and rdma_accept()."""
        param = ffi.new("struct rdma_conn_param *")
        own = ffi.new("char[]", data)
        _kept.append(own)
        param.private_data, param.private_data_len = own, len(data)
        param.responder_resources, param.initiator_depth = path.dest_rd, path.rd
        param.retry_count, param.rnr_retry_count = path.retry, path.rnr_retry
        for name, value in more.items():
            setattr(param, name, value)
        return param

    # ---- requests

    def wr(
        self,
        wr_id: int,
        sges: list[tuple[int, int, int]],
        opcode: int = lib.IBV_WR_SEND,
        flags: int = lib.IBV_SEND_SIGNALED,
        to: tuple[int, int] = (0, 0),
        imm: int = 0,
        key: int | None = None,
        compare_add: int | None = None,
        swap: int = 0,
    ) -> Any:
        """A send request."""
        wr = ffi.new("struct ibv_send_wr *")
        wr.wr_id, wr.opcode, wr.send_flags = wr_id, opcode, flags
        wr.sg_list, wr.num_sge = self.sges(sges), len(sges)
        if key is None:
            wr.imm_data = socket.htonl(imm)
        else:
            wr.invalidate_rkey = key
        if compare_add is None:
            wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = to
        else:
            wr.wr.atomic.remote_addr, wr.wr.atomic.rkey = to
            wr.wr.atomic.compare_add, wr.wr.atomic.swap = compare_add, swap
        return wr

    def sges(self, pieces: list[tuple[int, int, int]]) -> Any:
        made = ffi.new("struct ibv_sge[]", max(1, len(pieces)))
        for sge, piece in zip(made, pieces, strict=False):
            sge.addr, sge.length, sge.lkey = piece
        _kept.append(made)
        return made

    def post(self, qp: Any, *wrs: Any) -> int:
        """Post a list of send requests."""
        for before, after in itertools.pairwise(wrs):
            before.next = after
        _kept.append(wrs)
        return int(lib.ibv_post_send(qp, wrs[0], ffi.new("struct ibv_send_wr **")))

    def send(self, qp: Any, wr_id: int, sges: list[tuple[int, int, int]], **more: Any) -> int:
        return self.post(qp, self.wr(wr_id, sges, **more))

    def write(
        self,
        qp: Any,
        wr_id: int,
        sges: list[tuple[int, int, int]],
        to: tuple[int, int],
        **more: Any,
    ) -> int:
        return self.send(qp, wr_id, sges, opcode=lib.IBV_WR_RDMA_WRITE, to=to, **more)

    def read(
        self,
        qp: Any,
        wr_id: int,
        sges: list[tuple[int, int, int]],
        to: tuple[int, int],
        **more: Any,
    ) -> int:
        return self.send(qp, wr_id, sges, opcode=lib.IBV_WR_RDMA_READ, to=to, **more)

    def recv(self, queue: Any, *requests: tuple[int, list[tuple[int, int, int]]]) -> int:
        """Post a list of receives, to a queue pair or to a shared queue."""
        wrs = ffi.new("struct ibv_recv_wr[]", len(requests))
        for number, (wr_id, sges) in enumerate(requests):
            wrs[number].wr_id, wrs[number].num_sge = wr_id, len(sges)
            wrs[number].sg_list = self.sges(sges)
            if number + 1 < len(requests):
                wrs[number].next = wrs + number + 1
        bad = ffi.new("struct ibv_recv_wr **")
        shared = ffi.typeof(queue) is ffi.typeof("struct ibv_srq *")
        call = lib.ibv_post_srq_recv if shared else lib.ibv_post_recv
        return int(call(queue, wrs, bad))

    # ---- what comes

    def poll(self, cq: Any) -> Any:
        """A completion, or None."""
        wc = ffi.new("struct ibv_wc *")
        return wc if lib.ibv_poll_cq(cq, 1, wc) == 1 else None

    def wait(self, cq: Any, count: int = 1, bound: float = LONG_S) -> Any:
        """Wait for so many completions; the last one, or None, and a line, if they do not come."""
        last = None
        for _ in _until(bound):
            while count and (wc := self.poll(cq)) is not None:
                last, count = wc, count - 1
            if not count:
                return last
        note(f"{count} completions did not come")
        return None

    def rest(self, cq: Any, bound: float = SHORT_S) -> None:
        """All that still comes: with nothing, no line."""
        for _ in _until(bound):
            while self.poll(cq) is not None:
                pass

    def event(self, channel: Any, bound: float = SHORT_S) -> None:
        """The event of a completion channel that comes within a time, acknowledged."""
        readable, _, _ = select.select([channel.fd], [], [], bound)
        if not readable:
            note("no completion event")
            return
        cq, own = ffi.new("struct ibv_cq **"), ffi.new("void **")
        if not lib.ibv_get_cq_event(channel, cq, own):
            lib.ibv_ack_cq_events(cq[0], 1)

    def async_event(self, context: Any = None, bound: float = SHORT_S) -> None:
        """The asynchronous event that comes within a time, acknowledged."""
        context = context or self.context
        readable, _, _ = select.select([context.async_fd], [], [], bound)
        if not readable:
            note("no async event")
            return
        event = ffi.new("struct ibv_async_event *")
        if not lib.ibv_get_async_event(context, event):
            lib.ibv_ack_async_event(event)


def _until(bound: float) -> Iterator[None]:
    """Rounds of a loop that looks again and again, until a time is over."""
    end = time.monotonic() + bound
    yield None
    while time.monotonic() < end:
        time.sleep(0.0005)
        yield None


_ATTRIBUTES = {
    "state": ("qp_state", lib.IBV_QP_STATE),
    "cur": ("cur_qp_state", lib.IBV_QP_CUR_STATE),
    "notify": ("en_sqd_async_notify", lib.IBV_QP_EN_SQD_ASYNC_NOTIFY),
    "access": ("qp_access_flags", lib.IBV_QP_ACCESS_FLAGS),
    "pkey_index": ("pkey_index", lib.IBV_QP_PKEY_INDEX),
    "port": ("port_num", lib.IBV_QP_PORT),
    "qkey": ("qkey", lib.IBV_QP_QKEY),
    "av": ("ah_attr", lib.IBV_QP_AV),
    "mtu": ("path_mtu", lib.IBV_QP_PATH_MTU),
    "timeout": ("timeout", lib.IBV_QP_TIMEOUT),
    "retry": ("retry_cnt", lib.IBV_QP_RETRY_CNT),
    "rnr_retry": ("rnr_retry", lib.IBV_QP_RNR_RETRY),
    "rq_psn": ("rq_psn", lib.IBV_QP_RQ_PSN),
    "sq_psn": ("sq_psn", lib.IBV_QP_SQ_PSN),
    "rd": ("max_rd_atomic", lib.IBV_QP_MAX_QP_RD_ATOMIC),
    "dest_rd": ("max_dest_rd_atomic", lib.IBV_QP_MAX_DEST_RD_ATOMIC),
    "min_rnr": ("min_rnr_timer", lib.IBV_QP_MIN_RNR_TIMER),
    "dest": ("dest_qp_num", lib.IBV_QP_DEST_QPN),
}
