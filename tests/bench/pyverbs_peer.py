"""The same exchanges as a script with pyverbs: pyverbs_peer.py ROLE ADDRESS PORT ROUNDS.

Runs under the Python that Debian's python3-pyverbs is for.  It does what a careful user of pyverbs
does: work requests are built once, a send is signalled only now and then, and after an event the
queue is armed and then polled until it is empty.  The client prints one JSON object: lists of
figures, the unit at the end of each name.

`poll` stands for a loop around `CQ.poll`.  With one CPU for both ends such a loop must give way, or
the other end would wait for the scheduler's tick: it calls `sched_yield` when it finds nothing.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from typing import Any

from pyverbs.cmid import ConnParam
from pyverbs.cq import CQ, CompChannel
from pyverbs.mr import MR
from pyverbs.qp import QP, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from tests.interop import pyverbs_peer as base
from tests.interop.pyverbs_names import e

DEPTH, RECEIVES = 128, 512
ROOM = 1 << 20
TRIPS, WARM_UP = 300, 30
#: Every so many sends one is signalled; a quarter of the depth, so that the queue never runs dry.
SIGNALED = 32
SHOWN = struct.Struct("!QI")
#: How many messages a bandwidth is taken over, by their size: multiples of SIGNALED.
COUNTS = {64: 2048, 65_536: 320, ROOM: 32}


class Queue:
    """A completion queue with its events."""

    def __init__(self, context: Any, room: int) -> None:
        self._channel = CompChannel(context)
        self._cq = CQ(context, room, None, self._channel, 0)
        self._cq.req_notify()

    @property
    def cq(self) -> CQ:
        """For the queue pair."""
        return self._cq

    def take(self) -> int:
        """How many completions are there now; they are taken."""
        total = 0
        while True:
            count, found = self._cq.poll(16)
            for wc in found:
                if wc.status != e.IBV_WC_SUCCESS:
                    raise AssertionError(f"status {wc.status}")
            total += int(count)
            if count < 16:
                return total

    def wait(self) -> int:
        """Sleep until there are some, and take them."""
        while True:
            self._channel.get_cq_event(self._cq)
            self._cq.ack_events(1)
            self._cq.req_notify()
            if count := self.take():
                return count

    def spin(self) -> int:
        """Look until there are some, and take them."""
        while not (count := self.take()):
            os.sched_yield()
        return count

    def close(self) -> None:
        self._cq.close()
        self._channel.close()


class Peer(base.Peer):
    """One end; the sides of every exchange are methods."""

    def make_queue_pair(self) -> None:
        context, pd = self.cmid.context, self.cmid.pd
        self.sent, self.got = Queue(context, 2 * DEPTH), Queue(context, 2 * RECEIVES)
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=RECEIVES)
        self.qp = QP(
            pd,
            QPInitAttr(
                qp_type=e.IBV_QPT_RC, scq=self.sent.cq, rcq=self.got.cq, cap=cap, sq_sig_all=0
            ),
        )
        self.move(e.IBV_QPS_INIT)
        self.region = MR(pd, ROOM, base.ACCESS)
        self.parts = [self.qp, self.region, self.sent, self.got]
        self.receive = RecvWR(1, 1, [SGE(self.region.buf, ROOM, self.region.lkey)])
        self.held = self.left = 0

    def parameters(self, private_data: bytes) -> ConnParam:
        param = ConnParam(
            resources=DEPTH, depth=DEPTH, retry=6, rnr_retry=6, qp_num=self.qp.qp_num,
            data_len=len(private_data),
        )  # fmt: skip
        param.set_private_data(private_data)
        return param

    def post_recv(self, count: int = 1) -> None:
        for _ in range(count):
            self.qp.post_recv(self.receive)

    def wr(
        self, opcode: int, size: int, at: tuple[int, int] | None = None
    ) -> tuple[SendWR, SendWR]:
        """The same work request without and with a completion."""
        pair = []
        for flags in 0, e.IBV_SEND_SIGNALED:
            piece = SGE(self.region.buf, size, self.region.lkey)
            pair.append(SendWR(opcode=opcode, num_sge=1, sg=[piece], send_flags=flags))
            if at is not None:
                pair[-1].set_wr_rdma(at[1], at[0])
        return pair[0], pair[1]

    def meet(self) -> tuple[int, int]:
        """Exchange where the regions are; all receives are posted then."""
        self.post_recv(RECEIVES - 2)
        shown = SHOWN.pack(self.region.buf, self.region.rkey)
        if self.role == "server":
            self.got.wait()
        theirs = self.region.read(SHOWN.size, 0) if self.role == "server" else b""
        self.region.write(shown, SHOWN.size)
        self.qp.post_send(self.wr(e.IBV_WR_SEND, SHOWN.size)[1])
        self.sent.wait()
        if self.role == "client":
            self.got.wait()
            theirs = self.region.read(SHOWN.size, 0)
        self.post_recv()
        address, key = SHOWN.unpack(theirs)
        return int(address), int(key)

    # Exchanges

    def ping_pong(self, *, spinning: bool) -> float:
        """Half a round trip of 64 bytes, in microseconds."""
        wait = self.got.spin if spinning else self.got.wait
        plain, signaled = self.wr(e.IBV_WR_SEND, 64)
        client = self.role == "client"
        start = 0.0
        for number in range(WARM_UP + TRIPS):
            if number == WARM_UP:
                start = time.perf_counter()
            if not client:
                wait()
                self.post_recv()
            last = number % SIGNALED == SIGNALED - 1
            self.qp.post_send(signaled if last else plain)
            if last:
                self.sent.take()
            if client:
                wait()
                self.post_recv()
        took = time.perf_counter() - start
        # Nothing is left over for the next exchange.
        if client:
            self.qp.post_send(signaled)
        self.got.wait()
        self.post_recv()
        if not client:
            self.qp.post_send(signaled)
        self.sent.wait()
        return took / TRIPS / 2 * 1e6

    def latency(self, opcode: int, at: tuple[int, int], *, spinning: bool) -> float:
        """One operation of 64 bytes and its completion, in microseconds."""
        wait = self.sent.spin if spinning else self.sent.wait
        _, signaled = self.wr(opcode, 64, at)
        start = 0.0
        for number in range(WARM_UP + TRIPS):
            if number == WARM_UP:
                start = time.perf_counter()
            self.qp.post_send(signaled)
            wait()
        return (time.perf_counter() - start) / TRIPS * 1e6

    def stream(self, opcode: int, size: int, at: tuple[int, int] | None) -> tuple[float, float]:
        """As many of them as the queue holds at a time: MiB/s, millions a second."""
        plain, signaled = self.wr(opcode, size, at)
        count, room, done = COUNTS[size], DEPTH, 0
        start = time.perf_counter()
        for number in range(1, count + 1):
            if not room:
                taken = self.sent.wait() * SIGNALED
                room += taken
                done += taken
            self.qp.post_send(signaled if number % SIGNALED == 0 else plain)
            room -= 1
        while done < count:
            done += self.sent.wait() * SIGNALED
        took = time.perf_counter() - start
        return count * size / took / 2**20, count / took / 1e6

    def endure(self, count: int) -> None:
        """Take so many messages."""
        while count:
            taken = self.got.wait()
            self.post_recv(taken)
            count -= taken


def serve(peer: Peer, rounds: int) -> None:
    """The server's sides."""
    peer.meet()
    for _ in range(rounds):
        for spinning in False, True:
            peer.ping_pong(spinning=spinning)
        peer.endure(sum(COUNTS.values()))
        peer.qp.post_send(peer.wr(e.IBV_WR_SEND, 1)[1])
        peer.sent.wait()


def measure(peer: Peer, rounds: int) -> dict[str, list[float]]:
    """The client's sides."""
    at = peer.meet()
    told: dict[str, list[float]] = {}

    def tell(name: str, value: float) -> None:
        told.setdefault(name, []).append(value)

    def bandwidth(name: str, opcode: int, at: tuple[int, int] | None) -> None:
        for size in COUNTS:
            mib, millions = peer.stream(opcode, size, at)
            tell(f"event {name} {size} MiB/s", mib)
            tell(f"event {name} {size} Mpps", millions)

    one_sided = {"read": e.IBV_WR_RDMA_READ, "write": e.IBV_WR_RDMA_WRITE}
    for _ in range(rounds):
        for wait in "event", "poll":
            tell(f"{wait} send us", peer.ping_pong(spinning=wait == "poll"))
        for name, opcode in one_sided.items():
            for wait in "event", "poll":
                tell(f"{wait} {name} us", peer.latency(opcode, at, spinning=wait == "poll"))
            bandwidth(name, opcode, at)
        bandwidth("send", e.IBV_WR_SEND, None)
        peer.got.wait()
        peer.post_recv()
    return told


def main() -> None:
    role, address, port, rounds = sys.argv[1:]
    peer = Peer(role, address, port)
    peer.connect()
    if role == "client":
        print(json.dumps(measure(peer, int(rounds))))
    else:
        serve(peer, int(rounds))
    peer.hang_up()
    peer.close()


if __name__ == "__main__":
    main()
