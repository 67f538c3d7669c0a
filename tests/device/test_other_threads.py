"""What belongs to one event loop refuses another one, and threads, at once and untouched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from tests.device.meeting import Pair, meet
from tests.device.streaming import stream_pair

pytestmark = pytest.mark.device

LIMIT_S = 20


async def in_a_thread(call: Callable[[], Any], *, loop: bool) -> BaseException | None:
    """What `call` raises in a thread, with a running loop of its own there or without."""
    raised: list[BaseException | None] = []

    async def use() -> None:
        result = call()
        if asyncio.iscoroutine(result):
            await asyncio.wait_for(result, LIMIT_S)

    def run() -> None:
        try:
            if loop:
                asyncio.run(use())
            else:
                call()
        except BaseException as exc:
            raised.append(exc)
        else:
            raised.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(thread.join)
    return raised[0]


async def refuse_all(calls: dict[str, Callable[[], Any]], *, coroutines: bool = False) -> None:
    for name, call in calls.items():
        for loop in (True,) if coroutines else (True, False):
            error = await in_a_thread(call, loop=loop)
            assert isinstance(error, RuntimeError), (name, loop, error)
            assert "belongs to another event loop" in str(error), (name, loop)


async def test_j02_a_listener_and_a_connection_refuse_other_loops(address: str) -> None:
    async with asyncio.timeout(3 * LIMIT_S), aiordma.listen(address, 0) as listener:
        client, server = await meet(listener, address)
        waiting = {"accept": listener.accept, "send": lambda: client.send(b"x")}
        await refuse_all(waiting, coroutines=True)
        await refuse_all(
            {"close": listener.close, "requests": listener.requests, "abort": client.abort}
        )
        # All of it goes on.
        await client.send(b"on")
        assert bytes(await server.recv()) == b"on"
        again, there = await meet(listener, address)
        await asyncio.gather(*(one.close() for one in (client, server, again, there)))


async def test_j02_a_request_refuses_other_loops(address: str) -> None:
    """It is still open afterwards."""
    async with asyncio.timeout(3 * LIMIT_S), aiordma.listen(address, 0) as listener:
        requests = listener.requests()
        connecting = asyncio.create_task(aiordma.connect(address, listener.port))
        request = await anext(requests)
        await refuse_all({"accept": request.accept}, coroutines=True)
        await refuse_all({"reject": request.reject})
        server = await request.accept()
        client = await connecting
        await client.send(b"in")
        assert bytes(await server.recv()) == b"in"
        await asyncio.gather(client.close(), server.close())


async def test_j02_a_lease_and_events_refuse_other_loops(pair: Pair) -> None:
    client, server = pair
    lease = server.expose(bytearray(b"here"), read=True)
    await refuse_all({"enter": lease.__aenter__}, coroutines=True)
    events = server.events()
    async with asyncio.timeout(3 * LIMIT_S), lease as region:
        await refuse_all(
            {"revoke": lease.revoke, "exit": lease.__aexit__, "next": events.__anext__},
            coroutines=True,
        )
        into = bytearray(4)
        assert await client.read(region, into) == 4
        assert into == b"here"
    await refuse_all({"close": events.close})
    with events:
        pass
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_j02_a_stream_and_its_server_refuse_other_loops(address: str) -> None:
    async with asyncio.timeout(3 * LIMIT_S), stream_pair(address) as (near, far):
        reader, writer = near
        transport: Any = writer.transport
        kept = transport.write
        await refuse_all({
            "write": lambda: writer.write(b"x"),
            "a copy": lambda: writer.write(bytearray(b"x")),
            "kept": lambda: kept(b"x"),
            "eof": writer.write_eof,
            "abort": transport.abort,
            "pause": transport.pause_reading,
            "resume": transport.resume_reading,
            "protocol": lambda: transport.set_protocol(asyncio.Protocol()),
        })  # fmt: skip
        assert transport.is_reading()
        writer.write(b"on")
        assert await far[0].readexactly(2) == b"on"
        far[1].write(b"and back")
        assert await reader.readexactly(8) == b"and back"

        server = await aiordma.start_server(lambda *_: None, address, 0)
        await refuse_all({
            "close": server.close, "clients": server.close_clients, "abort": server.abort_clients
        })  # fmt: skip
        serving = {"start": server.start_serving, "forever": server.serve_forever}
        await refuse_all(serving, coroutines=True)
        assert server.is_serving()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("loop", [True, False], ids=["of a loop", "plain"])
async def test_j02_a_stream_is_closed_out_of_another_thread(address: str, loop: bool) -> None:
    """A collector calls close() of a forgotten StreamWriter in whatever thread it comes to run."""
    async with asyncio.timeout(3 * LIMIT_S), stream_pair(address) as (near, far):
        near[1].write(b"the last")
        assert await in_a_thread(near[1].close, loop=loop) is None
        assert await far[0].read() == b"the last"
        await near[1].wait_closed()


@pytest.mark.one_loop
async def test_j02_a_loop_that_stands_still_lets_other_threads_close(address: str) -> None:
    """A loop that is run by one thread and then by another, and what is left when none runs it."""

    def elsewhere() -> None:
        loop = asyncio.new_event_loop()
        listener = loop.run_until_complete(listen())
        client, server = loop.run_until_complete(meet(listener, address))
        raised: list[BaseException] = []

        def go_on() -> None:
            try:
                client.abort()
                listener.close()
                loop.run_until_complete(client.wait_closed())
                loop.run_until_complete(server.close())
                loop.run_until_complete(listener.wait_closed())
                loop.run_until_complete(loop.shutdown_asyncgens())
            except BaseException as exc:
                raised.append(exc)

        thread = threading.Thread(target=go_on)
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        loop.close()
        assert not raised

    async def listen() -> aiordma.Listener:
        return await aiordma.listen(address, 0)

    async with asyncio.timeout(2 * LIMIT_S):
        await asyncio.to_thread(elsewhere)
