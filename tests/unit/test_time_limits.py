"""What a time limit says when it ends a wait: what took long, and what to do about it."""

from __future__ import annotations

import ast
import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma.datagram.groups import Groups
from aiordma.link import listening
from aiordma.loop.limit import Limit
from aiordma.loop.workers import call_blocking
from tests.inside.datagram import numeric, one_of

from .verbs.fake_resource import Fake

PACKAGE = Path(aiordma.__file__).parent

LIMITS = ("asyncio.timeout", "Limit")
# Their callers make the error: of asyncio's kind for a library, or one of a connection.
NAMED_BY_THE_CALLER = {
    "contrib/aiohttp.py",
    "contrib/httpx.py",
    "endpoint/large.py",
    "endpoint/sending.py",
}


async def test_b01_a_limit_says_what_took_long() -> None:
    with (
        pytest.raises(aiordma.RdmaOSError, match=r"waiting took longer than") as caught,
        Limit(0.01, "waiting", "wait less"),
    ):
        await asyncio.get_running_loop().create_future()
    assert caught.value.hint == "wait less"
    assert "wait less" in str(caught.value)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


async def test_b01_a_name_that_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """By listen() and create_server()."""

    async def look_up(*_: Any, **__: Any) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(listening, "look_up", look_up)
    with pytest.raises(aiordma.RdmaOSError, match=r"resolving far\.example took") as caught:
        await listening.resolve("far.example", 1, 0.01)
    assert "name server" in caught.value.hint


async def test_b01_a_resource_that_is_not_destroyed() -> None:
    Fake.log, Fake.threads = [], set()
    parent = Fake("pd")
    child = Fake("qp", parent)
    parent.close()
    with pytest.raises(aiordma.RdmaOSError, match="destroying the Fake") as caught:
        await parent.wait_closed(0.01)
    assert "still open" in caught.value.hint
    child.close()
    await parent.wait_closed()


async def test_b01_a_group_that_is_neither_joined_nor_left() -> None:
    port: Any = None  # it is not asked for anything
    groups = Groups(port)
    async with one_of(groups):
        with pytest.raises(aiordma.RdmaOSError, match=r"joining the group 239\.0\.0\.1"):
            await groups.join("239.0.0.1", send_only=False, timeout=0.01)
        with pytest.raises(aiordma.RdmaOSError, match=r"leaving the group 239\.0\.0\.1"):
            await groups.leave("239.0.0.1", timeout=0.01)


async def test_b01_a_call_in_a_thread() -> None:
    go_on = threading.Event()
    try:
        with pytest.raises(aiordma.RdmaOSError, match="a call in a thread") as caught:
            await call_blocking(lambda: go_on.wait(20), undo=lambda _: None, timeout=0.01)
        assert "dmesg" in caught.value.hint
    finally:
        go_on.set()


def _nameless() -> Iterator[str]:
    """Limits that raise a TimeoutError without text, where nothing gives it one."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(PACKAGE))
        if place.startswith(("testing/", "cli/")) or place in NAMED_BY_THE_CALLER:
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            source = ast.unparse(function)
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            limits = [
                call
                for call in calls
                if ast.unparse(call.func) in ("asyncio.timeout", "Limit") and len(call.args) == 1
            ]
            taken = "except TimeoutError" in source or "suppress(TimeoutError" in source
            if limits and not taken:
                yield f"{place}: {function.name}"


@pytest.mark.slow
def test_b01_no_limit_of_the_library_is_nameless() -> None:
    # The first is asyncio's own, for programs of the command line; of the second `dial` makes the
    # error.
    assert set(_nameless()) == {"loop/timers.py: timeout", "link/dialing.py: limit_of"}


async def test_b01_a_name_of_a_datagram_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    look_up = (0, 0, 0)

    async def hang(*_: Any, **__: Any) -> None:
        await loop.create_future()

    async def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(loop, "getaddrinfo", hang)
    words = r"resolving remote_addr far\.example took"
    with pytest.raises(aiordma.RdmaOSError, match=words):
        await numeric(("far.example", 7), "remote_addr", 0.01, *look_up)
    monkeypatch.setattr(loop, "getaddrinfo", fail)
    with pytest.raises(socket.gaierror, match=r"local_addr far\.example: Name or"):
        await numeric(("far.example", 7), "local_addr", 5.0, *look_up)
