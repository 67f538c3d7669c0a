"""The switch where it has nothing to do: loopback is asyncio's own, whatever the machine has."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

import pytest
import trustme

from aiordma.errors import RdmaError
from aiordma.streams.policy import (
    RdmaEventLoop,
    RdmaLoopMixin,
    event_loop_policy,
    new_event_loop,
)

HOST = "127.0.0.1"
LIMIT_S = 30


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs a coroutine on a loop with the switch."""

    def run(main: Any, **options: Any) -> Any:
        factory = lambda: new_event_loop(uvloop=request.param, **options)  # noqa: E731
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(main, LIMIT_S))

    return run


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readline())
    writer.close()
    await writer.wait_closed()


async def talk(**options: Any) -> tuple[bytes, Any]:
    """What an echo server answers, and over what."""
    server = await asyncio.start_server(answer, HOST, 0, reuse_address=True)
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(HOST, port, **options)
        writer.write(b"hello\n")
        data = await reader.read()
        backend = writer.get_extra_info("backend")
        writer.close()
        await writer.wait_closed()
    return data, backend


def test_loopback_is_the_loops_own(
    runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")
    assert runner(talk(local_addr=(HOST, 0))) == (b"hello\n", None)
    said = [record.getMessage() for record in caplog.records if record.name == "aiordma"]
    assert said[0] == f"listening on {HOST} port 0 not over RDMA: no RDMA device for the address"
    assert said[1].startswith(f"connecting to {HOST} port ")
    assert said[1].endswith(" not over RDMA: no RDMA device for the address")


def test_a_rule_is_asked_with_numbers(
    runner: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")
    asked: list[tuple[str, int]] = []

    def never(host: str, port: int) -> bool:
        asked.append((host, port))
        return False

    assert runner(talk(), when=never) == (b"hello\n", None)
    assert asked[0] == (HOST, 0)
    assert asked[1][0] == HOST
    assert asked[1][1] > 0
    assert "not over RDMA: the program's rule" in caplog.text


def test_always_does_not_fall_back(runner: Callable[..., Any]) -> None:
    """A TCP server is there, and is not what the client gets."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        base: Any = super(RdmaLoopMixin, loop)
        server = await base.create_server(asyncio.Protocol, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        try:
            with pytest.raises((OSError, RdmaError)):
                await asyncio.wait_for(asyncio.open_connection(HOST, port), LIMIT_S / 2)
        finally:
            server.close()
            await server.wait_closed()

    runner(main(), when="always")


def test_tls_of_the_loops_own(runner: Callable[..., Any]) -> None:
    authority = trustme.CA()
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)

    async def main() -> bytes:
        server = await asyncio.start_server(answer, HOST, 0, ssl=theirs)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(HOST, port)
            await writer.start_tls(ours, server_hostname=HOST)
            writer.write(b"hello\n")
            data = await reader.readline()
            writer.close()
            await writer.wait_closed()
        return data

    assert runner(main()) == b"hello\n"


@pytest.mark.parametrize("uvloop", [False, True])
def test_a_rule_that_is_none_leaves_no_loop(uvloop: bool) -> None:
    for wrong in ("sometimes", None, 1):
        with pytest.raises(ValueError, match='"device", "always" or a function'):
            new_event_loop(when=wrong, uvloop=uvloop)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match='"device", "always" or a function'):
            event_loop_policy(when=wrong, uvloop=uvloop)  # type: ignore[arg-type]


# Python 3.14 and later say that policies have no future.
@pytest.mark.filterwarnings("ignore:.*Policy:DeprecationWarning")
def test_the_loops_of_a_policy() -> None:
    for uvloop in (False, True):
        loop = event_loop_policy(uvloop=uvloop).new_event_loop()
        assert isinstance(loop, RdmaLoopMixin)
        assert isinstance(loop, RdmaEventLoop) != uvloop
        loop.close()
