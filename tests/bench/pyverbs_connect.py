"""Connections with pyverbs, one after the other: pyverbs_connect.py ROLE ADDRESS PORT ROUNDS.

The client prints the connections a second of each round as JSON.  As in pyverbs_peer, all is done
in the plainest way: an id, a queue pair with its completion queue, a small region, two receives.
With one CPU it does not matter that they are made one at a time: what waits costs nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time

from tests.interop import pyverbs_peer as base

CONNECTIONS = 20


class Server(base.Peer):
    """Takes one connection after the other."""

    def __init__(self, address: str, port: str) -> None:
        super().__init__("server", address, port)
        self.first = self.cmid
        self.kept: list[object] = []

    def take(self) -> None:
        """The next one."""
        self.cmid = self.first
        self.connect()
        self.kept += [self.cmid, *self.parts]


def rate(peers: list[base.Peer], address: str, port: str) -> float:
    """Connections a second."""
    start = time.perf_counter()
    for _ in range(CONNECTIONS):
        peers.append(base.Peer("client", address, port))
        peers[-1].connect()
    return CONNECTIONS / (time.perf_counter() - start)


def main() -> None:
    role, address, port, rounds = sys.argv[1:]
    if role == "server":
        server = Server(address, port)
        for _ in range((int(rounds) + 1) * CONNECTIONS):
            server.take()
    else:
        peers: list[base.Peer] = []
        rate(peers, address, port)  # what is loaded and looked up once
        rates = [rate(peers, address, port) for _ in range(int(rounds))]
        print(json.dumps({"connections a second": rates}), flush=True)
    # All connections end with their process; taking them down one by one proves nothing here.
    os._exit(0)


if __name__ == "__main__":
    main()
