"""64 bytes there and back with the package `ibverbs` off PyPI: `main([ROLE, ADDRESS, PORT])`.

A blocking script, as careful as one is: work requests are built once, a send asks for a completion
now and then, and after an event the queue is armed and then polled until it is empty.  Both ends
write their message into the registered memory and read the message that came, as the ordinary
program does.  The client prints one JSON object: half a round trip in microseconds.

The package cannot listen with the connection manager; the ends tell each other their queue pairs
over TCP.
"""

from __future__ import annotations

import json
import mmap
import socket
import sys
import time
from ctypes import addressof, c_char

import ibverbs as ib

__all__ = ["main"]

SIZE, TRIPS, WARM_UP = 64, 400, 20
RECEIVES = 64
#: Each so many sends one has a completion.
SIGNALED = 32
#: The GID of RoCE v2 and IPv4, and the port of the device.
GID, PORT = 1, 1


class Peer:
    """One end: a queue pair with two slots, for the message that goes and for all that come."""

    def __init__(self, context: ib.Context) -> None:
        self._pd = context.alloc_pd()
        self._channel = context.create_comp_channel()
        self._arrived = context.create_cq(RECEIVES, self._channel)
        self._sent = context.create_cq(2 * SIGNALED)
        self._memory = mmap.mmap(-1, 2 * SIZE)
        at = addressof(c_char.from_buffer(self._memory))
        access = ib.AccessFlags.LOCAL_WRITE
        self._region = self._pd.reg_mr(at, 2 * SIZE, access)
        attributes = ib.QPInitAttr(
            self._sent, self._arrived, ib.QPType.RC, 2 * SIGNALED, RECEIVES, max_inline_data=SIZE
        )
        self._qp = self._pd.create_qp(attributes)
        local = ib.local_qp_info(
            self._qp, context.query_port(PORT), context.query_gid(PORT, GID), port=PORT
        )
        self.info: bytes = local.to_bytes()
        going, coming = ib.SGE(self._region, SIZE), ib.SGE(self._region, SIZE, offset=SIZE)
        self._receive = ib.RecvWR(0, [coming])
        self._send, self._signaled = (
            ib.SendWR(0, [going], ib.WROpcode.SEND, ib.SendFlags.INLINE | more)
            for more in (0, ib.SendFlags.SIGNALED)
        )
        self._number = 0

    def connect(self, info: bytes) -> None:
        """Connect to the queue pair of the peer; receives are posted then."""
        remote = ib.QPInfo.from_bytes(info)
        access = ib.AccessFlags.LOCAL_WRITE
        ib.connect_rc(self._qp, remote, port=PORT, sgid_index=GID, access=access)
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


def meet(sock: socket.socket, peer: Peer) -> None:
    """Connect both ends, and wait until both are."""
    sock.sendall(peer.info)
    peer.connect(sock.recv(len(peer.info), socket.MSG_WAITALL))
    sock.sendall(b"!")
    sock.recv(1)


def serve(peer: Peer) -> None:
    """Send each message back."""
    for _ in range(WARM_UP + TRIPS):
        peer.send(peer.recv())


def ask(peer: Peer) -> float:
    """Half a round trip in microseconds."""
    data = bytes(SIZE)
    begun = 0.0
    for number in range(-WARM_UP, TRIPS):
        if not number:
            begun = time.perf_counter()
        peer.send(data)
        peer.recv()
    return (time.perf_counter() - begun) / TRIPS / 2 * 1e6


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
            print(json.dumps({"us": ask(peer)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
