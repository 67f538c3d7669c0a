"""What one more connection costs: bounds that a server with many of them counts on.

docs/growth.md has the figures, which the programs `tests/bench/growth_*.py` print.
"""

from __future__ import annotations

import asyncio
import errno
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig, Listener
from aiordma.loop.workers import WorkerPool, reaper
from aiordma.verbs.context import Context
from tests.device.oracle import collect
from tests.inside.cm import look_for_ibacm_every
from tests.inside.verbs import note_regions

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

MOST_BYTES = 16 * 1024
CONFIG = ConnectionConfig(slot_size=256, recv_depth=8, send_depth=8)


async def pairs(listener: Listener, address: str, count: int) -> list[Connection]:
    """Both ends of so many connections, made one after the other."""
    ends: list[Connection] = []
    for _ in range(count):
        accepting = asyncio.ensure_future(listener.accept())
        ends.append(await aiordma.connect(address, listener.port, config=CONFIG))
        ends.append(await accepting)
    return ends


async def closed(ends: list[Connection]) -> None:
    await asyncio.gather(*(end.close() for end in ends))


@pytest.mark.timeout(150)
async def test_python_memory_of_an_idle_connection(address: str) -> None:
    # Few: in User-Mode Linux a traced allocation costs system calls, and a connection seconds.
    count = 6
    # A loop in debug mode notes for each timer where it was made.
    asyncio.get_running_loop().set_debug(False)
    async with aiordma.listen(address, 0, config=CONFIG) as listener:
        ends = await pairs(listener, address, 3)  # what all of them share is made
        collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            ends += await pairs(listener, address, count)
            await asyncio.sleep(0)
            collect()
            each = (tracemalloc.get_traced_memory()[0] - before) / (2 * count)
        finally:
            tracemalloc.stop()
            await closed(ends)
    assert 0 < each <= MOST_BYTES


async def test_a_connection_has_no_descriptor_of_its_own(address: str) -> None:
    async with aiordma.listen(address, 0, config=CONFIG) as listener:
        ends = await pairs(listener, address, 1)
        before = len(os.listdir("/proc/self/fd"))
        ends += await pairs(listener, address, 5)
        assert len(os.listdir("/proc/self/fd")) == before
        await closed(ends)


async def test_a_small_connection_is_one_registration_and_no_thread(
    address: str, monkeypatch: pytest.MonkeyPatch, is_siw: bool
) -> None:
    # Once a second a thread looks for ibacm, which is not the connection's.
    look_for_ibacm_every(monkeypatch, 3600.0)
    calls: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if args[0] is not reaper:  # what another test has closed may still be destroyed
                calls.append(name)
            return function(*args, **options)

        return call

    async with aiordma.listen(address, 0, config=CONFIG) as listener:
        ends = await pairs(listener, address, 2)
        with monkeypatch.context() as patched:
            regions = note_regions(patched)
            for owner, name in ((WorkerPool, "submit"), (Context, "query_device")):
                patched.setattr(owner, name, noted(name, getattr(owner, name)))
            ends += await pairs(listener, address, 5)
        await closed(ends)
    assert len(regions) == 10
    assert calls.count("query_device") == 0
    # Software iWARP connects within the call, which a thread makes.
    assert calls.count("submit") == (5 if is_siw else 0)


PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.fixture
def three_ports() -> Iterator[None]:
    """The system gives away no more than three local ports."""
    before = PORTS.read_text()
    PORTS.write_text("20100 20102")
    yield
    PORTS.write_text(before)


@pytest.mark.usefixtures("three_ports")
async def test_local_ports_end_for_each_listener_by_itself(address: str) -> None:
    ends: list[Connection] = []
    async with (
        aiordma.listen(address, 7601, config=CONFIG) as one,
        aiordma.listen(address, 7602, config=CONFIG) as other,
    ):
        for listener in (one, other):
            ends += await pairs(listener, address, 3)
            with pytest.raises(OSError, match="every local port has a connection") as caught:
                await aiordma.connect(address, listener.port, config=CONFIG)
            assert caught.value.errno == errno.EADDRNOTAVAIL
        await closed(ends)
    ports = [end.get_extra_info("sockname")[1] for end in ends[::2]]
    assert sorted(ports[:3]) == sorted(ports[3:]) == [20100, 20101, 20102]


MAPPINGS = Path("/proc/sys/vm/max_map_count")


def mappings() -> int:
    """Pieces of memory that this process has mapped."""
    return len(Path("/proc/self/maps").read_text().splitlines())


class Limit:
    """How many a process may have."""

    def __init__(self) -> None:
        self.before = MAPPINGS.read_text()

    def leave(self, count: int) -> None:
        """So many more than there are now."""
        MAPPINGS.write_text(str(mappings() + count))

    def lift(self) -> None:
        """As it was."""
        MAPPINGS.write_text(self.before)


@pytest.fixture
def limit() -> Iterator[Limit]:
    """The limit of mappings, which is as before in the end."""
    one = Limit()
    yield one
    one.lift()


async def until_refused(listener: Listener, address: str, ends: list[Connection]) -> OSError:
    """Make connections until one cannot be made; why not."""
    for _ in range(20):
        accepting = asyncio.ensure_future(listener.accept())
        try:
            ends.append(await aiordma.connect(address, listener.port, config=CONFIG))
        except OSError as error:
            accepting.cancel()
            await asyncio.wait([accepting])
            return error
        ends.append(await accepting)
    raise AssertionError("all could be made")


async def test_memory_mappings_end_with_an_error_that_passes(
    address: str, limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A new thread that finds no memory ends with an exception of the interpreter's, which is
    # printed; the one that destroys what was refused is there before.
    monkeypatch.setattr(reaper, "idle_s", 20.0)
    async with aiordma.listen(address, 0, config=CONFIG) as listener:
        await closed(await pairs(listener, address, 1))
        ends = await pairs(listener, address, 3)  # what all of them share is made
        before, count = mappings(), 4
        ends += await pairs(listener, address, count)
        # Of each: the rings of two queues, and mostly its slots.
        assert 1 <= (mappings() - before) / (2 * count) <= 3.5
        limit.leave(30)
        error = await until_refused(listener, address, ends)
        # It depends on the number which of the two ends has too few.
        if error.errno != errno.ENOMEM:
            assert "the listener ran out of resources" in str(error)
        limit.lift()
        ends += await pairs(listener, address, 1)
        await closed(ends)
