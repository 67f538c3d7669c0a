"""A peer made with pyverbs: python3 -m tests.interop.pyverbs_peer SCENE ROLE ADDRESS PORT.

Runs under the Python that Debian's python3-pyverbs is for, not under the one of aiordma.

Scenes: `memory` shows a region and acts on the other's (see conversation.py), `echo` exchanges
messages, `refuse` refuses or is refused.  Whatever is not as it must be ends it with a traceback.

pyverbs passes immediates as they are, so that they are turned into network order here; it posts
them, and atomics, on its QP objects alone, which the connection manager knows by number: so the
queue pair's transitions are made here, too.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from pyverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam
from pyverbs.cq import CQ, WC, CompChannel
from pyverbs.mr import MR
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from tests.interop import conversation as c
from tests.interop.pyverbs_names import ce, e

LIMIT_S = 40
ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_WRITE
)  # fmt: skip


def expect(got: object, wanted: object, what: str) -> None:
    """An assertion that says what was compared."""
    if got != wanted:
        raise AssertionError(f"{what}: {got!r} is not {wanted!r}")


class Peer:
    """One end: connection id, queue pair, a region to show and one for messages."""

    def __init__(self, role: str, address: str, port: str) -> None:
        self.role = role
        self.channel = CMEventChannel()
        self.cmid = CMID(creator=self.channel, port_space=ce.RDMA_PS_TCP)
        self.listener = None
        if role == "server":
            where = AddrInfo(
                src=address, src_service=port, port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE
            )
            self.cmid.bind_addr(where)
            self.cmid.listen()
        else:
            where = AddrInfo(dst=address, dst_service=port, port_space=ce.RDMA_PS_TCP)
            self.cmid.resolve_addr(where)
            self.event(ce.RDMA_CM_EVENT_ADDR_RESOLVED)
            self.cmid.resolve_route()
            self.event(ce.RDMA_CM_EVENT_ROUTE_RESOLVED)
        node_type = Path(f"/sys/class/infiniband/{self.cmid.dev_name}/node_type").read_text()
        self.iwarp = node_type.startswith("4:")
        self.parts: list[Any] = []

    # Connection

    def event(self, *kinds: int) -> tuple[int, bytes]:
        """The next event, which has to be of one of these kinds, and its private data."""
        event = CMEvent(self.channel)
        kind, data = event.event_type, event.private_data
        if kind == ce.RDMA_CM_EVENT_CONNECT_REQUEST:
            self.listener = self.cmid
            self.cmid = CMID(creator=event, listen_id=self.listener)
        if kind not in kinds:
            raise AssertionError(f"the event {event.event_str()} came, with {data!r}")
        event.close()
        return kind, data

    def make_queue_pair(self) -> None:
        context, pd = self.cmid.context, self.cmid.pd
        self.completions = CompChannel(context)
        self.cq = CQ(context, 32, None, self.completions, 0)
        self.cq.req_notify()
        attr = QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=QPCap(max_send_wr=8, max_recv_wr=8)
        )
        self.qp = QP(pd, attr)
        self.move(e.IBV_QPS_INIT)
        atomic = 0 if self.iwarp else e.IBV_ACCESS_REMOTE_ATOMIC
        self.region = MR(pd, c.SIZE, ACCESS | atomic)
        self.region.write(c.fresh(self.role), c.SIZE)
        self.words = MR(pd, 2 * c.SIZE, ACCESS)
        self.words.write(c.POISON * 2 * c.SIZE, 2 * c.SIZE)
        self.parts = [self.qp, self.region, self.words, self.cq, self.completions]
        self.pending: list[WC] = []
        self.flushed = False

    def move(self, *states: int) -> None:
        for state in states:
            attr, mask = self.cmid.init_qp_attr(state)
            self.qp.modify(attr, mask)

    def parameters(self, private_data: bytes) -> ConnParam:
        param = ConnParam(
            resources=4, depth=4, retry=6, rnr_retry=6, qp_num=self.qp.qp_num,
            data_len=len(private_data),
        )  # fmt: skip
        param.set_private_data(private_data)
        return param

    def connect(self) -> None:
        """Connect or be connected, with private data both ways and two receives posted."""
        if self.role == "server":
            _, data = self.event(ce.RDMA_CM_EVENT_CONNECT_REQUEST)
            expect(data[: len(c.CALL)], c.CALL, "private data of the request")
            expect(data[len(c.CALL) :].strip(b"\0"), b"", "its padding")
            self.make_queue_pair()
            self.post_recv(2)
            if not self.iwarp:
                self.move(e.IBV_QPS_RTR, e.IBV_QPS_RTS)
            self.cmid.accept(self.parameters(c.ANSWER))
            self.event(ce.RDMA_CM_EVENT_ESTABLISHED)
            return
        self.make_queue_pair()
        self.post_recv(2)
        self.cmid.connect(self.parameters(c.CALL))
        kind, data = self.event(
            ce.RDMA_CM_EVENT_CONNECT_RESPONSE, ce.RDMA_CM_EVENT_ESTABLISHED
        )  # fmt: skip
        expect(data[: len(c.ANSWER)], c.ANSWER, "private data of the answer")
        expect(data[len(c.ANSWER) :].strip(b"\0"), b"", "its padding")
        # iWARP connects a queue pair itself, and has nothing to establish.
        if kind == ce.RDMA_CM_EVENT_CONNECT_RESPONSE:
            # Once more to INIT: only now the connection manager proposes to let the peer read.
            self.move(e.IBV_QPS_INIT, e.IBV_QPS_RTR, e.IBV_QPS_RTS)
            self.cmid.establish()

    def hang_up(self) -> None:
        """The client ends the connection."""
        if self.role == "client":
            self.cmid.disconnect()
        self.event(ce.RDMA_CM_EVENT_DISCONNECTED)
        if self.role == "server":
            self.cmid.disconnect()
        self.qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)

    def close(self) -> None:
        for part in (*self.parts, self.cmid, self.listener, self.channel):
            if part is not None:
                part.close()

    # Requests

    def completion(self, *opcodes: int, last: bool = False) -> WC | None:
        """The next completion of one of these kinds; what comes before it is kept.

        None if it was flushed: the other may hang up after the last message (`last`), and before
        its adapter has acknowledged it.
        """
        while True:
            for wc in self.pending:
                if wc.opcode in opcodes:
                    self.pending.remove(wc)
                    return wc
            if self.flushed:
                expect(last, True, "flushed, after the last message")
                return None
            _, found = self.cq.poll(8)
            if not found:
                self.completions.get_cq_event(self.cq)
                self.cq.ack_events(1)
                self.cq.req_notify()
                _, found = self.cq.poll(8)
            for wc in found:
                if wc.status == e.IBV_WC_WR_FLUSH_ERR:
                    self.flushed = True
                    continue
                expect(wc.status, e.IBV_WC_SUCCESS, f"status of {wc}")
                self.pending.append(wc)

    def post_recv(self, count: int = 1) -> None:
        """Receives into the first half of the words."""
        for _ in range(count):
            self.qp.post_recv(RecvWR(1, 1, [SGE(self.words.buf, c.SIZE, self.words.lkey)]))

    def received(self, size: int, imm: int) -> bytes:
        """The next message, which has this size and this immediate."""
        wc = self.completion(e.IBV_WC_RECV, e.IBV_WC_RECV_RDMA_WITH_IMM)
        assert wc is not None
        expect(wc.byte_len, size, "bytes of the message")
        if not self.iwarp:
            expect(bool(wc.wc_flags & e.IBV_WC_WITH_IMM), True, "immediate there")
            expect(socket.ntohl(wc.imm_data), imm, "immediate")
        data = self.words.read(size, 0)
        self.post_recv()
        return bytes(data)

    def run(
        self,
        opcode: int,
        done: int,
        mr: MR,
        offset: int,
        size: int,
        *,
        imm: int = 0,
        last: bool = False,
        at: tuple[int, int] = (0, 0),
        atomic: tuple[int, int] = (0, 0),
    ) -> None:
        """Post one request and await its completion."""
        wr = SendWR(
            opcode=opcode, num_sge=1, sg=[SGE(mr.buf + offset, size, mr.lkey)],
            imm_data=socket.htonl(imm),
        )  # fmt: skip
        addr, rkey = at
        if done in (e.IBV_WC_FETCH_ADD, e.IBV_WC_COMP_SWAP):
            wr.set_wr_atomic(rkey, addr, *atomic)
        elif addr:
            wr.set_wr_rdma(rkey, addr)
        self.qp.post_send(wr)
        self.completion(done, last=last)

    def send(self, data: bytes, imm: int, *, last: bool = False) -> None:
        """Send from the second half of the words; without the immediate on iWARP."""
        self.words.write(data, len(data), c.SIZE)
        opcode = e.IBV_WR_SEND if self.iwarp else e.IBV_WR_SEND_WITH_IMM
        self.run(opcode, e.IBV_WC_SEND, self.words, c.SIZE, len(data), imm=imm, last=last)


# Scenes


def memory(peer: Peer) -> None:
    peer.connect()
    shown = c.SHOWN.pack(peer.region.buf, peer.region.rkey, c.SIZE)
    if peer.role == "client":
        peer.send(shown, c.IMM_SHOWN)
    theirs = c.SHOWN.unpack(peer.received(c.SHOWN.size, c.IMM_SHOWN))
    expect(theirs[2], c.SIZE, "size of the region")
    if peer.role == "client":
        act(peer, *theirs[:2])
        endure(peer)
    else:
        peer.send(shown, c.IMM_SHOWN)
        endure(peer)
        act(peer, *theirs[:2])
    peer.hang_up()


def act(peer: Peer, base: int, rkey: int) -> None:
    """On the other's region; results and what is written lie in the second half of the words."""
    words, here, them = peer.words, c.SIZE, c.other(peer.role)

    def at(offset: int) -> tuple[int, int]:
        return base + offset, rkey

    read = (words, here, c.READ_SIZE)
    peer.run(e.IBV_WR_RDMA_READ, e.IBV_WC_RDMA_READ, *read, at=at(c.READ))
    expect(words.read(c.READ_SIZE, here), c.text(them, "source", c.READ_SIZE), "what was read")
    words.write(c.text(peer.role, "write", c.WRITE_SIZE), c.WRITE_SIZE, here)
    write = (words, here, c.WRITE_SIZE)
    peer.run(e.IBV_WR_RDMA_WRITE, e.IBV_WC_RDMA_WRITE, *write, at=at(c.WRITE))
    words.write(c.text(peer.role, "immediate", c.WRITE_IMM_SIZE), c.WRITE_IMM_SIZE, here)
    write = (words, here, c.WRITE_IMM_SIZE)
    if peer.iwarp:
        peer.run(e.IBV_WR_RDMA_WRITE, e.IBV_WC_RDMA_WRITE, *write, at=at(c.WRITE_IMM))
    else:
        opcode = e.IBV_WR_RDMA_WRITE_WITH_IMM
        peer.run(opcode, e.IBV_WC_RDMA_WRITE, *write, imm=c.IMM_WRITTEN, at=at(c.WRITE_IMM))

        def atomic(opcode: int, done: int, number: int, swap: int = 0) -> int:
            result = (words, here, c.COUNTER_SIZE)
            peer.run(opcode, done, *result, at=at(c.COUNTER), atomic=(number, swap))
            return int(struct.unpack("=Q", words.read(c.COUNTER_SIZE, here))[0])

        compare = (e.IBV_WR_ATOMIC_CMP_AND_SWP, e.IBV_WC_COMP_SWAP)
        old = atomic(e.IBV_WR_ATOMIC_FETCH_AND_ADD, e.IBV_WC_FETCH_ADD, c.ADD)
        expect(old, c.START[them], "the counter at first")
        now = c.added(them)
        expect(atomic(*compare, now, c.SWAPPED), now, "the counter after adding")
        expect(atomic(*compare, now, 0), c.SWAPPED, "the counter after the swap")
        expect(atomic(*compare, 0, 0), c.SWAPPED, "the counter after a comparison that failed")
    peer.send(b"", c.IMM_DONE, last=peer.role == "server")


def endure(peer: Peer) -> None:
    """What the other does, and what it leaves."""
    if not peer.iwarp:
        peer.received(c.WRITE_IMM_SIZE, c.IMM_WRITTEN)
    peer.received(0, c.IMM_DONE)
    left = peer.region.read(c.SIZE, 0)
    expect(left, c.acted_on(peer.role, atomics=not peer.iwarp), "the region")


def echo(peer: Peer) -> None:
    peer.connect()
    for size in c.ECHOES:
        there, back = c.text("client", "echo", size), c.text("server", "echo", size)
        if peer.role == "client":
            peer.send(there, c.IMM_ECHO + size)
            expect(peer.received(size, c.IMM_BACK + size), back, "the answer")
        else:
            expect(peer.received(size, c.IMM_ECHO + size), there, "the message")
            peer.send(back, c.IMM_BACK + size, last=size == c.ECHOES[-1])
    peer.hang_up()


def refuse(peer: Peer) -> None:
    if peer.role == "server":
        peer.event(ce.RDMA_CM_EVENT_CONNECT_REQUEST)
        peer.cmid.reject(c.REFUSAL)
        return
    peer.make_queue_pair()
    peer.cmid.connect(peer.parameters(c.CALL))
    _, data = peer.event(ce.RDMA_CM_EVENT_REJECTED)
    expect(data[: len(c.REFUSAL)], c.REFUSAL, "private data of the refusal")
    expect(data[len(c.REFUSAL) :].strip(b"\0"), b"", "its padding")


def main() -> None:
    scene, role, address, port = sys.argv[1:]
    # pyverbs waits in C; the signal's own effect ends that, too.
    signal.alarm(LIMIT_S)
    peer = Peer(role, address, port)
    {"memory": memory, "echo": echo, "refuse": refuse}[scene](peer)
    peer.close()
    print("all as it must be")


if __name__ == "__main__":
    main()
