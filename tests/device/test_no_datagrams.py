"""iWARP has no datagrams, and says so at the first call that would need them."""

from __future__ import annotations

import asyncio

import pytest

import aiordma
from aiordma.cm import ConnectionId, EventChannel, PortSpace
from aiordma.verbs import (
    AddressHandle,
    AHAttributes,
    CompletionQueue,
    ProtectionDomain,
    QPInitAttr,
    QPType,
    QueuePair,
)
from tests.device.datagrams import Recorder

pytestmark = [pytest.mark.device, pytest.mark.siw]


async def test_an_endpoint(address: str) -> None:
    with pytest.raises(aiordma.NotSupportedError, match="iWARP, which has no datagrams"):
        await aiordma.create_datagram_endpoint(Recorder, local_addr=(address, 0))
    with pytest.raises(aiordma.NotSupportedError, match="iWARP, which has no datagrams"):
        await aiordma.create_datagram_endpoint(Recorder, remote_addr=(address, 5))
    with pytest.raises(ValueError, match="devices with such addresses: none"):
        await aiordma.create_datagram_endpoint(Recorder, local_addr=("0.0.0.0", 0))


async def test_every_step_of_an_id(address: str) -> None:
    channel = EventChannel()
    cm_id = ConnectionId(channel, PortSpace.UDP)
    cm_id.bind_addr((address, 0))
    context = cm_id.context
    assert context is not None
    pd = ProtectionDomain(context)
    cq = CompletionQueue(context, 8)
    attr = QPInitAttr(send_cq=cq, max_send_wr=4, max_recv_wr=4, qp_type=QPType.UD)
    words = "iWARP has no datagrams"
    with pytest.raises(aiordma.NotSupportedError, match=words):
        cm_id.listen()
    with pytest.raises(aiordma.NotSupportedError, match=words):
        cm_id.create_qp(pd, attr)
    with pytest.raises(aiordma.NotSupportedError, match=words):
        await cm_id.join_multicast("239.80.0.1")
    with pytest.raises(aiordma.NotSupportedError, match=words):
        AddressHandle(pd, AHAttributes(dgid=bytes(16)))
    with pytest.raises(aiordma.NotSupportedError):
        QueuePair(pd, attr)
    asking = ConnectionId(channel, PortSpace.UDP)
    await asking.resolve_addr((address, 5), timeout=5)
    await asking.resolve_route(timeout=5)
    with pytest.raises(aiordma.NotSupportedError, match=words):
        await asking.connect()
    for part in (asking, cq, pd, cm_id, channel):
        part.close()
    await asyncio.wait_for(channel.wait_closed(), 10)
