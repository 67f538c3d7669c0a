"""A lease: when it ends, the key dies first, and only then the rights of the queue pair go."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiordma.endpoint.lease import Lease
from aiordma.endpoint.link import Link
from aiordma.endpoint.outcome import Outcome
from aiordma.loop import background
from aiordma.verbs.enums import Access
from tests.inside.endpoint import begin_end
from tests.inside.loop import give_the_end

from ..conftest import LIMIT_S, LOOPS, Run, settle

RIGHTS = Access.REMOTE_READ | Access.REMOTE_WRITE


class Side:
    """A link and its memory, which note what is done in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.memory: dict[Any, None] = {}
        self.link = SimpleNamespace(
            closed=False,
            loop=asyncio.get_running_loop(),
            open_access=lambda rights: self._note("allow", rights),
            close_access=lambda rights: self._note("forbid", rights),
            expose=lambda: (3, 4),
            revoke=self._revoked,
        )
        # The adapter has deregistered it.
        self.gone = asyncio.Event()
        self.error: OSError | None = None
        self.region = SimpleNamespace(
            addr=4096, length=64, rkey=7, close=lambda: self.log.append("close"),
            wait_closed=self._wait_closed,
        )  # fmt: skip

        async def register(buffer: Any, access: Access) -> Any:
            self.access = access
            return _Region(**vars(self.region))

        self.link.register = register

    def _revoked(self, generation: int) -> None:
        assert generation == 4
        self.log.append("tell")

    def _note(self, what: str, rights: Access) -> None:
        assert rights == RIGHTS
        self.log.append(what)

    async def _wait_closed(self, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            await self.gone.wait()
        if self.error is not None:
            raise self.error
        self.log.append("deregistered")

    def lease(self, timeout: float | None = None) -> Lease:
        link = cast("Link", self.link)
        return Lease(link, Outcome(), self.memory, bytearray(64), RIGHTS, timeout)


class _Region(SimpleNamespace):
    """Registered memory, which is itself alone."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


async def test_i05_rights_stay_until_the_memory_is_deregistered() -> None:
    """An access that is under way would find its rights gone, and cost the connection."""
    side = Side()
    lease = side.lease()
    region = await lease.__aenter__()
    assert side.log == ["allow"]
    assert side.access & Access.LOCAL_WRITE
    assert (region.rkey, region.rights) == (7, RIGHTS)
    assert (region.owner, region.generation) == (3, 4)
    ending = asyncio.create_task(lease.__aexit__())
    await settle()
    assert side.log == ["allow", "tell", "close"], "the rights are off, or the key is not dead"
    side.gone.set()
    await ending
    assert side.log == ["allow", "tell", "close", "deregistered", "forbid"]
    assert not side.memory


async def test_the_region_of_a_lease_that_was_not_entered() -> None:
    """A program takes the lease for the region."""
    lease = Side().lease()
    for name in ("to_bytes", "rkey"):
        with pytest.raises(AttributeError, match=r"async with connection\.expose\(\.\.\.\) as"):
            getattr(lease, name)
    with pytest.raises(AttributeError, match=r"^other$"):
        getattr(lease, "other")  # noqa: B009 - there is no such attribute


async def test_i05_nor_do_they_go_where_the_wait_is_cancelled() -> None:
    side = Side()
    lease = side.lease()
    await lease.__aenter__()
    ending = asyncio.create_task(lease.revoke())
    await settle()
    ending.cancel()
    await settle()
    assert side.log == ["allow", "tell", "close"]
    assert lease.region is None
    side.gone.set()
    await lease.revoke()
    assert side.log == ["allow", "tell", "close", "deregistered", "forbid"]


async def test_i05_a_lease_that_ends_by_itself_does_the_same() -> None:
    side = Side()
    lease = side.lease(timeout=0.001)
    await lease.__aenter__()
    side.gone.set()
    while side.log[-1] != "forbid":  # noqa: ASYNC110 (bounded by the fixture)
        await asyncio.sleep(0.001)
    assert side.log == ["allow", "tell", "close", "deregistered", "forbid"]
    assert lease.region is None


@pytest.mark.parametrize("waits", [False, True])
def test_a02_a_memory_that_stays_registered_is_said_once(
    run: Run, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    """By the call that waits for it; where a timer has ended the lease, in the log."""

    async def main() -> None:
        side = Side()
        side.error = OSError(errno.EBUSY, "Device or resource busy")
        side.gone.set()
        reports: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: reports.append(about))
        lease = side.lease(timeout=None if waits else 0.001)
        await lease.__aenter__()
        if waits:
            with pytest.raises(OSError, match="busy"):
                await lease.revoke()
        else:
            while "forbid" not in side.log:  # noqa: ASYNC110 (bounded by the fixture)
                await asyncio.sleep(0.001)
        assert side.log == ["allow", "tell", "close", "forbid"]
        del lease
        await settle()
        assert not reports

    with caplog.at_level(logging.WARNING):
        run(main())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if waits else 1)
    assert all("the memory of a lease" in line and "busy" in line for line in said)


async def test_a_lease_without_a_block_is_told_what_to_write() -> None:
    lease: Any = Side().lease()
    with pytest.raises(TypeError, match=r"`async with connection\.expose\(\.\.\.\) as region`"):
        await lease
    with pytest.raises(TypeError, match="async with"), lease:
        pass


async def test_a_lease_has_more_time_while_others_are_destroyed_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of 12,000 leases at once took as long as the adapter has for a single one."""
    limits: list[float] = []
    for others in (0, 12_000):
        side = Side()

        async def wait_closed(timeout: float) -> None:
            limits.append(timeout)

        side.region.wait_closed = wait_closed
        reaper = SimpleNamespace(unfinished=others)
        monkeypatch.setattr("aiordma.endpoint.lease.reaper", reaper)
        async with side.lease():
            pass
    assert limits[0] == 30
    assert limits[1] >= 10 * limits[0]


@pytest.mark.parametrize("name", list(LOOPS))
def test_a02_a_lease_ends_with_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it ends while tasks are canceled, or when none begins any more."""
    give_the_end(monkeypatch, 0.2)
    sides: list[Side] = []

    async def opened() -> Lease:
        sides.append(Side())
        lease = sides[-1].lease()
        await lease.__aenter__()
        return lease

    async def canceled() -> None:
        lease = await opened()
        try:
            await asyncio.Event().wait()
        finally:
            begin_end(lease)

    async def late() -> AsyncIterator[None]:
        lease = await opened()
        try:
            yield
        finally:
            await settle(20)  # the background tasks have been told
            await asyncio.wait_for(lease.revoke(), LIMIT_S)

    async def main() -> None:
        background.prepare()
        kept.append(asyncio.create_task(canceled()))
        await settle()
        kept.append(late())
        await anext(kept[-1])

    kept: list[Any] = []
    with caplog.at_level(logging.WARNING):
        with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
            runner.run(main())
        kept.clear()
    assert [side.log for side in sides] == [["allow", "tell", "close", "forbid"]] * 2
    assert not caplog.records


async def test_a02_a_lease_that_is_revoked_before_its_block_is_revoked_behind_it() -> None:
    side = Side()
    side.gone.set()
    lease = side.lease()
    await lease.revoke()
    async with lease:
        assert side.log == ["allow"]
    assert side.log == ["allow", "tell", "close", "deregistered", "forbid"]
