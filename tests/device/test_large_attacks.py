"""Peers that announce large messages and do nothing else: what they make this side hold."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, ListenerLimits
from aiordma.endpoint import link
from aiordma.endpoint.link import Link
from aiordma.endpoint.wire import (
    ASKS_CHECKSUMS,
    CHECKSUM,
    FRAME,
    KNOWS_CHECKSUMS,
    RENDEZVOUS,
    TAKES_FRAGMENTS,
    FrameKind,
    Hello,
)
from aiordma.memory import large_memory, pool
from aiordma.memory.governor import AHEAD, PROCESS
from aiordma.memory.pool import room_of
from aiordma.verbs import MemoryRegion, QueuePair
from aiordma.verbs.mr import make_region
from tests.device.meeting import are_alive, meet
from tests.device.oracle import until
from tests.inside.endpoint import (
    exposer_of,
    fetched_ahead,
    fetches_of,
    kept_for_answers,
    large_budget_of,
    limit_fetches,
    link_of,
)

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

MIB = 1 << 20
HELLO = Hello(64, 8, 16 * 1024, MIB, flags=KNOWS_CHECKSUMS | ASKS_CHECKSUMS | TAKES_FRAGMENTS).pack(
    56
)
RAW = ConnectionConfig(raw=True, slot_size=256, recv_depth=64, send_depth=16)
GREETING = FRAME.pack(FrameKind.CREDIT, 0, 0, 0, 0)


def pinned() -> int:
    """Bytes that this process has pinned for its adapters."""
    with open("/proc/self/status") as file:
        found = re.search(r"^VmPin:\s+(\d+) kB", file.read(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def announcement(number: int, length: int) -> bytes:
    """36 bytes and a header, of a message that is not there."""
    body = RENDEZVOUS.pack(1 << 40, 7, number) + CHECKSUM.pack(0)
    return FRAME.pack(FrameKind.RENDEZVOUS, 0, 0, 0, length) + body


async def nothing_counted() -> None:
    """Wait until the budget has all back, which is when the queue pairs are gone.

    A close waits five seconds for that, and Soft-RoCE may need longer on a busy machine.
    """
    await until(lambda: PROCESS.held() == 0, 60)


@contextlib.asynccontextmanager
async def attacker(
    address: str, listener: aiordma.Listener
) -> AsyncIterator[tuple[Connection, Connection]]:
    """A peer whose every frame is the test's, and the victim's end."""
    raw = await aiordma.connect(address, listener.port, config=RAW, private_data=HELLO)
    await raw.send(GREETING)
    victim = await listener.accept()
    try:
        yield raw, victim
    finally:
        await asyncio.gather(raw.close(), victim.close())


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[Link]:
    """Links whose reads get no answer: the adapter has them, and nothing comes."""
    links: list[Link] = []
    real = Link.post_read

    def post_read(self: Link, *args: object) -> None:
        if self not in links:
            real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Link, "post_read", post_read)
    return links


async def test_g01_what_is_announced_pins_nothing_by_itself(address: str) -> None:
    """The program does not call recv(), and nothing of 512 MiB fits what is fetched ahead."""
    config = ConnectionConfig(recv_depth=8, send_depth=4, slot_size=1024)  # all slots at once
    async with (
        aiordma.listen(address, 0, config=config) as listener,
        attacker(address, listener) as (raw, victim),
    ):
        before = pinned()
        for number in range(8):
            await raw.send(announcement(number, 64 * MIB))
        await raw.flush()
        await until(lambda: fetches_of(victim) == 8)
        assert pinned() == before
        await victim.send(b"and nothing is held up")


async def test_g01_ten_attackers_pin_no_more_than_the_budget(
    address: str, stuck: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its victim wait in recv() for 20 MiB that never come; then for nothing."""
    limit_fetches(monkeypatch, 1.5)
    config = ConnectionConfig(recv_depth=8, send_depth=4, slot_size=1024)
    async with contextlib.AsyncExitStack() as stack:
        limits = ListenerLimits(max_large_message_bytes=96 * MIB)
        listener = await stack.enter_async_context(
            aiordma.listen(address, 0, config=config, limits=limits)
        )
        ends = [await stack.enter_async_context(attacker(address, listener)) for _ in range(10)]
        honest = await stack.enter_async_context(
            aiordma.connect(address, listener.port, config=config)
        )
        server = await listener.accept()
        stuck += [link_of(victim) for _, victim in ends]
        receiving = [asyncio.create_task(victim.recv()) for _, victim in ends]
        before, most, sent = pinned(), 0, 0
        begun = time.monotonic()
        for raw, _ in ends:
            for number in range(8):
                frame = announcement(number, 20 * MIB)
                sent += len(frame)
                with contextlib.suppress(aiordma.RdmaError):
                    await raw.send(frame)
        # Others wait for their turn, and get it.
        data = b"honest" * MIB
        sending = asyncio.create_task(honest.send(data))
        taking = asyncio.create_task(server.recv())
        while not all(task.done() for task in (*receiving, taking)):
            most = max(most, pinned() - before)
            await asyncio.wait(receiving, timeout=0.01)
            assert time.monotonic() - begun < 40, "recv() hangs"
        with taking.result() as message:
            assert message == data
        await sending
        print(f"{sent} bytes sent, {most} bytes pinned, {time.monotonic() - begun:.1f} s")
        # Half of the budget is for what is fetched ahead, and three eighths for what is awaited:
        # one of the attackers' messages fits into each.
        fetched = 2 * room_of(20 * MIB) + room_of(len(data))
        assert fetched <= limits.max_large_message_bytes
        # The other client is of this process, too; its bytes need not begin with a page.
        assert most <= fetched + len(data) + mmap.PAGESIZE
        assert most >= 32 * MIB, "the attack did nothing"
        for task in receiving:
            with pytest.raises(aiordma.ConnectionLostError, match="nothing of a large message"):
                task.result()
        await are_alive((honest, server))
    await nothing_counted()


async def test_g01_memory_counts_until_it_is_deregistered(
    address: str, stuck: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread destroys the queue pair while the loop closes it, and those for memory are late.

    The peer serves no read of the message that it has announced, and does not read its own.
    """
    size, gone, goes_on = 20 * MIB, threading.Event(), threading.Event()
    close, destroy = QueuePair.close, MemoryRegion._destroy

    def close_and_wait(self: QueuePair) -> None:
        close(self)
        assert self is not link_of(victim).qp or gone.wait(60)

    def destroy_late(self: MemoryRegion, handle: Any) -> None:
        assert self.length < size or goes_on.wait(60)
        destroy(self, handle)

    async with aiordma.listen(address, 0) as listener, attacker(address, listener) as (raw, victim):
        stuck.append(link_of(victim))
        link_of(victim).qp._when_gone(gone.set)
        sends = link_of(victim).buffers.memory.sends
        before = pinned()
        await raw.send(announcement(1, size))
        receiving = asyncio.create_task(victim.recv())
        await until(lambda: pinned() >= before + room_of(size))
        sending = asyncio.create_task(victim.send(bytes(size)))
        await until(lambda: len(exposer_of(victim)) == 1)
        monkeypatch.setattr(MemoryRegion, "_destroy", destroy_late)
        monkeypatch.setattr(QueuePair, "close", close_and_wait)
        victim.abort()
        await asyncio.wait([sending, receiving], timeout=20)
        try:
            await until(lambda: link_of(victim).closed, 20)
            assert pinned() - before > room_of(size) + size - MIB, "less its slots"
            assert large_budget_of(listener).held() == PROCESS.held() == room_of(size)
            assert sends.held() == size
        finally:
            goes_on.set()
        for task in (sending, receiving):
            with pytest.raises(aiordma.ResourceClosedError):
                await task
    await nothing_counted()
    await until(lambda: sends.held() == 0)


async def test_g01_what_is_kept_of_answers_is_counted(address: str) -> None:
    """Each client has one large message sent back, reads it, and stays."""
    limits = ListenerLimits(max_large_message_bytes=4 * MIB)  # a quarter of which may be kept
    config = ConnectionConfig(recv_depth=4, send_depth=4, slot_size=1024)
    data = bytes(200_000)
    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(
            aiordma.listen(address, 0, config=config, limits=limits)
        )
        servers = []
        for _ in range(8):
            client, server = await meet(listener, address, config=config)
            for end in (client, server):
                await stack.enter_async_context(end)
            servers.append(server)
            for _ in range(2):
                sending = asyncio.create_task(client.send(data))
                with await server.recv() as message:
                    answering = asyncio.create_task(server.send(message))
                    with await client.recv() as answer:
                        assert answer == data
                    await asyncio.gather(sending, answering)
        kept = [kept_for_answers(server) for server in servers]
        assert 0 < sum(kept) <= MIB, kept
        assert sum(kept) <= large_budget_of(listener).held(AHEAD) <= MIB
    await nothing_counted()


@pytest.mark.parametrize("seed", range(3))
async def test_g01_memory_that_cannot_be_registered_leaves_nothing_leased(
    address: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Between a lease and its use, at either end; and tasks are canceled meanwhile."""
    chance = random.Random(seed)
    monkeypatch.setattr(large_memory, "SHORT_S", 0.1)

    async def register(size: int, make: Callable[[], MemoryRegion]) -> MemoryRegion:
        if chance.random() < 0.3:
            await asyncio.sleep(0)
            raise OSError(chance.choice((errno.ENOMEM, errno.EINVAL)), "ibv_reg_mr")
        return await make_region(size, make)

    async def exchange(sender: Connection, receiver: Connection) -> None:
        for _ in range(10):
            data = bytes(chance.randrange(70_000, 2 * MIB))
            tasks = [asyncio.create_task(call) for call in (sender.send(data), receiver.recv())]
            if chance.random() < 0.2:
                await asyncio.sleep(0)
                chance.choice(tasks).cancel()
            await asyncio.wait(tasks, timeout=2, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    for module in (pool, link):
        monkeypatch.setattr(module, "make_region", register)
    async with aiordma.listen(address, 0) as listener:
        for _ in range(4):
            client, server = await meet(listener, address)
            memory = link_of(client).buffers.memory
            await asyncio.gather(exchange(client, server), exchange(server, client))
            for end in (client, server):
                end.abort()
                await end.wait_closed()
            assert memory.sends.held() == 0
    await nothing_counted()


@pytest.mark.parametrize("size", [200_000, MIB])
async def test_g01_clients_that_read_no_answers_pin_one_message_each(
    address: str, size: int
) -> None:
    """The server of the README waits in send(), and takes nothing more meanwhile."""
    deaf = ConnectionConfig(
        receive_buffer_size=1, recv_depth=4, send_depth=4, slot_size=1024, rendezvous_threshold=0
    )

    async def echo(server: Connection) -> None:
        async for message in server:
            await server.send(message)

    async with contextlib.AsyncExitStack() as stack:
        listener = await stack.enter_async_context(aiordma.listen(address, 0))
        ends = [await meet(listener, address, config=deaf) for _ in range(4)]
        for end in (end for pair in ends for end in pair):
            await stack.enter_async_context(end)
        before, data = pinned(), bytes(size)
        tasks = [asyncio.create_task(echo(server)) for _, server in ends]
        for client, _ in ends:
            await client.send(data)
        await until(lambda: all(len(exposer_of(server)) == 1 for _, server in ends))
        at_once = pinned() - before
        more = [asyncio.create_task(client.send(data)) for client, _ in ends for _ in range(8)]
        ahead = min(8 * room_of(size), ConnectionConfig().receive_buffer_size)
        await until(lambda: all(fetched_ahead(server) == ahead for _, server in ends))
        print(f"{size} bytes: {at_once} pinned, {pinned() - before} later")
        assert all(len(exposer_of(server)) == 1 for _, server in ends)
        for client, _ in ends:
            for _ in range(9):
                with await client.recv() as answer:
                    assert answer == data
        await asyncio.gather(*more)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await nothing_counted()
