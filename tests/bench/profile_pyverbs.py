"""What the scripts with pyverbs do, with marks where their figure is taken: for profile.py.

    profile_pyverbs.py exchange|connect ROLE ADDRESS PORT

Runs under the Python that Debian's python3-pyverbs is for.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

from tests.bench import pyverbs_connect, pyverbs_peer
from tests.bench.jobs import MARKS

_marks = ctypes.CDLL(str(MARKS))


class Clock:
    """Stands in for `time` in a script: it looks at the clock when it begins, and when it ends."""

    def __init__(self) -> None:
        self._begun = False

    def perf_counter(self) -> float:
        """The time; begins or ends a window."""
        now = time.perf_counter()
        (_marks.bench_stop if self._begun else _marks.bench_start)()
        self._begun = not self._begun
        return now


def exchange(role: str, address: str, port: str) -> None:
    """Messages of 64 bytes, there and back."""
    script: Any = pyverbs_peer
    peer = pyverbs_peer.Peer(role, address, port)
    peer.connect()
    peer.meet()
    if role == "client":
        script.time = Clock()
    print(peer.ping_pong(spinning=False), flush=True)


def connect(role: str, address: str, port: str) -> None:
    """Connections, one after the other."""
    script: Any = pyverbs_connect
    if role == "server":
        server = pyverbs_connect.Server(address, port)
        for _ in range(2 * pyverbs_connect.CONNECTIONS):
            server.take()
        return
    peers: list[Any] = []
    pyverbs_connect.rate(peers, address, port)
    script.time = Clock()
    print(pyverbs_connect.rate(peers, address, port), flush=True)


if __name__ == "__main__":
    {"exchange": exchange, "connect": connect}[sys.argv[1]](*sys.argv[2:])
    # All connections end with their process.
    os._exit(0)
