"""Latency on the native layer: prepared posts, and one completion awaited for each.

With `--wait event` the loop drains the completion queue and `anext(cq)` is awaited; otherwise the
queue is polled here.  Only every 16th send is signaled: the answer proves that a message arrived.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiordma.cli.perf.answering import Answering
from aiordma.cli.perf.kinds import Stop
from aiordma.cli.perf.native_ends import INLINE, End
from aiordma.cli.perf.options import Plan
from aiordma.verbs.enums import Opcode, SendFlags
from aiordma.verbs.prepared import PreparedPost
from aiordma.verbs.wr import SGE, RecvWR, SendWR

__all__ = ["PingPong", "one_sided_lat"]

_SIGNAL_EVERY = 16
_RECEIVES = 8
_OPCODES = {
    "write": Opcode.RDMA_WRITE,
    "read": Opcode.RDMA_READ,
    "atomic": Opcode.ATOMIC_FETCH_AND_ADD,
}


def _waiting(end: End, plan: Plan) -> Callable[[], Awaitable[object]]:
    """The function that awaits the next completion."""
    if plan.wait != "event":
        return end.completions.some
    cq = end.cq

    async def one() -> None:
        completion = await anext(cq)
        if not completion.ok:
            raise completion.error("the measurement")

    return one


class PingPong:
    """Messages there and back over one queue pair.

    Its receives are as long as the longest message, and stay posted from run to run.
    """

    def __init__(self, end: End, plan: Plan) -> None:
        self._end = end
        self._receive = end.qp.prepare_recv(RecvWR(0, [SGE(end.mr)])).execute
        self._silent: PreparedPost | None = None
        self._loud: PreparedPost | None = None
        self._wait = _waiting(end, plan)
        self._sent = 0
        for _ in range(min(plan.rx_depth, _RECEIVES)):
            self._receive()

    def prepare(self, size: int) -> None:
        """Send messages of `size` bytes from now on."""
        for post in (self._silent, self._loud):
            if post is not None:
                post.free()
        qp, piece = self._end.qp, [SGE(self._end.mr, 0, size)]
        flags = SendFlags(0)
        if size <= min(INLINE, qp.limits.max_inline_data):
            flags = SendFlags.INLINE
        self._silent = qp.prepare_send(SendWR(0, piece, send_flags=flags))
        self._loud = qp.prepare_send(SendWR(0, piece, send_flags=flags | SendFlags.SIGNALED))

    def _send(self) -> None:
        assert self._silent is not None
        assert self._loud is not None
        self._sent += 1
        if self._sent % _SIGNAL_EVERY:
            self._silent.execute()
            return
        # The signaled one before has long completed: its answer has come.
        self._end.other.poll_count()
        self._loud.execute()

    async def measure(self, stop: Stop) -> list[int]:
        """Ping."""
        clock, wait = time.perf_counter_ns, self._wait
        now = stop.begin()
        stamps = [now]
        while len(stamps) <= stop.most and now < stop.deadline:
            self._send()
            await wait()
            self._receive()
            now = clock()
            stamps.append(now)
        return stamps

    async def answer(self, answering: Answering) -> None:
        """Pong."""
        wait = self._wait
        while True:
            await wait()
            self._receive()
            self._send()
            answering.add()


async def one_sided_lat(
    end: End, plan: Plan, size: int, remote: tuple[int, int], stop: Stop
) -> list[int]:
    """Operations on the peer's memory, one after the other.

    Args:
        end: The queue pair.
        plan: Which operation.
        size: Its bytes.
        remote: Address and key of the peer's memory.
        stop: When it ends.
    """
    flags = SendFlags.SIGNALED
    if plan.test == "write" and size <= min(INLINE, end.qp.limits.max_inline_data):
        flags |= SendFlags.INLINE
    request = SendWR(
        0, [SGE(end.mr, 0, size)], _OPCODES[plan.test], flags,
        remote_addr=remote[0], rkey=remote[1], compare_add=1,
    )  # fmt: skip
    wait = _waiting(end, plan)
    clock = time.perf_counter_ns
    with end.qp.prepare_send(request) as post:
        execute = post.execute
        now = stop.begin()
        stamps = [now]
        while len(stamps) <= stop.most and now < stop.deadline:
            execute()
            await wait()
            now = clock()
            stamps.append(now)
    return stamps
