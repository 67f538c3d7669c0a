"""Servers that are restarted one after the other, while clients of a pool ask them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from typing import Literal

import pytest

import aiordma
from tests.device.flood import flooding
from tests.device.oracle import until
from tests.device.test_requests import LIMIT_S
from tests.inside.link import acceptor_of, limit_half_open

pytestmark = pytest.mark.device

CALLERS, RESTARTS = 20, 6


async def ask_again(client: aiordma.Connection) -> None:
    """Ask until there is no answer."""
    while True:
        with await client.request(b"?"):
            pass


async def echo(request: aiordma.Request) -> bytes:
    return bytes(request.body)


@pytest.mark.smoke
@pytest.mark.parametrize(("number", "policy"), [(1, "failover"), (2, "failover"), (2, "spread")])
async def test_a_restart_in_good_order_loses_no_request(
    address: str, number: int, policy: Literal["failover", "spread"]
) -> None:
    """Each is served once, although none may be served twice."""
    served: Counter[int] = Counter()
    asked = 0
    stop = False

    async def serve(request: aiordma.Request) -> bytes:
        served[int.from_bytes(request.body, "big")] += 1
        await asyncio.sleep(0)
        return bytes(request.body)

    async def more() -> None:
        before = len(served)
        await until(lambda: len(served) > before + 100, LIMIT_S)

    async def caller(pool: aiordma.Pool) -> None:
        nonlocal asked
        while not stop:
            asked += 1
            question = asked.to_bytes(4, "big")
            with await pool.request(question, timeout=LIMIT_S) as answer:
                assert bytes(answer) == question

    async with contextlib.AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(aiordma.serve_requests(serve, address, 0, grace_s=5))
            for _ in range(number)
        ]
        ports = [server.port for server in running]
        addresses = [(address, port) for port in ports]
        pool = await stack.enter_async_context(
            aiordma.Pool(addresses, policy=policy, min_size=4, max_size=4, max_pause=0.2)
        )
        await pool.wait(LIMIT_S)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(caller(pool))
            for turn in range(RESTARTS):
                at = turn % number
                await more()
                await running[at].stop()
                running[at] = await stack.enter_async_context(
                    aiordma.serve_requests(serve, address, ports[at], grace_s=5)
                )
            await more()
            stop = True
        assert set(served.values()) == {1}
        assert len(served) == asked == pool.stats.requests


@pytest.mark.parametrize("serves", [False, True])
async def test_a_client_that_has_just_connected_may_ask_elsewhere(
    address: str, *, serves: bool
) -> None:
    """The server, or a listener whose program has accepted none, ends at the first connect."""
    seen: Counter[str] = Counter()

    async def ask(port: int, connected: asyncio.Event) -> None:
        try:
            client = await aiordma.connect(address, port, timeout=LIMIT_S)
        except ConnectionRefusedError:
            seen["no connection"] += 1
            connected.set()
            return
        connected.set()
        async with client:
            with pytest.raises(aiordma.RequestRefusedError) as refused:
                await ask_again(client)
            assert refused.value.try_again
            seen["refused"] += 1

    for _ in range(5):
        connected = asyncio.Event()
        opening = aiordma.serve_requests(echo, address, 0) if serves else aiordma.listen(address, 0)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group, opening as listening:
            for _ in range(8):
                group.create_task(ask(listening.port, connected))
            await connected.wait()
            if isinstance(listening, aiordma.Server):
                await listening.stop()
                left = listening.listener.connections
            else:
                listening.close()
                await listening.wait_closed()
                left = listening.connections
            assert not left  # or a program that ends now would not say goodbye
    assert seen["refused"] > 0
    assert seen.total() == 40, seen


async def test_a_handler_that_takes_requests_only_now_gets_none(address: str) -> None:
    """They are refused at once, and not when the server ends."""
    goes_on = asyncio.Event()

    async def work(_: aiordma.Request) -> None:
        await asyncio.Event().wait()

    async def serve(connection: aiordma.Connection) -> None:
        await goes_on.wait()
        await aiordma.handle_requests(connection, work)

    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.serve(serve, address, 0, grace_s=2 * LIMIT_S) as server,
        aiordma.connect(address, server.port) as client,
    ):
        early = asyncio.create_task(client.request(b"?"))
        await asyncio.sleep(0)
        await client.flush()
        stopping = asyncio.create_task(server.stop())
        for _ in range(10):  # turns in which the connection is told
            await asyncio.sleep(0)
        goes_on.set()
        late = asyncio.create_task(client.request(b"?"))
        for asking in early, late:
            with pytest.raises(aiordma.RequestRefusedError) as refused:
                await asking
            assert refused.value.try_again
        await stopping


async def test_authorize_may_stop_its_server(address: str) -> None:
    """The end does not wait for a call that waits for it."""

    async def authorize(_: aiordma.ConnectRequest) -> bool:
        await server.stop()
        return True

    async with (
        asyncio.timeout(LIMIT_S),
        aiordma.serve_requests(echo, address, 0, authorize=authorize) as server,
    ):
        with pytest.raises(ConnectionRefusedError):
            await aiordma.connect(address, server.port, timeout=LIMIT_S)


async def test_a_large_request_that_is_not_read_may_go_elsewhere(address: str) -> None:
    """The server ends in good order as soon as it hears of one."""
    body = bytes(32 << 20)

    async def serve(connection: aiordma.Connection) -> None:
        connection.requests()
        await until(lambda: connection.stats.messages_received > 0, LIMIT_S)

    async with aiordma.serve(serve, address, 0) as server, asyncio.timeout(LIMIT_S):
        for _ in range(3):
            async with aiordma.connect(address, server.port) as client:
                with pytest.raises(aiordma.RequestRefusedError) as refused:
                    await client.request(body)
                assert refused.value.try_again


async def test_without_time_to_finish_no_request_is_in_doubt(address: str) -> None:
    """A handler that is canceled says so, and what no handler has begun may go elsewhere."""
    served: Counter[int] = Counter()
    numbers = itertools.count()
    ends: list[tuple[int, OSError | aiordma.RequestError]] = []

    async def serve(request: aiordma.Request) -> bytes:
        served[int.from_bytes(request.body, "big")] += 1
        await asyncio.sleep(0)
        return b""

    async def ask(client: aiordma.Connection) -> None:
        for number in numbers:
            try:
                with await client.request(number.to_bytes(8, "big")):
                    pass
            except (OSError, aiordma.RequestError) as exc:
                ends.append((number, exc))
                return

    for turn in range(3):
        async with (
            asyncio.timeout(LIMIT_S),
            aiordma.serve_requests(serve, address, 0, grace_s=0) as server,
            contextlib.AsyncExitStack() as stack,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(4):
                client = await stack.enter_async_context(aiordma.connect(address, server.port))
                for _ in range(4):
                    group.create_task(ask(client))
            while served.total() < 50 * (turn + 1):  # noqa: ASYNC110
                await asyncio.sleep(0)
            await server.stop()
    assert len(ends) == 3 * 16
    for number, end in ends:
        if isinstance(end, aiordma.RequestRefusedError):
            assert end.try_again
        elif isinstance(end, aiordma.RequestError):
            assert end.remote_type == "CancelledError"
            assert served.pop(number)
        else:
            assert isinstance(end, aiordma.ConnectionLostError)
            assert not end.request_sent
        assert not served[number]


async def test_clients_that_do_not_confirm_delay_no_end(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which a client has to act while others wait is all that they get."""
    limit_half_open(monkeypatch, pressed_s=0.2)
    async with aiordma.serve_requests(echo, address, 0, grace_s=10 * LIMIT_S) as server:
        acceptor = acceptor_of(server.listener)
        async with flooding(address, server.port, clients=3, rate=10):
            await until(lambda: acceptor.places.open == 3, LIMIT_S)
            async with asyncio.timeout(LIMIT_S):
                await server.stop()
    assert server.listener.dropped == 3
    assert not acceptor.handshakes


@pytest.mark.parametrize("begun", [False, True])
async def test_what_a_program_has_not_answered_is_in_doubt(address: str, *, begun: bool) -> None:
    """A program that takes requests by itself, and closes while there are some."""
    asked = asyncio.Event()

    async def serve(connection: aiordma.Connection) -> None:
        requests = connection.requests(limit=1)
        first = await anext(requests)
        if not begun:
            await first.reply()
        asked.set()
        await until(lambda: connection.stats.messages_received >= 2 - begun, LIMIT_S)
        await connection.close()

    async with (
        aiordma.serve(serve, address, 0) as server,
        aiordma.connect(address, server.port) as client,
        asyncio.timeout(LIMIT_S),
    ):
        first = asyncio.create_task(client.request(b"?"))
        await asked.wait()
        second = asyncio.create_task(client.request(b"?"))
        if begun:
            with pytest.raises(aiordma.ConnectionLostError) as lost:
                await first
            assert lost.value.request_sent
            await asyncio.wait([second])
            assert second.exception() is not None
        else:
            await first
            with pytest.raises(aiordma.RequestRefusedError, match="closed") as refused:
                await second
            assert refused.value.try_again
