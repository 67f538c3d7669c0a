"""Closing in every order ends clean, and never blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import random
import subprocess
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import aiordma
from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel
from aiordma.errors import FlushedError, RdmaOSError, ResourceClosedError
from tests.device.closing import NAMES, End, Hall, Heartbeat
from tests.device.oracle import (
    Connecting,
    adapter_objects,
    collect,
    rdma_descriptors,
    settle,
    until,
)
from tests.inside.cm import closing_threads, kept_of
from tests.inside.endpoint import link_of
from tests.inside.verbs import destroying_threads

pytestmark = pytest.mark.device

ORDERS = list(itertools.permutations(NAMES))
assert len(ORDERS) == 5040
#: Who has to be gone before it, for C.
CHILDREN = {
    "qp": (),
    "cq": ("qp",),
    "completion channel": ("cq",),
    "mr": (),
    "pd": ("mr", "qp"),
    "id": ("qp",),
    "event channel": ("id",),
}
#: S3 of the seeds: memory, CQ and completion channel go before the queue pair.
SEEDS_ORDER = ("mr", "cq", "completion channel", "qp", "id", "event channel", "pd")
BATCH = 8
SEED = 20
#: Seconds that the loop may be away.  A call that blocks would be away for a second and more; on
#: one CPU, shared with the kernel of the guest, some tens of milliseconds are ordinary.
STALL_S = 3.0  # generous: machines that run tests are busy; the destroyers tell for certain


@pytest.fixture
def destroyers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that destroyed something."""
    return destroying_threads(monkeypatch)


def check_end(results: list[Any]) -> None:
    """What the waiting tasks of an `End` got: the receive failed, the iterators ended."""
    received, completions, events = results
    assert isinstance(received, FlushedError | ResourceClosedError), received
    assert completions in (0, 1)  # the raw receive, if its flush came before the CQ was closed
    # ESTABLISHED and DISCONNECTED; and if it took its time, TIMEWAIT_EXIT.
    assert 0 <= events <= 3


async def close_in_step(pairs: list[tuple[End, tuple[str, ...]]]) -> None:
    """Close all ends at a time, one object each, so that each is closed in the others' midst."""
    for step in range(len(NAMES)):
        for end, order in pairs:
            end[order[step]].close()
            assert end[order[step]].closed
            await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_every_order_on_connected_pairs(
    hall: Hall, destroyers: set[str], caplog: pytest.LogCaptureFixture, is_siw: bool
) -> None:
    """5040 orders, half of them on each kind of device: each end has an order of its own."""
    # The traces that asyncio's debug mode keeps of each callback would take minutes here.
    asyncio.get_running_loop().set_debug(False)
    share = slice(is_siw, None, 2)  # what depends on the order is the library's, the same for both
    orders = zip(ORDERS[:2520][share], ORDERS[:2519:-1][share], strict=True)
    longest = 0.0
    with caplog.at_level(logging.WARNING):
        while batch := list(itertools.islice(orders, BATCH)):
            ends: list[tuple[End, tuple[str, ...]]] = []
            for order in batch:
                ends += zip(await hall.connected(), order, strict=True)
            with Heartbeat() as heart:
                await close_in_step(ends)
                for end, _ in ends:
                    check_end(await end.ended())
            longest = max(longest, heart.longest)
    assert not caplog.records
    assert destroyers == {"aiordma-reaper"}
    print(f"longest stall: {longest * 1000:.1f} ms")
    assert longest < STALL_S


async def test_async_with_waits_for_the_end(hall: Hall) -> None:
    events = EventChannel()
    objects = adapter_objects()
    async with events, ConnectionId(events) as cm_id:
        cm_id.bind_addr((hall.address, 0))
        assert adapter_objects() != objects
    assert adapter_objects() == objects


@pytest.mark.one_loop
async def test_destroy_is_as_strict_as_c(hall: Hall) -> None:
    """A sample of the orders: refused exactly where C wants another order."""
    rng = random.Random(SEED)
    orders = [*rng.sample(ORDERS, 40), NAMES, NAMES[::-1], SEEDS_ORDER]
    for order in orders:
        ends = await hall.connected(await_=False)
        for end in ends:
            with pytest.raises(RdmaOSError, match="connected: disconnect it first"):
                end["id"].destroy()
        await ends[0].cm_id.disconnect()
        for end in ends:
            await end.disconnected()
            # The flushed receive: nothing is under way any more, except what siw never flushes.
            left = end["qp"].outstanding  # type: ignore[attr-defined]
            gone: set[str] = set()
            for name in order:
                if set(CHILDREN[name]) - gone or (name == "mr" and left and "qp" not in gone):
                    with pytest.raises(RdmaOSError) as caught:
                        end[name].destroy()
                    assert caught.value.errno == 16
                    assert not end[name].closed
                else:
                    end[name].destroy()
                    gone.add(name)
            for name in NAMES:
                end[name].destroy()
            await end.ended()


async def test_destroy_with_a_request_under_way(hall: Hall) -> None:
    for end in await hall.connected(await_=False):
        with pytest.raises(RdmaOSError, match="1 unfinished work request"):
            end["mr"].destroy()
        end["qp"].destroy()
        # The queue pair takes the request along: C has no objection then, in this order.
        for name in ("mr", "cq", "completion channel", "pd"):
            end[name].destroy()
        end["id"].close()
        end["event channel"].destroy()
        await end.ended()


async def test_an_unfetched_request_does_not_keep_the_channel(hall: Hall) -> None:
    client = End(*await hall.resolved())
    connecting = asyncio.create_task(client.cm_id.connect(ConnectionParameter(1, 1, 6, 6)))
    await until(lambda: len(kept_of(hall.events)) > 0)
    with pytest.raises(RdmaOSError, match="1 ConnectionId made from it is still open"):
        hall.events.destroy()
    hall.listener.destroy()
    hall.events.destroy()
    with pytest.raises(OSError, match="rejected"):
        await connecting
    client.close()
    await client.ended()


# Without close

KINDS = (
    "QueuePair", "CompletionQueue", "CompletionChannel", "MemoryRegion", "ProtectionDomain",
    "ConnectionId", "EventChannel",
)  # fmt: skip


@contextlib.contextmanager
def unclosed() -> Iterator[list[str]]:
    """Collects the kinds of objects that are warned of; the objects themselves are let go."""
    kinds: list[str] = []

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        assert category is ResourceWarning
        kinds.append(str(message).removeprefix("unclosed <").split()[0])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield kinds


def forgotten(end: End) -> None:
    vars(end).clear()


@pytest.mark.parametrize("where", ["loop", "thread"])
async def test_what_is_forgotten_is_given_back_and_warned_of(hall: Hall, where: str) -> None:
    """The objects refer to each other, so it is the collector that finds them."""
    objects, descriptors, connects = adapter_objects(), rdma_descriptors(), Connecting()
    for _ in range(5):
        ends = list(await hall.connected(await_=False))
        assert adapter_objects() != objects
        with unclosed() as kinds, pytest.MonkeyPatch.context() as patch:
            threads = closing_threads(patch)
            for end in ends:
                forgotten(end)
            ends.clear()
            del end
            await asyncio.sleep(0)  # what resumed this task last is let go of, too
            connects.let_go()
            if where == "loop":
                collect()
            else:
                await asyncio.to_thread(gc.collect)
            await settle()
        assert sorted(kinds) == sorted(KINDS * 2)
        assert adapter_objects() == objects
        assert rdma_descriptors() == descriptors
        # Readers and tables belong to the loop, whoever collects.
        assert threads == {threading.get_ident()}


async def test_the_wait_for_flushes_keeps_nothing_of_a_queue_pair_that_is_closed(
    hall: Hall,
) -> None:
    """The wait takes a second, in which the protection domain would not be given back."""
    ends = list(await hall.connected(await_=False))
    for end in ends:
        assert end.qp.outstanding == 1
        end.qp.to_error()
        end.close()
    for end in ends:
        await end.ended()
    await settle()
    kept = [weakref.ref(end.qp) for end in ends]
    for end in ends:
        forgotten(end)
    ends.clear()
    del end
    collect()
    assert [reference() for reference in kept] == [None, None]


def test_what_outlives_its_loop_is_given_back(address: str) -> None:
    objects, descriptors, connects = adapter_objects(), rdma_descriptors(), Connecting()

    async def main() -> None:
        hall = Hall(address)
        kept.extend(await hall.connected(await_=False))
        kept.append(hall)
        await asyncio.sleep(0)

    kept: list[Any] = []
    asyncio.run(main())
    assert adapter_objects() != objects
    connects.let_go()
    with unclosed() as kinds:
        kept.clear()
        collect()
    assert sorted(kinds) == sorted((*KINDS, *KINDS, "EventChannel", "ConnectionId"))
    # Without a loop nothing is left to threads.
    assert adapter_objects() == objects
    assert rdma_descriptors() == descriptors


async def test_closing_in_a_thread_leaves_the_loop_its_part(hall: Hall) -> None:
    for end in await hall.connected():
        with pytest.MonkeyPatch.context() as patch:
            threads = closing_threads(patch)
            await asyncio.to_thread(end.close)
            check_end(await end.ended())
        assert threads == {threading.get_ident()}


# A destroy that takes long


def tc(*words: str) -> str:
    done = subprocess.run(["tc", "-s", "-j", *words], check=True, capture_output=True, text=True)
    return done.stdout


#: 45 KB take 2 seconds.  (netem would not do: it takes delayed packets for sent.)
SLOW = ("tbf", "rate", "160kbit", "burst", "6000", "limit", "100000")


@pytest.mark.two_hosts
async def test_a_slow_destroy_does_not_block_the_loop(address: str, destroyers: set[str]) -> None:
    """Soft-RoCE waits in `ibv_destroy_qp` for its packets that sit in the card's queue."""
    peer = os.environ["AIORDMA_SOFTROCE_ADDR2"]
    async with aiordma.listen(peer, 0) as listener:
        client = await aiordma.connect(peer, listener.port, local_addr=(address, 0))
        server = await listener.accept()
        try:
            tc("qdisc", "replace", "dev", "veth0", "root", *SLOW)
            for _ in range(3):
                await client.send(bytes(15_000))
            await until(
                lambda: json.loads(tc("qdisc", "show", "dev", "veth0"))[0]["backlog"] > 5000
            )
            with Heartbeat() as heart:
                began = time.monotonic()
                link_of(client).close()
                await link_of(client).qp.wait_closed()
                took = time.monotonic() - began
        finally:
            tc("qdisc", "replace", "dev", "veth0", "root", "pfifo")
        client.abort()
        server.abort()
        await asyncio.gather(client.wait_closed(), server.wait_closed())
    print(f"destroyed in {took:.2f} s, longest stall {heart.longest * 1000:.1f} ms")
    assert took > 1, "the wire did not hold it"
    assert heart.longest < STALL_S
    assert destroyers == {"aiordma-reaper"}
