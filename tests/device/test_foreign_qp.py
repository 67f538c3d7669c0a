"""Connections of the connection manager with queue pairs that are not the id's own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiordma
from aiordma import ConnectionRejectedError
from aiordma.cm import ConnectionId, EventChannel, EventType, Stage
from aiordma.verbs import Access, MemoryRegion, QPState
from tests.native_ends import (
    End,
    Foreign,
    acked,
    begun,
    close_all,
    listening,
    parameters,
    resolved,
)

TEXT = b"not the id's own"


@contextlib.asynccontextmanager
async def meeting(address: str) -> AsyncIterator[tuple[Foreign, EventChannel, EventChannel]]:
    """A client that is resolved, and the channels of server and client."""
    async with contextlib.AsyncExitStack() as stack:
        for_server, for_client = EventChannel(), EventChannel()
        for channel in (for_client, for_server):
            stack.push_async_callback(channel.wait_closed)
            stack.callback(channel.close)
        listener = listening(for_server, address)
        stack.callback(listener.close)
        client = Foreign(await resolved(for_client, address, listener.source_port)).build()
        stack.push_async_callback(close_all, client)
        yield client, for_server, for_client


async def request_of(channel: EventChannel) -> ConnectionId:
    request = await acked(channel, EventType.CONNECT_REQUEST)
    assert request.connection_id is not None
    return request.connection_id


async def talk(one: Any, other: Any) -> None:
    """A message, and a write into memory."""
    access = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
    with (
        MemoryRegion(one.pd, bytearray(TEXT), access) as source,
        MemoryRegion(other.pd, 64, access) as target,
    ):
        received = await begun(other.qp.recv(target))
        await one.qp.send(source)
        assert (await received).byte_len == len(TEXT)
        assert bytes(target.view[: len(TEXT)]) == TEXT
        target.view[:] = bytes(64)
        await one.qp.write(source, target.addr, target.rkey)
        assert bytes(target.view[: len(TEXT)]) == TEXT


async def test_both_ends_have_a_foreign_queue_pair(address: str) -> None:
    async with meeting(address) as (client, for_server, _):
        connecting = await begun(client.connect())
        server = Foreign(await request_of(for_server)).build()
        try:
            await server.accept()
            await connecting
            assert {server.cm_id.stage, client.cm_id.stage} == {Stage.CONNECTED}
            await talk(client, server)
            await client.cm_id.disconnect()
            await acked(for_server, EventType.DISCONNECTED, skip=EARLIER)
            assert {server.cm_id.stage, client.cm_id.stage} == {Stage.DISCONNECTED}
        finally:
            await close_all(server)


EARLIER = frozenset({
    EventType.ADDR_RESOLVED, EventType.ROUTE_RESOLVED, EventType.CONNECT_RESPONSE,
    EventType.ESTABLISHED,
})  # fmt: skip


async def test_an_own_queue_pair_meets_a_foreign_one(address: str) -> None:
    async with meeting(address) as (client, for_server, _):
        connecting = await begun(client.connect())
        server = End(await request_of(for_server)).build()
        try:
            await server.cm_id.accept(parameters())
            await connecting
            await talk(client, server)
        finally:
            await close_all(server)


async def test_a_foreign_client_is_refused(address: str) -> None:
    async with meeting(address) as (client, for_server, _):
        connecting = await begun(client.connect())
        request = await request_of(for_server)
        request.reject(b"no")
        request.close()
        with pytest.raises(ConnectionRejectedError):
            await connecting
        assert client.cm_id.stage == Stage.FAILED


async def test_a_client_that_leaves_before_it_confirms(address: str, is_siw: bool) -> None:
    """The server waits for ESTABLISHED no longer than for the end of the client.

    On iWARP the kernel confirms by itself; the server sees the end after it.
    """
    async with meeting(address) as (client, for_server, _):
        client.move(QPState.INIT)
        asking = await begun(client.cm_id.connect(parameters(), qp_num=client.qp.num))
        server = Foreign(await request_of(for_server)).build()
        try:
            accepting = await begun(server.accept())
            await asking
            client.cm_id.close()
            if is_siw:
                await accepting
                await acked(for_server, EventType.DISCONNECTED, skip=EARLIER)
            else:
                with pytest.raises(aiordma.ConnectionFailedError):
                    await accepting
        finally:
            await close_all(server)


async def test_what_is_not_possible(address: str) -> None:
    async with meeting(address) as (client, for_server, _):
        with pytest.raises(ValueError, match="INIT, RTR and RTS"):
            client.cm_id.init_qp_attr(QPState.ERR)
        with pytest.raises(OSError, match="init_qp_attr: EINVAL: the connection id is route"):
            client.cm_id.init_qp_attr(QPState.RTR)
        with pytest.raises(OSError, match="rdma_establish: EINVAL"):
            client.cm_id.establish()
        with pytest.raises(OSError, match="no queue pair"):
            await client.cm_id.connect(parameters())
        for number, error in ((1 << 24, ValueError), ("7", TypeError)):
            with pytest.raises(error, match="qp_num"):
                await client.cm_id.connect(parameters(), qp_num=number)  # type: ignore[arg-type]
        assert client.cm_id.stage == Stage.ROUTE_RESOLVED
        with (
            ConnectionId(for_server) as unbound,
            pytest.raises(OSError, match="bound to no device") as caught,
        ):
            unbound.init_qp_attr(QPState.INIT)
        assert caught.value.errno == errno.EINVAL


async def test_an_id_with_a_queue_pair_takes_no_number(address: str) -> None:
    async with meeting(address) as (client, _, for_client):
        own = End(await resolved(for_client, address, 7471)).build()
        with pytest.raises(ValueError, match="queue pair of its own"):
            await own.cm_id.connect(parameters(), qp_num=client.qp.num)
        await close_all(own)


async def test_a_proposal_can_be_changed(address: str, is_siw: bool) -> None:
    async with meeting(address) as (client, _, _):
        proposed = client.cm_id.init_qp_attr(QPState.INIT)
        assert proposed["qp_state"] == QPState.INIT
        assert isinstance(proposed["qp_access_flags"], Access)
        proposed["qp_access_flags"] = Access.REMOTE_READ
        client.qp.modify(**proposed)
        if not is_siw:
            assert client.qp.query().qp_access_flags == Access.REMOTE_READ


async def test_the_end_of_the_peer_leaves_a_foreign_queue_pair_alone(
    address: str, is_siw: bool
) -> None:
    """It is the program's to move; the event says when."""
    async with meeting(address) as (client, for_server, for_client):
        connecting = await begun(client.connect())
        server = End(await request_of(for_server)).build()
        try:
            await server.cm_id.accept(parameters())
            await connecting
            with MemoryRegion(client.pd, 64) as target:
                waiting = await begun(client.qp.recv(target))
                await server.cm_id.disconnect()
                await acked(for_client, EventType.DISCONNECTED, skip=EARLIER)
                if not is_siw:
                    assert client.qp.state == QPState.RTS
                client.qp.to_error()
                with pytest.raises(aiordma.FlushedError):
                    await asyncio.wait_for(waiting, 10)
        finally:
            await close_all(server)
