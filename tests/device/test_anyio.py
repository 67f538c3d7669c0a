"""Cancel scopes of anyio, which cancel again in every turn of the loop until they are left.

So a wait in a `finally` or `except` block is canceled, too, and a call that has to wait there, for
memory or for tasks of its own, is canceled many times before it can end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, TypeVar

import anyio
import pytest

import aiordma
from aiordma import Broadcast, Connection
from tests.device import (
    test_broadcast,
    test_cancel,
    test_cancel_one_sided,
    test_cancel_streams,
    test_recv_into,
    test_request_into,
)
from tests.device.meeting import Pair, are_alive, paired
from tests.device.noting import noted
from tests.device.oracle import until
from tests.device.request_server import handler, question
from tests.device.stepping import Steps
from tests.device.streaming import stream_pair
from tests.device.test_request_into import FETCHED, MIB, asking, is_idle

pytestmark = pytest.mark.device

T = TypeVar("T")
LIMIT_S = 60.0
SMALL = test_cancel.CONFIG
#: Of a scope whose time is up before anything has come.
SHORT_S = 0.05


async def run_in_scope(coro: Coroutine[Any, Any, T], steps: Steps) -> T | None:
    """As `run_canceled`, by a scope that is canceled at the step."""

    async def run() -> T | None:
        with anyio.CancelScope() as scope:
            steps.act = scope.cancel
            return await steps.drive(coro)
        assert scope.cancelled_caught
        return None

    return await asyncio.create_task(run())


def _of(module: ModuleType, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(module, name, options, id=" ".join((name, *map(str, options.values()))))
        for name, options in calls
    ]


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        *_of(
            test_cancel,
            ("test_connect", {}), ("test_accept", {}), ("test_accept_of_a_request", {}),
            ("test_close", {}), ("test_recv_loses_nothing", {}), ("test_send", {}),
        ),
        *_of(
            test_cancel_one_sided,
            *((f"test_{call}", {"size": size}) for call in ("read", "write", "a_lease")
              for size in test_cancel_one_sided.SIZES),
            ("test_a_batch", {}), ("test_noted_write", {"size": 100, "notes": True}),
            ("test_notes", {}),
        ),
        *_of(
            test_cancel_streams,
            ("test_open_connection", {}), ("test_start_server", {}), ("test_accepting", {}),
            ("test_a_conversation", {"size": 100_000}), ("test_wait_closed", {}),
            *(("test_what_was_canceled_can_go_on", {"how": how})
              for how in ("drain", "read", "readexactly", "readinto")),
        ),
        *_of(
            test_broadcast,
            *(("test_cancel_at_every_await", {"size": size}) for size in (1000, 2 * MIB)),
        ),
        *_of(
            test_recv_into,
            *(("test_cancel_at_every_step", {"size": size}) for size in (10, 3 * MIB)),
        ),
        *_of(
            test_request_into,
            *(("test_canceled_at_every_await", {"size": size}) for size in (10, 3 * MIB)),
        ),
    ],
)  # fmt: skip
async def test_canceled_at_every_step(
    address: str,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    options: dict[str, Any],
) -> None:
    """What holds after a cancellation holds after that of a scope, which catches it."""
    monkeypatch.setattr(module, "run_canceled", run_in_scope)
    test: Callable[..., Coroutine[Any, Any, None]] = getattr(module, name)
    takes = test.__code__.co_varnames[0]
    if takes == "address":
        await test(address, late, **options)
        return
    async with paired(address, FETCHED if takes == "fetching" else module.CONFIG) as pair:
        await test(pair, late, **options)


# Scopes, groups and shields as programs use them

Wait = Callable[["Scene"], Coroutine[Any, Any, object]]


class Scene:
    """A connection of messages, one of requests, a stream, and what goes with them."""

    def __init__(self, pair: Pair, client: Connection, listener: aiordma.Listener, **more: Any):
        self.client, self.server = pair
        self.asks = client
        self.listener = listener
        self.notes, self.pool, self.reader = more["notes"], more["pool"], more["reader"]


async def _ask(conn: Connection, into: bytearray | None = None) -> object:
    return await conn.request(question(1, 1, LIMIT_S, 0), into=into)


async def _lent(pool: aiordma.Pool) -> None:
    async with pool.connection():
        pytest.fail("its only connection is lent")


WAITS: dict[str, Wait] = {
    "accept": lambda scene: scene.listener.accept(),
    "iteration": lambda scene: anext(aiter(scene.client)),
    "notes": lambda scene: anext(scene.notes),
    "pool": lambda scene: _lent(scene.pool),
    "read": lambda scene: scene.reader.read(1),
    "readexactly": lambda scene: scene.reader.readexactly(1),
    "recv": lambda scene: scene.client.recv(),
    "recv_into": lambda scene: scene.client.recv_into(bytearray(9)),
    "request": lambda scene: _ask(scene.asks),
    "request into": lambda scene: _ask(scene.asks, bytearray(9)),
    "requests": lambda scene: anext(aiter(scene.server.requests())),
    "wait_closed": lambda scene: scene.client.wait_closed(),
}


@asynccontextmanager
async def scene(address: str) -> AsyncIterator[Scene]:
    async with (
        paired(address) as pair,
        asking(address) as (asks, _),
        aiordma.listen(address, 0) as listener,
        noted(pair, bytearray(9)) as (lease, _),
        stream_pair(address) as ((reader, _), _),
        aiordma.serve(lambda conn: conn.wait_closed(), address, 0) as server,
        aiordma.Pool(address, server.port, max_size=1) as pool,
        pool.connection(),
    ):
        yield Scene(pair, asks, listener, notes=lease.notes(), pool=pool, reader=reader)


@pytest.mark.parametrize("wait", WAITS)
async def test_a_time_limit_ends_each_wait(address: str, wait: str) -> None:
    """`move_on_after` leaves its block, `fail_after` raises, and the connection goes on."""
    async with scene(address) as there:
        began = time.monotonic()
        with anyio.move_on_after(SHORT_S) as scope:
            await WAITS[wait](there)
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            with anyio.fail_after(SHORT_S):
                await WAITS[wait](there)
        assert time.monotonic() - began < LIMIT_S
        if wait != "requests":  # whose connection has no other messages any more
            await are_alive((there.client, there.server))
        await is_idle(there.asks)


@pytest.mark.parametrize("size", [100, 5000, MIB])
async def test_a_send_that_waits_for_room(address: str, size: int) -> None:
    """What was sent before arrives whole and in order."""
    async with paired(address, SMALL) as (client, server):
        sent = 0
        with anyio.move_on_after(SHORT_S) as scope:
            while True:
                await client.send(sent.to_bytes(4, "big").ljust(size, b"."))
                sent += 1
        assert scope.cancelled_caught
        for number in range(sent):
            with await server.recv() as message:
                assert message == number.to_bytes(4, "big").ljust(size, b".")
        sending = asyncio.create_task(client.send(b"last"))
        with await server.recv() as message:
            if message != b"last":  # the one that was canceled may arrive
                assert message == sent.to_bytes(4, "big").ljust(size, b".")
                message = await server.recv()
            assert message == b"last"
        await sending


async def test_drain_waits_for_room(address: str) -> None:
    async with stream_pair(address) as ((reader, _), (_, writer)):
        with anyio.move_on_after(SHORT_S) as scope:
            while True:
                writer.write(bytes(MIB))
                await writer.drain()
        assert scope.cancelled_caught
        writer.write(b"\1")
        writer.write_eof()
        data = await reader.read()
        assert data.rstrip(b"\0").endswith(b"\1")
        assert len(data) % MIB == 1


async def test_a_group_ends_with_its_first_error(address: str) -> None:
    """Its server and its clients are tasks of one group, and nothing of them is left."""
    ended: list[str] = []

    async def serve(*, task_status: Any) -> None:
        try:
            async with aiordma.serve_requests(handler, address, 0, grace_s=LIMIT_S) as server:
                task_status.started(server.port)
                await server.serve_forever(signals=False)
        finally:
            ended.append("server")

    async def ask(port: int, asking: anyio.Event) -> None:
        try:
            async with aiordma.connect(address, port) as client:
                asking.set()
                await client.request(question(1, 1, LIMIT_S, 0))
        finally:
            ended.append("client")

    async def work() -> None:
        async with anyio.create_task_group() as group:
            port = await group.start(serve)
            for asking in (events := [anyio.Event() for _ in range(3)]):
                group.start_soon(ask, port, asking)
            for asking in events:
                await asking.wait()
            msg = "of the group"
            raise ValueError(msg)

    began = time.monotonic()
    with pytest.raises(ExceptionGroup) as caught:
        await work()
    assert caught.group_contains(ValueError, match="of the group")
    assert sorted(ended) == ["client"] * 3 + ["server"]
    assert time.monotonic() - began < LIMIT_S / 2, "the handlers were not canceled"


@pytest.mark.parametrize("requests", [False, True])
async def test_handlers_have_ended_when_their_server_has(address: str, requests: bool) -> None:
    began, ended = asyncio.Event(), False

    async def handle(_: object) -> None:
        nonlocal ended
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            await anyio.sleep(SHORT_S)
            ended = True

    async def ask(port: int) -> None:
        async with aiordma.connect(address, port) as client:
            await (client.request(b"?") if requests else client.recv())

    serve: Any = aiordma.serve_requests if requests else aiordma.serve
    with anyio.CancelScope() as scope:
        async with serve(handle, address, 0, grace_s=LIMIT_S) as server:
            asking = asyncio.create_task(ask(server.port))  # not of the scope
            await began.wait()
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert ended
    with pytest.raises((aiordma.RequestError, ConnectionError)):
        await asking


async def test_the_handler_of_a_request_is_canceled_with_it(address: str) -> None:
    """Scopes and groups of the handler see that as a cancellation from outside."""
    ends: list[str] = []
    began = asyncio.Event()

    async def handle(_: object) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                began.set()
        except asyncio.CancelledError:
            ends.append("canceled")
            raise

    async def leave(scope: anyio.CancelScope) -> None:
        await began.wait()  # a handler that has not begun would never be called
        scope.cancel()

    async with (
        aiordma.serve_requests(handle, address, 0) as server,
        aiordma.connect(address, server.port) as client,
        anyio.create_task_group() as group,
    ):
        with anyio.CancelScope() as scope:
            group.start_soon(leave, scope)
            await client.request(b"?")
        assert scope.cancelled_caught
        await until(lambda: ends == ["canceled"], LIMIT_S)


@pytest.mark.parametrize("shield", [False, True])
async def test_a_close_in_a_canceled_scope(address: str, shield: bool) -> None:
    """It aborts the connection, unless a scope shields it."""
    async with aiordma.listen(address, 0) as listener:
        client = await aiordma.connect(address, listener.port)
        server = await listener.accept()
        with anyio.CancelScope() as scope:
            try:
                await client.send(b"last words")
                scope.cancel()
                await client.recv()
            finally:
                with anyio.CancelScope(shield=shield):
                    await client.close()
        assert scope.cancelled_caught
        await client.wait_closed()
        if shield:
            with await server.recv() as message:
                assert message == b"last words"
            with pytest.raises(aiordma.ConnectionEndedError):
                await server.recv()
        await server.close()


async def test_a_block_that_is_canceled_lets_go_of_all(address: str) -> None:
    """Connections, a lease, memory, a pool and a stream, whose blocks a scope leaves."""
    async with aiordma.listen(address, 0) as listener:
        accepting = asyncio.create_task(listener.accept())
        with anyio.CancelScope() as scope:
            async with (
                aiordma.Memory(4096) as memory,
                aiordma.connect(address, listener.port, memory=memory) as client,
                client.expose(memory.view[:100], write=True),
                aiordma.Pool(address, listener.port) as pool,
            ):
                server = await accepting
                await client.send(b"here")
                await server.recv()
                await pool.wait()
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        await client.wait_closed()
        await memory.close()
        await pool.close()
        with pytest.raises(ConnectionError):
            await server.recv()
        await server.close()


async def test_a_broadcast_that_is_left_has_let_go_of_its_buffer(address: str) -> None:
    async with paired(address, SMALL) as (client, server):
        broadcast = Broadcast([client])
        with anyio.move_on_after(SHORT_S) as scope:
            while True:
                await broadcast.send(bytes(100))
        assert scope.cancelled_caught
        assert len(asyncio.all_tasks()) == 1
        (stats,) = broadcast.stats.values()
        for _ in range(stats.sent):
            (await server.recv()).release()
        await broadcast.send(b"last")
        with await server.recv() as message:
            assert message == b"last"
