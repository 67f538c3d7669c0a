"""Rows 50 to 66: depths and retries, from the object to the queue pairs of both ends."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections.abc import Callable

import pytest

import aiordma
from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, EventType, PortSpace
from aiordma.verbs import Context, WCStatus
from tests.seeds.ends import (
    MOMENT_S,
    End,
    acked,
    begun,
    connected,
    half_way,
    parameters,
    record_calls,
)

pytestmark = pytest.mark.device


def limit_of(context: Context | None) -> int:
    assert context is not None
    return min(context.attributes.max_qp_rd_atom, 255)


def depths(end: End, is_siw: bool) -> tuple[int, int]:
    """Reads that the end's queue pair serves, and reads that it may have under way."""
    attributes = end.qp.query()
    found = attributes.max_dest_rd_atomic, attributes.max_rd_atomic
    # Software iWARP answers with the two exchanged.
    return found[::-1] if is_siw else found


async def test_j050_responder_resources(address: str, is_siw: bool) -> None:
    # Powers of two: what the software adapters round up to.
    asks, grants = ConnectionParameter(2, 8, 6, 6), ConnectionParameter(8, 2, 6, 6)
    async with connected(address, asks, grants) as pair:
        # The numbers of an event are those of the end that reads it.
        assert pair.request.initiator_depth == 2
        assert depths(pair.client, is_siw)[0] == 2
        assert depths(pair.server, is_siw)[0] == 8


async def test_j051_limit_of_responder_resources(address: str, is_siw: bool) -> None:
    async with half_way(address) as (_, client, _):
        limit = limit_of(client.cm_id.context)
        with pytest.raises(OSError, match="rdma_connect: EINVAL") as refused:
            await client.cm_id.connect(ConnectionParameter.exact(limit + 1, 0))
        assert refused.value.errno == errno.EINVAL
    async with connected(address, ConnectionParameter.exact(limit, 0)) as pair:
        assert depths(pair.client, is_siw)[0] <= limit


async def test_j052_initiator_depth(address: str, is_siw: bool) -> None:
    asks, grants = ConnectionParameter(2, 5, 6, 6), ConnectionParameter(5, 2, 6, 6)
    async with connected(address, asks, grants) as pair:
        assert pair.request.responder_resources == 5
        assert pair.established.initiator_depth == 5
        # The software adapters round up to a power of two.
        assert depths(pair.client, is_siw)[1] == 8
        assert depths(pair.server, is_siw)[1] == 2


async def test_j053_limit_of_initiator_depth(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with half_way(address) as (_, client, server_events):
        context = client.cm_id.context
        assert context is not None
        # A device that can start fewer reads than it serves.
        fewer = dataclasses.replace(context.attributes, max_qp_init_rd_atom=2)
        monkeypatch.setattr(Context, "attributes", fewer)
        calls = record_calls(monkeypatch, "rdma_connect")
        asked = ConnectionParameter(3, 100, 6, 6)
        connecting = await begun(client.cm_id.connect(asked))
        request = await acked(server_events, EventType.CONNECT_REQUEST)
        assert request.responder_resources == 2
        ((_, (_, c_param)),) = calls
        assert c_param.initiator_depth == 2
        assert asked.initiator_depth == 100
        assert request.connection_id is not None
        request.connection_id.reject()
        request.connection_id.close()
        with pytest.raises(ConnectionRefusedError):
            await connecting


async def test_j054_the_peer_lowers_the_depths(address: str, is_siw: bool) -> None:
    asks, grants = ConnectionParameter(4, 4, 6, 6), ConnectionParameter.exact(2, 1)
    async with connected(address, asks, grants) as pair:
        told = pair.established.initiator_depth, pair.established.responder_resources
        if is_siw:  # serves what was asked for, whatever was granted
            assert told == (4, 1)
            assert depths(pair.client, is_siw) == (1, 4)
            assert depths(pair.server, is_siw) == (4, 1)
        else:
            # What the server serves is what the client may have under way.
            assert told == (2, 1)
            assert depths(pair.client, is_siw) == (1, 2)
            assert depths(pair.server, is_siw) == (2, 1)


async def test_j055_retry_count(address: str, is_siw: bool) -> None:
    def impatient(end: End) -> None:
        end.cm_id.policy = dataclasses.replace(end.cm_id.policy, ack_timeout=8)

    asks = ConnectionParameter(4, 4, 2, 6)
    async with connected(address, asks, prepare=impatient) as pair:
        ends = [end.qp.query().retry_cnt for end in (pair.client, pair.server)]
        if is_siw:  # TCP sends again, by its own rules
            assert (pair.request.retry_count, *ends) == (0, 0, 0)
            return
        assert (pair.request.retry_count, *ends) == (2, 2, 2)
        pair.server.cm_id.destroy_qp()
        await pair.server.qp.wait_closed()
        pair.client.post_send()
        (failed,) = await pair.client.completions(1)
        assert failed.status == WCStatus.RETRY_EXC_ERR


async def test_j056_rnr_retry_count(address: str, is_siw: bool) -> None:
    asks, grants = ConnectionParameter(4, 4, 6, 3), ConnectionParameter(4, 4, 6, 5)
    async with connected(address, asks, grants) as pair:
        # Each end says how patient the other one is to be with it.
        at_server, at_client = (end.qp.query().rnr_retry for end in (pair.server, pair.client))
        told = pair.request.rnr_retry_count, at_server, at_client
        # iWARP has no such state: a message without a receive ends the connection.
        assert told == ((0, 0, 0) if is_siw else (3, 3, 5))
    if is_siw:
        return
    # A sender with retries waits for the receive that comes late; without any it fails.
    for patience, ends_well in ((6, True), (0, False)):
        grants = ConnectionParameter(4, 4, 6, patience)
        async with connected(address, grants, grants) as pair:
            pair.server.qp.set_min_rnr_timer(655.36)
            pair.client.post_send(1)
            await asyncio.sleep(MOMENT_S)
            pair.server.post_recv(2)
            (sent,) = await pair.client.completions(1)
            assert sent.status_name == ("SUCCESS" if ends_well else "RNR_RETRY_EXC_ERR")


async def test_j057_receiver_not_ready(address: str, is_siw: bool) -> None:
    once = ConnectionParameter(4, 4, 6, 1)
    async with connected(address, once, once) as pair:
        if is_siw:
            # TCP has taken the message; the connection ends afterwards.
            await pair.client.qp.send(pair.client.mr)
            with pytest.raises(aiordma.FlushedError):
                await pair.client.qp.recv(pair.client.mr)
        else:
            with pytest.raises(aiordma.CompletionError):
                await pair.client.qp.send(pair.client.mr)


async def test_j058_belong_to_connections_only(address: str, is_siw: bool) -> None:
    param = ConnectionParameter(3, 3, 3, 3)
    with EventChannel() as events, ConnectionId(events, PortSpace.UDP) as listener:
        listener.bind_addr((address, 0))
        if is_siw:
            with pytest.raises(aiordma.NotSupportedError, match="iWARP has no datagrams"):
                listener.listen()
            return
        listener.listen()
        with EventChannel() as other, ConnectionId(other, PortSpace.UDP) as client:
            await client.resolve_addr((address, listener.source_port), timeout=5)
            await client.resolve_route(timeout=5)
            asking = await begun(client.connect(param))
            request = await acked(events, EventType.CONNECT_REQUEST)
            assert request.responder_resources == request.initiator_depth == 0
            assert request.retry_count == request.rnr_retry_count == 0
            assert request.connection_id is not None
            with request.connection_id:
                request.connection_id.reject()
                with pytest.raises(aiordma.ConnectionFailedError):
                    await asking
    async with connected(address, param) as pair:
        assert pair.request.responder_resources == pair.request.initiator_depth == 3
        assert pair.request.rnr_retry_count == 3


async def test_j059_default_depths(address: str) -> None:
    param = ConnectionParameter()
    async with connected(address, param) as pair:
        limit = limit_of(pair.client.cm_id.context)
        assert (param.responder_resources, param.initiator_depth) == (limit, limit)
        assert pair.request.responder_resources == pair.request.initiator_depth == limit


async def test_j060_default_retries(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch, "rdma_connect")
    param = ConnectionParameter()
    assert (param.retry_count, param.rnr_retry_count) == (7, 7)
    async with connected(address, param):
        ((_, (_, c_param)),) = calls
        assert (c_param.retry_count, c_param.rnr_retry_count) == (7, 7)


async def test_j061_order_of_the_arguments(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch, "rdma_connect")
    async with connected(address, ConnectionParameter(1, 2, 3, 4)) as pair:
        ((_, (_, c_param)),) = calls
        assert c_param.responder_resources == 1
        assert c_param.initiator_depth == 2
        assert c_param.retry_count == 3
        assert c_param.rnr_retry_count == 4
        # Turned around: the client's reads are what the server is to serve.
        assert pair.request.responder_resources == 2
        assert pair.request.initiator_depth == 1


def set_depths(param: ConnectionParameter, value: int) -> ConnectionParameter:
    param.responder_resources = param.initiator_depth = value
    return param


def set_retries(param: ConnectionParameter, value: int) -> ConnectionParameter:
    param.retry_count = value
    return param


def set_rnr_retries(param: ConnectionParameter, value: int) -> ConnectionParameter:
    param.rnr_retry_count = value
    return param


@pytest.mark.parametrize(
    "make",
    [lambda n: ConnectionParameter(n, n), lambda n: set_depths(ConnectionParameter(), n)],
    ids=["constructor", "setter"],
)
async def test_j062_depth_out_of_range(
    address: str, make: Callable[[int], ConnectionParameter]
) -> None:
    async with half_way(address) as (_, client, _):
        limit = limit_of(client.cm_id.context)
        for asked, becomes in ((-1, limit), (0, limit), (limit + 1, limit), (1, 1), (limit, limit)):
            param = make(asked)
            param.bind(limit)
            assert (param.responder_resources, param.initiator_depth) == (becomes, becomes)
    # The device's limit is known when they meet a device, at the latest at connect().
    param = make(0)
    async with connected(address, param):
        assert param.responder_resources == param.initiator_depth == limit


@pytest.mark.parametrize(("asked", "becomes"), [(-1, 7), (8, 7), (0, 0), (7, 7)])
async def test_j063_retry_count_out_of_range(asked: int, becomes: int) -> None:
    assert ConnectionParameter(4, 4, asked, 6).retry_count == becomes
    assert set_retries(ConnectionParameter(4, 4, 3, 6), asked).retry_count == becomes


@pytest.mark.parametrize(("asked", "becomes"), [(-1, 7), (8, 7), (0, 0), (7, 7)])
async def test_j064_rnr_retry_count_out_of_range(asked: int, becomes: int) -> None:
    assert ConnectionParameter(4, 4, 6, asked).rnr_retry_count == becomes
    assert set_rnr_retries(ConnectionParameter(4, 4, 6, 3), asked).rnr_retry_count == becomes


async def test_j065_all_four_are_read_and_set(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, "rdma_connect")
    param = ConnectionParameter()
    values = {
        "responder_resources": 1, "initiator_depth": 2, "retry_count": 3, "rnr_retry_count": 4,
    }  # fmt: skip
    for name, value in values.items():
        setattr(param, name, value)
    assert {name: getattr(param, name) for name in values} == values
    async with connected(address, param):
        ((_, (_, c_param)),) = calls
        assert {name: getattr(c_param, name) for name in values} == values
    assert {name: getattr(param, name) for name in values} == values


async def test_j066_one_object_for_both_ends(address: str, is_siw: bool) -> None:
    param = parameters()
    async with connected(address, param, param) as pair:
        for end in (pair.client, pair.server):
            assert depths(end, is_siw) == (4, 4)
