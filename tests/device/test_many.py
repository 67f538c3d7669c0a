"""Two hundred connections that share what can be shared.  Prints what each of them costs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
from collections import deque

import pytest

from aiordma.verbs import SGE, MemoryRegion, RecvWR, WorkCompletion
from tests.device.fan import Fan, fan

pytestmark = pytest.mark.device

SEED = int(os.environ.get("AIORDMA_TEST_SEED", "20240817"))
# Software iWARP has 144 pages a process for all its queues, whatever the machine has.
CONNECTIONS = 30 if os.environ.get("AIORDMA_SOFTROCE_DEVICE") == "siw" else 200


def not_ready() -> int:
    """How often any device answered or heard "receiver not ready", ever."""
    shown = subprocess.run(
        ["rdma", "-j", "statistic", "show"], capture_output=True, check=False, timeout=20
    )
    # Software iWARP has no counters; there the connection would break at once.
    counters = json.loads(shown.stdout) if shown.returncode == 0 and shown.stdout else []
    return sum(
        value
        for link in counters
        for name, value in link.items()
        if "rnr" in name and isinstance(value, int)
    )


def status(name: str) -> int:
    """Bytes from /proc/self/status: VmRSS, or VmPin for what is pinned."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise AssertionError(name)


class Echo:
    """A server on one CQ and one SRQ: answers each message with its digest and its bytes."""

    def __init__(self, made: Fan, slot: int, depth: int) -> None:
        self.made = made
        self.slot = slot
        self.memory = MemoryRegion(made.pd, slot * depth)
        self.answers = MemoryRegion(made.pd, slot * len(made.servers))
        self.free = deque(range(depth))
        self.of = {qp.num: i for i, qp in enumerate(made.servers)}
        self.received = [0] * len(made.servers)
        self.refills = 0

    async def refill(self, mark: int) -> None:
        """Post what is free whenever the shared queue falls below its mark."""
        async for places in self.made.srq.refills(mark):
            slots = [self.free.popleft() for _ in range(min(places, len(self.free)))]
            self.refills += 1
            self.made.srq.post_recv(
                [RecvWR(n, [SGE(self.memory, n * self.slot, self.slot)]) for n in slots]
            )

    async def serve(self, messages: int) -> None:
        answers: set[asyncio.Task[WorkCompletion]] = set()
        for _ in range(messages):
            completion = await anext(self.made.cq)
            assert completion.ok, completion.status_name
            assert completion.byte_len is not None
            start = completion.wr_id * self.slot
            message = bytes(self.memory.view[start : start + completion.byte_len])
            self.free.append(completion.wr_id)
            who = self.of[completion.qp_num]
            self.received[who] += 1
            # A client says who it is: the number of the queue pair has to agree.
            assert int.from_bytes(message[:2], "big") == who
            answer = hashlib.sha256(message).digest() + message
            place = who * self.slot
            self.answers.view[place : place + len(answer)] = answer
            sending = self.made.servers[who].send(SGE(self.answers, place, len(answer)))
            task = asyncio.create_task(sending)
            answers.add(task)
            task.add_done_callback(answers.discard)
        await asyncio.gather(*answers)


async def talk(made: Fan, who: int, slot: int, messages: int, seed: int) -> None:
    """One client: messages of random sizes, each answered before the next."""
    rng = random.Random(f"{seed}/{who}")
    qp = made.clients[who]
    out, back = (MemoryRegion(made.pd, slot) for _ in range(2))
    for _ in range(messages):
        message = who.to_bytes(2, "big") + rng.randbytes(rng.randrange(slot - 40))
        out.view[: len(message)] = message
        receiving = asyncio.ensure_future(qp.recv(back))
        await asyncio.sleep(0)
        await qp.send(SGE(out, 0, len(message)))
        got = await receiving
        assert got.byte_len == len(message) + 32
        assert bytes(back.view[: got.byte_len]) == hashlib.sha256(message).digest() + message
    for region in (out, back):
        region.close()


async def test_two_hundred_queue_pairs_on_one_cq_and_one_srq(address: str) -> None:
    slot, depth, mark, messages = 1024, 512, 400, 10
    print(f"seed {SEED}")
    before, pinned = not_ready(), status("VmPin")
    resident = status("VmRSS")
    # Room for every send, and for the shared receives once; the clients' CQ has both for each.
    cqe = CONNECTIONS * 8 + depth
    async with fan(address, CONNECTIONS, max_wr=depth, cqe=cqe) as made:
        echo = Echo(made, slot, depth)
        assert made.cq._promised == CONNECTIONS * 4 + depth
        cost = (
            (status("VmPin") - pinned) // CONNECTIONS,
            (status("VmRSS") - resident) // CONNECTIONS,
        )
        refilling = asyncio.create_task(echo.refill(mark))
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            group.create_task(echo.serve(CONNECTIONS * messages))
            for who in range(CONNECTIONS):
                group.create_task(talk(made, who, slot, messages, SEED))
        refilling.cancel()
        assert echo.received == [messages] * CONNECTIONS
        # Every receive is either free or posted, and the count of the queue is the same.
        assert len(echo.free) + made.srq.outstanding == depth
        assert made.cq._promised == CONNECTIONS * 4 + depth
        assert not_ready() == before
        print(
            f"{CONNECTIONS} queue pairs, one CQ, one SRQ of {depth}: {cost[0]} bytes pinned, "
            f"{cost[1]} bytes resident a connection; {echo.refills} refills"
        )
        for part in (echo.memory, echo.answers):
            part.close()
    assert made.cq._promised == 0
    assert made.client_cq._promised == 0
