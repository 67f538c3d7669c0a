"""The fixtures that are coroutines; loaded where pytest-asyncio is.

A test runs in a loop of its own, or in that of its class, module, package or session. Each of these
fixtures exists once for each kind of loop, and a test gets that of its own loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from aiordma import Connection, RdmaStreamReader, RdmaStreamWriter

    StreamEnd = tuple[RdmaStreamReader, RdmaStreamWriter]

__all__: list[str] = []

#: Seconds to meet in: an address that leads to no device must not hold up the session.
_LIMIT_S = 30.0
Scope = Literal["function", "class", "module", "package", "session"]
_SCOPES: tuple[Scope, ...] = ("function", "class", "module", "package", "session")


def _pair(scope: Scope) -> object:
    @pytest_asyncio.fixture(loop_scope=scope, name=f"_rdma_pair_in_{scope}_loop")
    async def pair(rdma_address: str) -> AsyncIterator[tuple[Connection, Connection]]:
        import aiordma

        async with (
            aiordma.listen(rdma_address, 0) as listener,
            aiordma.connect(rdma_address, listener.port, timeout=_LIMIT_S) as client,
            await listener.accept() as server,
        ):
            yield client, server

    return pair


def _stream_pair(scope: Scope) -> object:
    @pytest_asyncio.fixture(loop_scope=scope, name=f"_rdma_stream_pair_in_{scope}_loop")
    async def pair(rdma_address: str) -> AsyncIterator[tuple[StreamEnd, StreamEnd]]:
        from aiordma_pytest.device import stream_pair

        async with stream_pair(rdma_address, _LIMIT_S) as ends:
            yield ends

    return pair


def _leak_check(scope: Scope) -> object:
    @pytest_asyncio.fixture(loop_scope=scope, name=f"_rdma_leak_check_in_{scope}_loop")
    async def check(request: pytest.FixtureRequest, _rdma_warm: None) -> AsyncIterator[None]:
        from aiordma_pytest import leaks, report_leaks, settle_s

        before = leaks.Snapshot.now()
        yield
        left = await leaks.left_behind_in_loop(before, settle_s(request.node))
        report_leaks(request.node, left)

    return check


for _each in _SCOPES:
    for _make in (_pair, _stream_pair, _leak_check):
        # pytest finds fixtures among the names of a module.
        globals()[f"{_make.__name__}_{_each}"] = _make(_each)


def in_loop_of_test(request: pytest.FixtureRequest, name: str) -> Any:
    """Return the value of one of these fixtures, in the loop that the test runs in."""
    marker = request.node.get_closest_marker("asyncio")
    chosen = marker.kwargs.get("loop_scope") if marker is not None else None
    if chosen is None and marker is not None:
        chosen = request.config.getini("asyncio_default_test_loop_scope")
    scope = chosen if chosen in _SCOPES else "function"
    return request.getfixturevalue(f"_{name}_in_{scope}_loop")


@pytest.fixture
def rdma_pair(request: pytest.FixtureRequest) -> tuple[Connection, Connection]:
    """Two ends of a connection, (client, server), which the fixture closes."""
    return in_loop_of_test(request, "rdma_pair")  # type: ignore[no-any-return]


@pytest.fixture
def rdma_stream_pair(request: pytest.FixtureRequest) -> tuple[StreamEnd, StreamEnd]:
    """Two ends of a stream, each (reader, writer): the client's and the server's."""
    return in_loop_of_test(request, "rdma_stream_pair")  # type: ignore[no-any-return]
