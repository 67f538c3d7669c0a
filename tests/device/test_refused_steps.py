"""Steps that a connection id refuses: each says why and what to do, and costs nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator

import pytest

import aiordma
from aiordma._ffi import ffi, lib
from aiordma.cm import ConnectionId, EventChannel, EventType, Stage
from aiordma.verbs import QPState
from tests.device.oracle import until
from tests.inside.endpoint import id_of_request
from tests.inside.verbs import handle_of
from tests.native_ends import (
    LIMIT_S,
    End,
    acked,
    begun,
    close_all,
    listening,
    parameters,
    resolved,
)

pytestmark = pytest.mark.device

NO_NEIGHBOR = "10.80.0.77"
REQUEST_ROOM, ANSWER_ROOM, IWARP_ROOM = 56, 196, 251


def has_left(request: ConnectionId) -> bool:
    """Whether the kernel knows of no client for the request any more."""
    attr, mask = ffi.new("struct ibv_qp_attr *"), ffi.new("int *")
    attr.qp_state = int(QPState.INIT)
    return bool(lib.rdma_init_qp_attr(handle_of(request), attr, mask))


class Door:
    """A listening id, and a client that is ready to connect to it."""

    def __init__(self, listener: ConnectionId, client: End) -> None:
        self.listener = listener
        self.client = client

    async def request(self) -> ConnectionId:
        """The id of the client's request."""
        event = await acked(self.listener.event_channel, EventType.CONNECT_REQUEST)
        assert event.connection_id is not None
        return event.connection_id


@pytest.fixture
async def door(address: str) -> AsyncIterator[Door]:
    served, events = EventChannel(), EventChannel()
    listener = listening(served, address)
    client = End(await resolved(events, address, listener.source_port)).build()
    async with asyncio.timeout(2 * LIMIT_S):
        yield Door(listener, client)
    await close_all(client)
    for part in (listener, served, events):
        part.close()
        await part.wait_closed(LIMIT_S)


async def test_b07_private_data_that_the_transport_does_not_carry(door: Door, is_siw: bool) -> None:
    """It is refused before anything is sent, and both ids can be used."""
    client = door.client.cm_id
    asked, answered = (IWARP_ROOM, IWARP_ROOM) if is_siw else (REQUEST_ROOM, ANSWER_ROOM)
    # What an iWARP peer takes is the peer's to say; more than 255 bytes have no form.
    over = (256, 256) if is_siw else (REQUEST_ROOM + 1, ANSWER_ROOM + 1)
    told = "private data of {} bytes does not fit" if is_siw else "private data .* not {}"
    with pytest.raises(ValueError, match=told.format(over[0])):
        await client.connect(parameters(), private_data=bytes(over[0]))
    assert client.stage is Stage.ROUTE_RESOLVED
    connecting = await begun(client.connect(parameters(), private_data=b"a" * asked))
    server = End(await door.request()).build()
    with pytest.raises(ValueError, match=told.format(over[1])):
        await server.cm_id.accept(parameters(), private_data=bytes(over[1]))
    assert server.cm_id.stage is Stage.REQUESTED
    await server.cm_id.accept(parameters(), private_data=b"b" * answered)
    assert (await connecting).private_data == b"b" * answered
    await client.disconnect()
    await close_all(server)


async def test_b07_an_id_that_is_connecting_says_how_to_end_that(door: Door) -> None:
    client = door.client.cm_id
    connecting = await begun(client.connect(parameters()))
    request = await door.request()
    with pytest.raises(aiordma.RdmaOSError, match=r"connecting: cancel its connect\(\)"):
        client.destroy()
    with pytest.raises(OSError, match=r"EINVAL: .* connecting \(cancel its connect\(\)") as caught:
        await client.disconnect()
    assert caught.value.errno == errno.EINVAL
    request.reject()
    with pytest.raises(aiordma.ConnectionRejectedError):
        await connecting
    request.close()
    await request.wait_closed(LIMIT_S)


async def test_b07_a_resolution_that_was_canceled_leaves_an_id_to_close() -> None:
    """The kernel goes on with it, and would refuse the next with an EINVAL of many causes."""
    with EventChannel() as events, ConnectionId(events) as cm_id:
        resolving = await begun(cm_id.resolve_addr((NO_NEIGHBOR, 7471), timeout=LIMIT_S))
        resolving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resolving
        for step in (cm_id.resolve_addr((NO_NEIGHBOR, 7471)), cm_id.resolve_route()):
            with pytest.raises(OSError, match="was canceled; close it") as caught:
                await step
            assert caught.value.errno == errno.EINVAL
            assert "RDMA device" not in str(caught.value)


@pytest.mark.kernel
async def test_b07_loopback_is_no_way_to_a_device() -> None:
    for host in ("127.0.0.1", "127.1.2.3"):
        with pytest.raises(aiordma.DeviceNotFoundError, match="no RDMA device serves"):
            await aiordma.connect(host, 7471, timeout=LIMIT_S)


async def test_a_client_that_has_left_is_not_counted_as_refused(
    address: str, is_siw: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiordma")
    async with asyncio.timeout(LIMIT_S), aiordma.listen(address, 0) as listener:
        requests = listener.requests()
        connecting = asyncio.ensure_future(aiordma.connect(address, listener.port))
        request = await anext(requests)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        if is_siw:  # as below
            request.reject()
            return
        await until(lambda: has_left(id_of_request(request)))
        with pytest.raises(ConnectionAbortedError, match="the client has left"):
            await request.accept()
        assert listener.refused == 0
    assert not [line for line in caplog.messages if line.startswith("refused")]


@pytest.mark.parametrize("late", [False, True], ids=["before create_qp", "before accept"])
async def test_b07_a_client_that_has_left_its_request(door: Door, is_siw: bool, late: bool) -> None:
    connecting = await begun(door.client.cm_id.connect(parameters()))
    request = await door.request()
    server = End(request)
    if late:
        server.build()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    if is_siw:  # a client cannot leave there: its call waits in a thread for the answer
        request.reject()
        await close_all(server)
        return
    await close_all(door.client)
    await until(lambda: has_left(request))  # no event tells of it before the answer

    async def answer() -> None:
        if not late:
            server.build()
        await request.accept(parameters())

    with pytest.raises(ConnectionAbortedError, match="the client has left") as caught:
        await answer()
    assert isinstance(caught.value, aiordma.RdmaOSError)
    assert (server.cm_id.qp is not None) is late, "nothing is left of a queue pair that failed"
    await close_all(server)
