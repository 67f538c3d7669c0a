"""64 bytes with the package `ibverbs` off PyPI: `main([ROLE, ADDRESS, PORT])`.

A blocking script, as careful as one is: work requests are built once, a send asks for a completion
now and then, and after an event the queue is armed and then polled until it is empty.  Both ends
write their message into the registered memory and read the message that came, as the ordinary
program does.  Each exchange is done twice: the script sleeps until there is an event, or it polls,
and calls `sched_yield` when it finds nothing, because both ends share the processor.

The client prints one JSON object, microseconds: half a round trip of a message, and a whole WRITE
from the bytes of the program, one after the other.

The package cannot listen with the connection manager; the ends tell each other their queue pairs
over TCP.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from ctypes import addressof, c_char

import ibverbs as ib

__all__ = ["main"]

SIZE, TRIPS, WARM_UP = 64, 400, 20
RECEIVES = 64
#: Each so many sends one has a completion.
SIGNALED = 32
#: The GID of RoCE v2 and IPv4, and the port of the device.
GID, PORT = 1, 1
#: Address and key of the memory that the peer may write to.
PLACE = struct.Struct("!QI")
ACCESS = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE


class Peer:
    """One end: a queue pair with two slots, for the message that goes and for all that come."""

    def __init__(self, context: ib.Context) -> None:
        self._pd = context.alloc_pd()
        self._channel = context.create_comp_channel()
        self._arrived = context.create_cq(RECEIVES, self._channel)
        # It has events while it is armed: for WRITEs.
        self._ended = context.create_comp_channel()
        self._sent = context.create_cq(2 * SIGNALED, self._ended)
        self._memory = mmap.mmap(-1, 2 * SIZE)
        at = addressof(c_char.from_buffer(self._memory))
        self._region = self._pd.reg_mr(at, 2 * SIZE, ACCESS)
        attributes = ib.QPInitAttr(
            self._sent, self._arrived, ib.QPType.RC, 2 * SIGNALED, RECEIVES, max_inline_data=SIZE
        )
        self._qp = self._pd.create_qp(attributes)
        local = ib.local_qp_info(
            self._qp, context.query_port(PORT), context.query_gid(PORT, GID), port=PORT
        )
        self.info: bytes = local.to_bytes() + PLACE.pack(at + SIZE, self._region.rkey)
        going, coming = ib.SGE(self._region, SIZE), ib.SGE(self._region, SIZE, offset=SIZE)
        self._receive = ib.RecvWR(0, [coming])
        self._send, self._signaled = (
            ib.SendWR(0, [going], ib.WROpcode.SEND, ib.SendFlags.INLINE | more)
            for more in (0, ib.SendFlags.SIGNALED)
        )
        self._going = going
        self._number = 0

    def connect(self, info: bytes) -> None:
        """Connect to the queue pair of the peer; receives are posted then."""
        remote = ib.QPInfo.from_bytes(info[: -PLACE.size])
        ib.connect_rc(self._qp, remote, port=PORT, sgid_index=GID, access=ACCESS)
        address, key = PLACE.unpack(info[-PLACE.size :])
        self._write = ib.SendWR(
            0, [self._going], ib.WROpcode.RDMA_WRITE, ib.SendFlags.INLINE | ib.SendFlags.SIGNALED,
            remote_addr=address, rkey=key,
        )  # fmt: skip
        for _ in range(RECEIVES):
            self._qp.post_recv(self._receive)
        self._arrived.req_notify()

    def send(self, data: bytes) -> None:
        """Send a message."""
        self._memory[:SIZE] = data
        self._number += 1
        if self._number % SIGNALED:
            self._qp.post_send(self._send)
            return
        self._qp.post_send(self._signaled)
        self._sent.poll(2)

    def recv(self) -> bytes:
        """Sleep until a message is there, and read it."""
        while True:
            self._channel.get_cq_event()
            self._arrived.ack_events(1)
            self._arrived.req_notify()
            if found := self._arrived.poll(16):
                break
        for completion in found:
            completion.raise_for_status()
        data = self._memory[SIZE:]
        self._qp.post_recv(self._receive)
        return data

    def poll_recv(self) -> bytes:
        """Poll until a message is there, and read it."""
        while not (found := self._arrived.poll(16)):
            os.sched_yield()
        for completion in found:
            completion.raise_for_status()
        data = self._memory[SIZE:]
        self._qp.post_recv(self._receive)
        return data

    def start_writing(self) -> None:
        """Nothing is sent any more."""
        self._sent.poll(2 * SIGNALED)
        self._sent.req_notify()

    def write(self, data: bytes) -> None:
        """Write into the memory of the peer, and sleep until that has ended."""
        self._memory[:SIZE] = data
        self._qp.post_send(self._write)
        while True:
            self._ended.get_cq_event()
            self._sent.ack_events(1)
            self._sent.req_notify()
            if found := self._sent.poll(16):
                break
        for completion in found:
            completion.raise_for_status()

    def poll_write(self, data: bytes) -> None:
        """Write into the memory of the peer, and poll until that has ended."""
        self._memory[:SIZE] = data
        self._qp.post_send(self._write)
        while not (found := self._sent.poll(16)):
            os.sched_yield()
        for completion in found:
            completion.raise_for_status()


def meet(sock: socket.socket, peer: Peer) -> None:
    """Connect both ends, and wait until both are."""
    sock.sendall(peer.info)
    peer.connect(sock.recv(len(peer.info), socket.MSG_WAITALL))
    sock.sendall(b"!")
    sock.recv(1)


def serve(peer: Peer) -> None:
    """Send each message back."""
    for recv in (peer.recv, peer.poll_recv):
        for _ in range(WARM_UP + TRIPS):
            peer.send(recv())


def exchange(peer: Peer, recv: Callable[[], bytes]) -> float:
    """Half a round trip in microseconds."""
    data = bytes(SIZE)
    begun = 0.0
    for number in range(-WARM_UP, TRIPS):
        if not number:
            begun = time.perf_counter()
        peer.send(data)
        recv()
    return (time.perf_counter() - begun) / TRIPS / 2 * 1e6


def transfer(write: Callable[[bytes], None]) -> float:
    """Microseconds of a WRITE."""
    data = bytes(SIZE)
    begun = 0.0
    for number in range(-WARM_UP, TRIPS):
        if not number:
            begun = time.perf_counter()
        write(data)
    return (time.perf_counter() - begun) / TRIPS * 1e6


def ask(peer: Peer) -> dict[str, float]:
    """All figures."""
    exchanged = {"us": exchange(peer, peer.recv), "poll us": exchange(peer, peer.poll_recv)}
    peer.start_writing()
    written = {"write us": transfer(peer.write), "write poll us": transfer(peer.poll_write)}
    return exchanged | written


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, address, port = words
    peer = Peer(ib.get_device_list()[0].open())
    to = (address, int(port))
    if role == "server":
        with socket.create_server(to) as listener, listener.accept()[0] as sock:
            meet(sock, peer)
            serve(peer)
            sock.recv(1)
    else:
        with socket.create_connection(to) as sock:
            meet(sock, peer)
            print(json.dumps(ask(peer)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
