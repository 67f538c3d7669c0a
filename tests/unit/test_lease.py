"""A lease: when it ends, the key dies first, and only then the rights of the queue pair go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from aiordma.endpoint import lease
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.link import Link
from aiordma.verbs.enums import Access

from .conftest import Run, settle

if TYPE_CHECKING:
    import pytest

RIGHTS = Access.REMOTE_READ | Access.REMOTE_WRITE


class Side:
    """A link and its memory, which note what is done in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.memory: set[Any] = set()
        self.link = SimpleNamespace(
            loop=asyncio.get_running_loop(),
            open_access=lambda rights: self._note("allow", rights),
            close_access=lambda rights: self._note("forbid", rights),
        )
        # The adapter has deregistered it.
        self.gone = asyncio.Event()
        self.region = SimpleNamespace(
            addr=4096, length=64, rkey=7, close=lambda: self.log.append("close"),
            wait_closed=self._wait_closed,
        )  # fmt: skip

        async def register(link: Any, buffer: Any, access: Access) -> Any:
            self.access = access
            return SimpleNamespace(**vars(self.region))

        monkeypatch.setattr(lease, "register", register)
        self.memory = cast("Any", _Bag())

    def _note(self, what: str, rights: Access) -> None:
        assert rights == RIGHTS
        self.log.append(what)

    async def _wait_closed(self, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            await self.gone.wait()
        self.log.append("deregistered")

    def lease(self, timeout: float | None = None) -> Lease:
        link = cast("Link", self.link)
        return Lease(link, self.memory, bytearray(64), RIGHTS, timeout)


class _Bag(list[Any]):
    """A set of what has no hash."""

    add = list.append

    def discard(self, item: Any) -> None:
        self.remove(item)


def test_i05_rights_stay_until_the_memory_is_deregistered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An access that is under way would find its rights gone, and cost the connection."""

    async def main() -> None:
        side = Side(monkeypatch)
        lease = side.lease()
        region = await lease.__aenter__()
        assert side.log == ["allow"]
        assert side.access & Access.LOCAL_WRITE
        assert (region.rkey, region.rights) == (7, RIGHTS)
        ending = asyncio.create_task(lease.__aexit__())
        await settle()
        assert side.log == ["allow", "close"], "the rights are off, or the key is not dead"
        side.gone.set()
        await ending
        assert side.log == ["allow", "close", "deregistered", "forbid"]
        assert not side.memory

    run(main())


def test_i05_nor_do_they_go_where_the_wait_is_cancelled(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        side = Side(monkeypatch)
        lease = side.lease()
        await lease.__aenter__()
        ending = asyncio.create_task(lease.revoke())
        await settle()
        ending.cancel()
        await settle()
        assert side.log == ["allow", "close"]
        assert lease.region is None
        side.gone.set()
        await lease.revoke()
        assert side.log == ["allow", "close", "deregistered", "forbid"]

    run(main())


def test_i05_a_lease_that_ends_by_itself_does_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        side = Side(monkeypatch)
        lease = side.lease(timeout=0.001)
        await lease.__aenter__()
        side.gone.set()
        while side.log[-1] != "forbid":  # noqa: ASYNC110 (bounded by the fixture)
            await asyncio.sleep(0.001)
        assert side.log == ["allow", "close", "deregistered", "forbid"]
        assert lease.region is None

    run(main())
