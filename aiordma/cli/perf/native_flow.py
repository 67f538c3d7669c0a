"""Bandwidth and rate on the native layer: lists of prepared requests, nothing copied.

The sender keeps `tx_depth` requests under way, in lists of `post_list` with one doorbell each, of
which only the last is signaled.  The receiver posts its receives in chains, and again as soon as a
chain has been used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiordma.cli.perf.answering import Answering
from aiordma.cli.perf.kinds import Stop
from aiordma.cli.perf.native_ends import End
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.report import Flow, peak_per_second
from aiordma.verbs.enums import Opcode, SendFlags
from aiordma.verbs.prepared import PreparedPost
from aiordma.verbs.wr import SGE, RecvWR, SendWR

__all__ = ["Stretch", "Taker", "flow", "joined"]

_CHAINS = 8  # of receives, as many as fit
_OPCODES = {
    "send": Opcode.SEND,
    "write": Opcode.RDMA_WRITE,
    "read": Opcode.RDMA_READ,
    "atomic": Opcode.ATOMIC_FETCH_AND_ADD,
}


def _list(end: End, plan: Plan, size: int, remote: tuple[int, int], count: int) -> PreparedPost:
    """`count` equal requests, of which the last is signaled."""
    piece = [SGE(end.mr, 0, size)]
    return end.qp.prepare_send(
        [
            SendWR(
                0, piece, _OPCODES[plan.test],
                SendFlags.SIGNALED if i + 1 == count else SendFlags(0),
                remote_addr=remote[0], rkey=remote[1], compare_add=1,
            )
            for i in range(count)
        ]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stretch:
    """The messages of one queue pair; times are nanoseconds.

    Attributes:
        messages: Number of messages.
        begun: Time of the first post.
        ended: Time of the last completion.
        posted: When each full list was posted.
        completed: When each had completed.
        weight: Messages of a full list.
    """

    messages: int
    begun: int
    ended: int
    posted: list[int]
    completed: list[int]
    weight: int


async def flow(end: End, plan: Plan, size: int, remote: tuple[int, int], stop: Stop) -> Stretch:
    """Keep one queue pair busy.

    Args:
        end: The queue pair.
        plan: Which operation, depth and list.
        size: Bytes of a request.
        remote: Address and key of the peer's memory; not used for sends.
        stop: When it ends.
    """
    weight = min(plan.post_list, stop.most)
    lists, rest = divmod(stop.most, weight)
    room = max(1, plan.tx_depth // weight)
    completions = end.completions
    clock = time.perf_counter_ns
    posted: list[int] = []
    completed: list[int] = []
    tail = _list(end, plan, size, remote, rest) if rest else None
    with _list(end, plan, size, remote, weight) as post:
        now = begun = stop.begin()
        while True:
            while len(posted) - len(completed) < room and len(posted) < lists:
                if now >= stop.deadline:
                    lists = len(posted)
                    break
                posted.append(clock())
                post.execute()
            if len(completed) >= lists:
                break
            count = await completions.some()
            now = clock()
            completed.extend([now] * count)
        done = lists * weight
        if tail is not None and done + rest == stop.most:
            tail.execute()
            await completions.some()
            now = clock()
            done += rest
    if tail is not None:
        tail.free()
    return Stretch(done, begun, now, posted, completed, weight)


def joined(stretches: Sequence[Stretch]) -> Flow:
    """The flow of several queue pairs at the same time."""
    posted = sorted(one for each in stretches for one in each.posted)
    completed = sorted(one for each in stretches for one in each.completed)
    begun = min(each.begun for each in stretches)
    ended = max(each.ended for each in stretches)
    return Flow(
        sum(each.messages for each in stretches),
        (ended - begun) / 1e9,
        peak_per_second(posted, completed, stretches[0].weight),
    )


class Taker:
    """Takes the messages of one queue pair; its receives stay posted from run to run."""

    def __init__(self, end: End, plan: Plan) -> None:
        self._chain = max(1, plan.rx_depth // _CHAINS)
        receive = RecvWR(0, [SGE(end.mr)])
        self._post = end.qp.prepare_recv([receive] * self._chain)
        self._completions = end.completions
        self._used = 0
        for _ in range(plan.rx_depth // self._chain):
            self._post.execute()

    async def take(self, answering: Answering) -> None:
        """Receive, and post again."""
        chain, execute = self._chain, self._post.execute
        while True:
            count = await self._completions.some()
            self._used += count
            while self._used >= chain:
                self._used -= chain
                execute()
            answering.add(count)
