"""Two hundred connections that share what can be shared.  Prints what each of them costs.

The figures in docs/sharing.md come from here:

    python -m aiordma_softroce -- python -m pytest tests/device/test_many.py -s
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import aiordma
from aiordma.verbs import SGE, MemoryRegion, RecvWR, WorkCompletion
from tests.device.fan import Fan, fan
from tests.device.meeting import Pair
from tests.device.oracle import until
from tests.inside.endpoint import budget_of, receiver_of, share_of
from tests.inside.link import queue_of
from tests.inside.verbs import expected, promised

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

SEED = int(os.environ.get("AIORDMA_TEST_SEED", "20240817"))
CONNECTIONS = 200


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
    for line in Path("/proc/self/status").read_text().splitlines():
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
    asyncio.get_running_loop().set_debug(False)  # see `pairs`
    before, pinned = not_ready(), status("VmPin")
    resident = status("VmRSS")
    # More room than is needed: software iWARP's queues cannot grow, and a large first one leaps
    # over a page that its driver cannot have.
    cqe = 32_000
    async with fan(address, CONNECTIONS, max_wr=depth, cqe=cqe) as made:
        echo = Echo(made, slot, depth)
        assert promised(made.cq) == CONNECTIONS * 4 + depth
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
        assert promised(made.cq) == CONNECTIONS * 4 + depth
        assert not_ready() == before
        print(
            f"{CONNECTIONS} queue pairs, one CQ, one SRQ of {depth}: {cost[0]} bytes pinned, "
            f"{cost[1]} bytes resident a connection; {echo.refills} refills"
        )
        for part in (echo.memory, echo.answers):
            part.close()
    assert promised(made.cq) == 0
    assert promised(made.client_cq) == 0


# Connections

MANY = aiordma.ConnectionConfig(
    slot_size=4096, recv_depth=32, send_depth=16, rendezvous_window=2, one_sided_depth=4,
    receive_buffer_size=256 * 1024,
    # Both ends of each connection are here.  Half of the slots are nobody's own.
    shared_slots=2 * CONNECTIONS * 24,
    idle_timeout_s=120, keepalive_s=60,
)  # fmt: skip
#: For the handshakes of a slow machine.
PATIENT = aiordma.ListenerLimits(handshake_timeout_s=60)
MESSAGES = 12


@asynccontextmanager
async def pairs(
    address: str, count: int, config: aiordma.ConnectionConfig
) -> AsyncIterator[list[Pair]]:
    """Connected ends, (client, server)."""
    # Debugging notes where each future was made: with so many that takes minutes.
    asyncio.get_running_loop().set_debug(False)
    made: list[Pair] = []
    async with aiordma.listen(address, 0, config=config, limits=PATIENT) as listener:
        try:
            for _ in range(count):
                client = await aiordma.connect(address, listener.port, config=config, timeout=60)
                made.append((client, await listener.accept()))
            yield made
        finally:
            await asyncio.gather(*(end.close() for pair in made for end in pair))


def sizes_of(rng: random.Random) -> list[int]:
    """Small ones, and some that do not fit into a slot."""
    return [rng.choice([0, 1, 100, 1000, 4080, 4081, 30_000, 300_000]) for _ in range(MESSAGES)]


async def send_all(connection: aiordma.Connection, seed: str) -> bytes:
    """Messages of random sizes; the digest of all of them."""
    rng, digest = random.Random(seed), hashlib.sha256()
    for size in sizes_of(rng):
        message = rng.randbytes(size)
        digest.update(size.to_bytes(4, "big") + message)
        await connection.send(message)
    return digest.digest()


async def receive_all(connection: aiordma.Connection) -> bytes:
    """What has arrived."""
    digest = hashlib.sha256()
    for _ in range(MESSAGES):
        with await connection.recv() as message:
            digest.update(len(message).to_bytes(4, "big") + bytes(message))
    return digest.digest()


async def test_two_hundred_connections_on_one_cq_and_one_pool(address: str) -> None:
    print(f"seed {SEED}")
    assert MANY.shared_slots is not None
    before, pinned, resident = not_ready(), status("VmPin"), status("VmRSS")
    async with pairs(address, CONNECTIONS, MANY) as made:
        ends = [end for pair in made for end in pair]
        idle = (status("VmPin") - pinned) // len(ends), (status("VmRSS") - resident) // len(ends)
        cqs, share = {queue_of(end) for end in ends}, share_of(ends[0])
        assert share is not None
        budget = budget_of(ends[0])
        assert len(cqs) == 1
        most = len(ends) * (MANY.sends + MANY.receives)
        assert sum(promised(cq) for cq in cqs) == most
        # A queue has room for the slots that are there, and grows with those that come.
        assert all(expected(cq) <= min(promised(cq), cq.cqe) for cq in cqs)
        assert budget.used == len(ends) * MANY.guaranteed
        async with asyncio.timeout(90):
            sending = [send_all(end, f"{SEED}/{i}") for i, end in enumerate(ends)]
            taking = [receive_all(end) for end in ends]
            digests = await asyncio.gather(*sending, *taking)
        sent, got = digests[: len(ends)], digests[len(ends) :]
        # The ends of a pair stand side by side.
        assert [got[i ^ 1] for i in range(len(ends))] == sent
        assert budget.used <= MANY.shared_slots
        assert sum(promised(cq) for cq in cqs) == most
        assert all(expected(cq) <= min(promised(cq), cq.cqe) for cq in cqs)
        assert not_ready() == before
        windows = max(receiver_of(end).window.size for end in ends)
        print(
            f"{len(ends)} ends, {len(cqs)} CQ, {MANY.shared_slots} slots of {MANY.slot_size} "
            f"bytes: {idle[0]} bytes pinned and {idle[1]} resident each; windows up to {windows}"
        )
    # A close waits 5 s for its queue pair, which may take longer among 400.
    await until(lambda: (budget.used, budget.members, budget.free) == (0, 0, MANY.shared_slots), 60)
    await until(lambda: not any(promised(cq) or expected(cq) for cq in cqs), 60)
