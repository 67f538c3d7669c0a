"""Memory windows: closing them, and what they are made of, in every order."""

from __future__ import annotations

import asyncio
import itertools

import pytest

import aiordma
from aiordma.verbs import (
    MemoryWindow,
    MWType,
)
from aiordma.verbs.resource import Resource
from tests.device.ends import Ends, connected
from tests.device.windows import DATA, OPENABLE, TYPES, make, refused

pytestmark = [pytest.mark.device, pytest.mark.one_loop]


@pytest.fixture(params=TYPES, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> MWType:
    kind: MWType = request.param
    return kind


@pytest.mark.parametrize("what", ["window", "mr", "qp"])
async def test_closing_ends_the_access(address: str, kind: MWType, what: str) -> None:
    async with connected(address) as ends, connected(address, server_pd=ends.server.pd) as others:
        server = ends.server
        window = make(server, kind)
        mr = server.region(bytearray(DATA), OPENABLE)
        await window.bind(server.qp, mr)
        addr, rkey = window.addr, window.rkey
        closed: Resource = {"window": window, "mr": mr, "qp": server.qp}[what]
        closed.close()
        await closed.wait_closed(10)
        if what == "qp" and kind == MWType.TYPE_1:
            # It belongs to the domain, and another queue pair serves the peer.
            assert await others.read(addr, rkey, 10) == DATA[:10]
            return
        assert window.closed
        await window.wait_closed(10)
        await refused(others.read(addr, rkey, 1))


async def test_every_order_of_closing(address: str, kind: MWType) -> None:
    for bound in (True, False):
        for order in itertools.permutations(("window", "qp", "mr", "pd")):
            async with connected(address) as ends:
                server = ends.server
                window = make(server, kind)
                mr = server.region(bytearray(DATA), OPENABLE)
                if bound:
                    await window.bind(server.qp, mr)
                parts: dict[str, Resource] = {
                    "window": window, "qp": server.qp, "mr": mr, "pd": server.pd
                }  # fmt: skip
                for name in order:
                    parts[name].close()
                for name in order:
                    await parts[name].wait_closed(10)


@pytest.mark.parametrize("operation", ["bind", "invalidate"])
@pytest.mark.parametrize("order", list(itertools.permutations(("window", "qp", "mr"))))
async def test_closing_while_a_change_is_under_way(
    ends: Ends, kind: MWType, operation: str, order: tuple[str, ...]
) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    if operation == "invalidate":
        await window.bind(server.qp, mr)
        changing = asyncio.create_task(window.invalidate())
    else:
        changing = asyncio.create_task(window.bind(server.qp, mr))
    for _ in range(3):
        await asyncio.sleep(0)
    parts: dict[str, Resource] = {"window": window, "qp": server.qp, "mr": mr}
    for name in order:
        parts[name].close()
    async with asyncio.timeout(10):
        (outcome,) = await asyncio.gather(changing, return_exceptions=True)
    assert outcome is None or isinstance(
        outcome, (aiordma.FlushedError, aiordma.ResourceClosedError)
    )
    for part in parts.values():
        await part.wait_closed(10)


async def test_strict_destroy_names_the_window(ends: Ends, kind: MWType) -> None:
    server = ends.server
    window = make(server, kind)
    mr = server.region(bytearray(DATA), OPENABLE)
    await window.bind(server.qp, mr)
    with pytest.raises(aiordma.RdmaOSError, match="1 MemoryWindow made from it"):
        mr.destroy()
    assert await ends.read(window.addr, window.rkey, 10) == DATA[:10]
    await window.invalidate()
    mr.destroy()
    await mr.wait_closed(10)


async def test_a_forgotten_window(ends: Ends) -> None:
    with pytest.warns(ResourceWarning, match="unclosed <MemoryWindow open TYPE_1 not bound"):
        MemoryWindow(ends.server.pd)
