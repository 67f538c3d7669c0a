"""Prepared posts: nothing is allocated per execution, and each is cheaper than an ordinary post.

    python -m aiordma.testing.softroce -- python tests/bench/bench_prepared.py
    python -m aiordma.testing.softroce --engine qemu --counted -- \\
        python tests/bench/bench_prepared.py

Two connected queue pairs of one process: one sends 64 bytes, the other receives them.  First the
executions are timed against ordinary posts of the same requests, in bursts that take turns; then
what they allocate is counted by tracemalloc.  Completions are polled between two bursts, outside
of both measures.
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

from aiordma.verbs import SGE, RecvWR, SendWR

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.device.ends import End, Ends, connected

BURST = 32
ORDINARY_EVERY = 4  # of so many bursts one is posted in the ordinary way, too
# Bytes in a burst: the queues note their order in blocks of 64 places, which they use again.
BYTES_LIMIT = 2048
OBJECTS_LIMIT = 1000  # after all: what free lists of Python keep is counted, too
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


async def drain(*ends: End) -> None:
    """Poll until a burst has completed on each."""
    for end in ends:
        left = BURST
        while left:
            end.cq.req_notify()
            got = end.cq.poll(BURST)
            left -= len(got)
            for completion in got:
                if not completion.ok:
                    raise completion.error("a post of the benchmark")
            if left and not got:  # sleeping lets the kernel work, which may have one processor
                if await end.channel.get_cq_event(DEADLINE_S) is None:
                    raise TimeoutError
                end.cq.ack_events()


class Bench:
    """Both ends, and the same two requests prepared and not."""

    def __init__(self, ends: Ends) -> None:
        client, server = ends.client, ends.server
        self.ends = (client, server)
        send = SendWR(1, [SGE(client.region(64))])
        recv = RecvWR(2, [SGE(server.region(64))])
        self.prepared_send = client.qp.prepare_send(send).execute
        self.prepared_recv = server.qp.prepare_recv(recv).execute
        self.ordinary_send: Callable[[], object] = lambda: client.qp.post_send(send)
        self.ordinary_recv: Callable[[], object] = lambda: server.qp.post_recv(recv)

    async def allocated(self, executions: int) -> tuple[int, int, int]:
        """Most bytes at once and most that stayed in a burst, and objects that stayed of all.

        Traced in the bursts alone, because each traced allocation of the polls would cost several
        system calls; what the polls leave is in the number of objects at the end.
        """
        peak = stayed = blocks = 0
        for turn in range(-20, executions // BURST):
            if turn == 0:  # what is made once and kept is no cost of an execution
                gc.collect()
                blocks = sys.getallocatedblocks()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            self.burst(self.prepared_recv, self.prepared_send)
            after, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            if turn >= 0:
                peak, stayed = max(peak, most - before), max(stayed, after - before)
            await drain(*self.ends)
        gc.collect()
        return peak, stayed, sys.getallocatedblocks() - blocks

    @staticmethod
    def burst(*actions: Callable[[], object]) -> None:
        """Post a burst of each."""
        for action in actions:
            for _ in range(BURST):
                action()

    async def timed(self, executions: int) -> dict[str, tuple[Timing, Timing]]:
        """Prepared and ordinary, for receives and for sends."""
        kinds = {"post_recv": (Timing(), Timing()), "post_send": (Timing(), Timing())}

        async def prepared() -> None:
            kinds["post_recv"][0].add(self.prepared_recv)
            kinds["post_send"][0].add(self.prepared_send)
            await drain(*self.ends)

        async def ordinary() -> None:
            kinds["post_recv"][1].add(self.ordinary_recv)
            kinds["post_send"][1].add(self.ordinary_send)
            await drain(*self.ends)

        await prepared()
        await ordinary()
        for pair in kinds.values():  # caches are warm
            for timing in pair:
                timing.__init__()  # type: ignore[misc]
        gc.disable()
        for turn in range(executions // BURST):
            await prepared()
            if turn % ORDINARY_EVERY == 0:
                await ordinary()
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
        kinds = await bench.timed(executions)
        peak, stayed, objects = await bench.allocated(executions)
    good = peak <= BYTES_LIMIT and stayed <= BYTES_LIMIT and objects <= OBJECTS_LIMIT
    print(
        f"allocated in a burst of {2 * BURST}: at most {peak} bytes at once, {stayed} that stayed "
        f"(limit {BYTES_LIMIT}); objects after {2 * executions} executions: {objects:+} "
        f"(limit {OBJECTS_LIMIT})"
    )
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
