"""Prepared posts: nothing is allocated per execution, and each is cheaper than an ordinary post.

    python -m aiordma.testing.softroce -- python tests/bench/bench_prepared.py
    python -m aiordma.testing.softroce --engine qemu --counted -- \\
        python tests/bench/bench_prepared.py

Two connected queue pairs of one process: one sends 64 bytes, the other receives them.  First the
executions are counted by tracemalloc, then timed against ordinary posts of the same requests, in
bursts that take turns.  Between two bursts the completions are polled, outside of both measures.
Ends with status 1 if an execution allocates, or is not cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiordma.verbs import SGE, CompletionQueue, RecvWR, SendWR

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.device.ends import Ends, connected

BURST = 32
ORDINARY_EVERY = 4  # of so many bursts one is posted in the ordinary way, too
PEAK_LIMIT = 2048  # bytes in a burst: blocks of the queue's order, never more than the queue holds
NET_LIMIT = 2048  # bytes after all executions
DEADLINE_S = 60.0


@dataclass
class Timing:
    """Time of posts alone."""

    posts: int = 0
    ns: int = 0
    best: float = field(default=float("inf"))

    def add(self, action: Callable[[], object]) -> None:
        """Time one burst of `action`."""
        clock = time.perf_counter_ns
        start = clock()
        for _ in range(BURST):
            action()
        took = clock() - start
        self.posts += BURST
        self.ns += took
        self.best = min(self.best, took / BURST)

    @property
    def mean(self) -> float:
        """Nanoseconds a post."""
        return self.ns / self.posts


def drain(*queues: CompletionQueue) -> None:
    """Poll until a burst has completed on each."""
    deadline = time.monotonic() + DEADLINE_S
    for cq in queues:
        left = BURST
        while left:
            got = cq.poll(BURST)
            left -= len(got)
            for completion in got:
                if not completion.ok:
                    raise completion.error("a post of the benchmark")
            if not got:
                os.sched_yield()  # the kernel works on the same processor
                if time.monotonic() > deadline:
                    raise TimeoutError


class Bench:
    """Both ends, and the same two requests prepared and not."""

    def __init__(self, ends: Ends) -> None:
        client, server = ends.client, ends.server
        self.queues = (client.cq, server.cq)
        send = SendWR(1, [SGE(client.region(64))])
        recv = RecvWR(2, [SGE(server.region(64))])
        self.prepared_send = client.qp.prepare_send(send).execute
        self.prepared_recv = server.qp.prepare_recv(recv).execute
        self.ordinary_send: Callable[[], object] = lambda: client.qp.post_send(send)
        self.ordinary_recv: Callable[[], object] = lambda: server.qp.post_recv(recv)

    def allocated(self, executions: int) -> tuple[int, int]:
        """Most bytes in a burst, and bytes after all of them."""
        for _ in range(20):  # what is made once and kept is no cost of an execution
            self.burst(self.prepared_recv, self.prepared_send)
            drain(*self.queues)
        gc.collect()
        tracemalloc.start()
        self.burst(self.prepared_recv, self.prepared_send)
        drain(*self.queues)
        gc.collect()
        beginning = tracemalloc.get_traced_memory()[0]
        most = 0
        for _ in range(executions // BURST):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            self.burst(self.prepared_recv, self.prepared_send)
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
            drain(*self.queues)
        gc.collect()
        net = tracemalloc.get_traced_memory()[0] - beginning
        tracemalloc.stop()
        return most, net

    @staticmethod
    def burst(*actions: Callable[[], object]) -> None:
        """Post a burst of each."""
        for action in actions:
            for _ in range(BURST):
                action()

    def timed(self, executions: int) -> dict[str, tuple[Timing, Timing]]:
        """Prepared and ordinary, for receives and for sends."""
        kinds = {"post_recv": (Timing(), Timing()), "post_send": (Timing(), Timing())}

        def prepared() -> None:
            kinds["post_recv"][0].add(self.prepared_recv)
            kinds["post_send"][0].add(self.prepared_send)
            drain(*self.queues)

        def ordinary() -> None:
            kinds["post_recv"][1].add(self.ordinary_recv)
            kinds["post_send"][1].add(self.ordinary_send)
            drain(*self.queues)

        prepared()
        ordinary()
        for pair in kinds.values():  # caches are warm
            for timing in pair:
                timing.__init__()  # type: ignore[misc]
        gc.disable()
        for turn in range(executions // BURST):
            prepared()
            if turn % ORDINARY_EVERY == 0:
                ordinary()
        gc.enable()
        return kinds


async def main(executions: int) -> bool:
    """Measure and print; whether all is as promised."""
    engine = os.environ.get("AIORDMA_SOFTROCE_ENGINE", "this machine")
    device = os.environ.get("AIORDMA_SOFTROCE_DEVICE", "device")
    counted = bool(os.environ.get("AIORDMA_SOFTROCE_COUNTED"))
    clock = "counted time" if counted else "wall time"
    print("command:", " ".join(sys.orig_argv))
    print(f"{engine}, {device}, {clock}; {executions} executions in bursts of {BURST}")
    address = os.environ["AIORDMA_SOFTROCE_ADDR"]
    async with connected(address, max_send_wr=2 * BURST, max_recv_wr=2 * BURST) as ends:
        bench = Bench(ends)
        executions -= executions % BURST
        kinds = bench.timed(executions)
        most, net = bench.allocated(executions)
    good = most <= PEAK_LIMIT and net <= NET_LIMIT
    print(f"allocated: {net} bytes after {2 * executions} executions (limit {NET_LIMIT});", end=" ")
    print(f"at most {most} bytes in a burst of {2 * BURST} (limit {PEAK_LIMIT})")
    for name, (prepared, ordinary) in kinds.items():
        ratio = prepared.mean / ordinary.mean
        print(
            f"{name}: prepared {prepared.mean / 1000:.2f} us (best burst {prepared.best / 1000:.2f}"
            f"), ordinary {ordinary.mean / 1000:.2f} us (best burst {ordinary.best / 1000:.2f}), "
            f"{clock} ratio {ratio:.3f}"
        )
        good = good and ratio < 1
    print("ok" if good else "FAILED")
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--executions", type=int, default=100_000)
    sys.exit(0 if asyncio.run(main(parser.parse_args().executions)) else 1)
