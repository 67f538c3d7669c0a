"""A child forked from a process that uses RDMA: it is told so at once, and touches nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

import aiordma
from aiordma import RdmaStreamReader
from aiordma.cm import EventChannel
from aiordma.memory import RegistrationCache
from aiordma.verbs import SGE, Access, DeviceEvents, MemoryRegion, ProtectionDomain, RecvWR
from tests.device.ends import Ends
from tests.device.forking import in_child, outcome, refusals, silences
from tests.device.streaming import noted, stream_pair

pytestmark = pytest.mark.device


async def test_a06_streams_in_a_forked_child(address: str) -> None:
    async with stream_pair(address) as ((reader, writer), (their_reader, their_writer)):
        transport = writer.transport
        kept = transport.write
        waiting = asyncio.ensure_future(their_reader.readexactly(6))
        await asyncio.sleep(0)
        things = (transport, reader, writer, their_writer.transport, their_reader, their_writer)

        def child() -> Iterable[str]:
            yield from refusals(*things)
            yield from silences(transport, writer, their_writer)
            for name, call in (
                ("kept write", lambda: kept(b"of the child")),
                ("write", lambda: writer.write(b"of the child")),
                ("drain", lambda: writer.drain()),
                ("read", lambda: reader.read(1)),
                ("readinto", lambda: reader.readinto(bytearray(1))),
                ("async for", lambda: reader.__aiter__()),
                ("transport.write", lambda: transport.write(b"of the child")),
            ):
                if (said := outcome(call)) != "ForkedError":
                    yield f"{name}: {said}"
            if not writer.is_closing() or not isinstance(reader, RdmaStreamReader):
                yield "no answer about itself"

        await in_child(child)
        writer.write(b"parent")
        assert await waiting == b"parent"


async def test_a06_protocols_and_their_server_in_a_forked_child(address: str) -> None:
    async with noted(address) as both:
        client, server, listening = both.client, both.server, both.listening

        def child() -> Iterable[str]:
            yield from refusals(listening, client.transport, server.transport)
            yield from silences(listening, client.transport)

        await in_child(child)
        server.transport.write(b"goes on")
        assert await client.received(7) == b"goes on"
        assert listening.is_serving()


async def test_a06_messages_in_a_forked_child(address: str) -> None:
    async with (
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port) as client,
        await listener.accept() as server,
    ):
        events = client.events()
        waiting = client.expose(64, read=True)
        notes = client.expose(64, write=True, notes=True).notes()
        async with client.expose(64, read=True, write=True), await client.register(64) as region:
            await client.send(b"before")
            message = await server.recv()

            def child() -> Iterable[str]:
                yield from refusals(listener, client, server, region, events, waiting, notes)
                yield from silences(listener, client, server, region, events, waiting)
                if (said := outcome(message.release)) != "returned":
                    yield f"release: {said}"
                for call in (listener.__aiter__, events.__aiter__, waiting.__aenter__):
                    if (said := outcome(call)) != "ForkedError":
                        yield f"{call}: {said}"

            await in_child(child)
            message.release()
        await client.send(b"after")
        assert bytes(await server.recv()) == b"after"
        async with aiordma.connect(address, listener.port):
            await listener.accept()


async def test_a06_native_objects_in_a_forked_child(ends: Ends) -> None:
    end = ends.client
    region = end.region(64)
    cache = RegistrationCache(end.pd)
    events = DeviceEvents(end.context)
    prepared = end.qp.prepare_recv([RecvWR(sg_list=[SGE(region)])])
    channel = end.cm_id.event_channel

    def child() -> Iterable[str]:
        things = (
            channel, end.cm_id, end.qp, end.cq, end.pd, end.context, end.channel, region, cache,
            events,
        )  # fmt: skip
        yield from refusals(*things)
        yield from silences(*things)
        if (said := outcome(prepared.execute)) != "ForkedError":
            yield f"execute: {said}"

    await in_child(child)
    prepared.free()
    assert not channel.closed
    assert end.context.query_port(1).state
    events.close()
    cache.close()


async def test_a06_a_forked_child_cannot_connect_and_is_told_so(address: str) -> None:
    def attempts() -> tuple[tuple[str, Callable[[], Coroutine[Any, Any, Any]]], ...]:
        async def channel() -> None:
            EventChannel()

        return (
            ("connect", lambda: aiordma.connect(address, 1)),
            ("listen", lambda: aiordma.listen(address, 0)),
            ("open_connection", lambda: aiordma.open_connection(address, 1)),
            ("create_server", lambda: aiordma.create_server(asyncio.Protocol, address, 0)),
            (
                "create_datagram_endpoint",
                lambda: aiordma.create_datagram_endpoint(
                    asyncio.DatagramProtocol, local_addr=(address, 0)
                ),
            ),
            ("EventChannel", channel),
        )

    def child() -> Iterable[str]:
        for name, attempt in attempts():

            async def main(attempt: Callable[[], Any] = attempt) -> None:
                await attempt()

            try:
                asyncio.run(main())
            except aiordma.ForkedError as exc:
                if "spawn" not in str(exc):
                    yield f"{name} said {exc}"
            except BaseException as exc:
                yield f"{name}: {exc!r}"
            else:
                yield f"{name} was done"

    async with aiordma.listen(address, 0):
        await in_child(child)
    # The parent's use counts, even if all of it is over.
    await in_child(child)


@pytest.mark.one_loop
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_processes_of_a_pool_connect_while_the_parent_is_connected(
    address: str, method: str, pytestconfig: pytest.Config
) -> None:
    """`forkserver` is the default of Python 3.14 and later: it forks a process that has no RDMA."""
    # As a module: of a script, Python 3.15 has no loader in the processes of the pool, and warns of
    # that with each stack that the debug mode notes.
    program = ("-m", "tests.device.child_processes")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "dev", "-W", "error", *program),
        *(address, method, pytestconfig.getoption("--loop")),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            said, errors = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert (process.returncode, errors.decode()) == (0, "")
    assert said.decode().splitlines() == [f"{method} 1 2 3 4", "parent 1"]


async def test_a06_a_forked_child_may_open_the_device_anew(address: str) -> None:
    """What a child opens itself is its own: contexts and memory, for which no library is shared."""
    async with aiordma.listen(address, 0):

        def child() -> Iterable[str]:
            with (
                aiordma.devices()[0].open() as context,
                ProtectionDomain(context) as pd,
                MemoryRegion(pd, 4096, Access.LOCAL_WRITE) as region,
            ):
                region.view[:4] = b"mine"
                if not context.query_port(1).state or not region.lkey:
                    yield "no state"

        await in_child(child)
