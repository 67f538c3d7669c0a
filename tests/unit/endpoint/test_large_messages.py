"""Large messages on the model of the adapter: how many READs at a time, and who waits for them."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.endpoint.config import ConnectionConfig
from tests.inside.endpoint import exposer_of, read_in_chunks

from ..conftest import settle
from .fabric import Wire
from .test_flow_model import SLOT, fake_regions

__all__ = ["fake_regions"]


def config_of(depth: int = 4) -> ConnectionConfig:
    return ConnectionConfig(
        slot_size=SLOT,
        rendezvous_threshold=0,
        recv_depth=8,
        send_depth=8,
        one_sided_depth=2 * depth,
    )


@pytest.mark.parametrize("depth", [1, 2, 5])
async def test_no_more_reads_are_under_way_than_the_peer_serves(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """An adapter ends the connection over one too many."""
    read_in_chunks(monkeypatch, 100)
    wire = Wire(config_of(depth), config_of(depth))
    await wire.open()
    await wire.run()
    text = bytes(range(256)) * 8
    sending = asyncio.create_task(wire.ends[0].send(text))
    most = 0
    for _ in range(1000):
        for step in wire.steps():
            if step[0] != "read":
                wire.step(step)
        await settle(2)
        most = max(most, len(wire.links[1].reads))
        if wire.links[1].reads:
            wire.links[1].read()
        if sending.done():
            break
    assert most == depth
    await sending
    with await wire.ends[1].recv() as message:
        assert bytes(message) == text
    await wire.close()


async def test_who_waits_for_large_messages_hears_of_a_failure() -> None:
    """close() does, and would wait for its time-out instead."""
    wire = Wire(config_of(), config_of())
    await wire.open()
    await wire.run()
    sending = asyncio.create_task(wire.ends[0].send(bytes(10 * SLOT)))
    await settle(10)
    waiting = asyncio.create_task(exposer_of(wire.ends[0]).drained())
    await settle(10)
    assert not waiting.done()
    wire.links[0].fail(ConnectionResetError("lost"))
    await settle(10)
    assert waiting.done(), "nothing can be drained any more, and it waits"
    with pytest.raises(ConnectionError):
        await sending
    await wire.close()
