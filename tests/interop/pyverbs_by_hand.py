"""A queue pair of pyverbs: python3 -m tests.interop.pyverbs_by_hand ROLE DEVICE GID_INDEX PORT.

The other side of by_hand.py, brought up without the connection manager, for Debian's Python.  The
client calls the port, the server listens there and says so.  Whatever is not as it must be ends it
with a traceback.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, WC, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from tests.interop import conversation as c
from tests.interop.pyverbs_names import e

LIMIT_S = 40
MTU = e.IBV_MTU_1024
PSN = 0x123456
RECEIVED = e.IBV_WC_RECV_RDMA_WITH_IMM
ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_WRITE
    | e.IBV_ACCESS_REMOTE_ATOMIC
)  # fmt: skip


def expect(got: object, wanted: object, what: str) -> None:
    """An assertion that says what was compared."""
    if got != wanted:
        raise AssertionError(f"{what}: {got!r} is not {wanted!r}")


def stream(role: str, port: int) -> socket.socket:
    if role == "client":
        return socket.create_connection(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", listener.getsockname()[1], flush=True)
        return listener.accept()[0]


class Peer:
    """A queue pair, a region to show, one for words, and a TCP connection."""

    def __init__(self, role: str, device: str, gid_index: str, port: str) -> None:
        self.role = role
        self.gid_index = int(gid_index)
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.completions = CompChannel(self.context)
        self.cq = CQ(self.context, 32, None, self.completions, 0)
        self.cq.req_notify()
        cap = QPCap(max_send_wr=8, max_recv_wr=8)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self.region = MR(self.pd, c.SIZE, ACCESS)
        self.region.write(c.fresh(role), c.SIZE)
        self.words = MR(self.pd, c.SIZE, ACCESS)
        self.early: list[WC] = []
        with stream(role, int(port)) as connection:
            self.file = connection.makefile("rwb")  # which keeps the connection

    def say(self, line: str) -> str:
        """Say a line, and return the line of the other."""
        self.file.write(f"{line}\n".encode())
        self.file.flush()
        return str(self.file.readline().decode().rstrip())

    def connect(self) -> None:
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        self.qp.to_init(attr)
        self.qp.post_recv(RecvWR(1, 1, [SGE(self.words.buf, 0, self.words.lkey)]))
        gid = self.context.query_gid(1, self.gid_index).gid.replace(":", "")
        told = self.say(
            f"{self.qp.qp_num:x} {PSN:x} {MTU:d} {gid} {self.region.buf:x} {self.region.rkey:x}"
        )
        number, psn, mtu, dgid, addr, rkey = told.split()
        self.theirs = int(addr, 16), int(rkey, 16)
        pieces = ":".join(dgid[n : n + 4] for n in range(0, 32, 4))
        route = GlobalRoute(dgid=GID(pieces), sgid_index=self.gid_index)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = int(number, 16), int(psn, 16), PSN
        attr.path_mtu = min(MTU, int(mtu))
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 6, 6
        self.qp.to_rts(attr)
        expect(self.say("ready"), "ready", "the word of the other")

    def completion(self, opcode: int) -> WC:
        """The next completion, which is of this opcode.

        What the peer has done, once it has a request of ours, may come before the completion of
        that request; it is kept until it is asked for.
        """
        while True:
            found = [self.early.pop()] if opcode == RECEIVED and self.early else []
            if not found:
                _, found = self.cq.poll(1)
            if not found:
                self.completions.get_cq_event(self.cq)
                self.cq.ack_events(1)
                self.cq.req_notify()
                _, found = self.cq.poll(1)
            for wc in found:
                expect(wc.status, e.IBV_WC_SUCCESS, f"status of {wc}")
                if wc.opcode == opcode:
                    return wc
                expect(wc.opcode, RECEIVED, "opcode")
                self.early.append(wc)

    def run(
        self,
        opcode: int,
        done: int,
        offset: int,
        data: bytes,
        atomic: tuple[int, int] = (0, 0),
        imm: int = 0,
    ) -> bytes:
        """Post one request and await it; returns the bytes that are in its piece then."""
        self.words.write(data, len(data))
        piece = SGE(self.words.buf, len(data), self.words.lkey)
        wr = SendWR(opcode=opcode, num_sge=1, sg=[piece], imm_data=socket.htonl(imm))
        addr, rkey = self.theirs
        if done in (e.IBV_WC_FETCH_ADD, e.IBV_WC_COMP_SWAP):
            wr.set_wr_atomic(rkey, addr + offset, *atomic)
        else:
            wr.set_wr_rdma(rkey, addr + offset)
        self.qp.post_send(wr)
        self.completion(done)
        return bytes(self.words.read(len(data), 0))

    def act(self) -> None:
        them = c.other(self.role)
        source = c.text(them, "source", c.READ_SIZE)
        read = self.run(
            e.IBV_WR_RDMA_READ, e.IBV_WC_RDMA_READ, c.READ, c.POISON * c.READ_SIZE
        )  # fmt: skip
        expect(read, source, "what was read")
        text = c.text(self.role, "write", c.WRITE_SIZE)
        self.run(e.IBV_WR_RDMA_WRITE, e.IBV_WC_RDMA_WRITE, c.WRITE, text)
        old = self.run(
            e.IBV_WR_ATOMIC_FETCH_AND_ADD, e.IBV_WC_FETCH_ADD, c.COUNTER, bytes(8), (c.ADD, 0)
        )
        expect(struct.unpack("=Q", old)[0], c.START[them], "the counter at first")
        swap = c.added(them), c.SWAPPED
        old = self.run(
            e.IBV_WR_ATOMIC_CMP_AND_SWP, e.IBV_WC_COMP_SWAP, c.COUNTER, bytes(8), swap
        )  # fmt: skip
        expect(struct.unpack("=Q", old)[0], c.added(them), "the counter after adding")
        text = c.text(self.role, "immediate", c.WRITE_IMM_SIZE)
        opcode = e.IBV_WR_RDMA_WRITE_WITH_IMM
        self.run(opcode, e.IBV_WC_RDMA_WRITE, c.WRITE_IMM, text, imm=c.IMM_WRITTEN)

    def endure(self) -> None:
        wc = self.completion(RECEIVED)
        expect(socket.ntohl(wc.imm_data), c.IMM_WRITTEN, "immediate")
        expect(wc.byte_len, c.WRITE_IMM_SIZE, "its bytes")
        left = self.region.read(c.SIZE, 0)
        expect(left, c.acted_on(self.role, atomics=True), "the region")


def main() -> None:
    # pyverbs waits in C; the signal's own effect ends that, too.
    signal.alarm(LIMIT_S)
    peer = Peer(*sys.argv[1:])
    peer.connect()
    steps = (peer.act, peer.endure)
    for step in steps if peer.role == "client" else reversed(steps):
        step()
    expect(peer.say("done"), "done", "the word of the other")
    for part in (peer.qp, peer.region, peer.words, peer.cq, peer.completions, peer.pd):
        part.close()
    peer.context.close()
    peer.file.close()
    print("all as it must be")


if __name__ == "__main__":
    main()
