"""Arrays of numpy on a device: large arrays are read from array to array."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

import aiordma
from aiordma.contrib.numpy import recv_array, send_array
from tests.device.meeting import Pair, are_alive
from tests.device.oracle import collect, reported, until
from tests.inside.endpoint import hold_reads

pytestmark = [pytest.mark.device, pytest.mark.one_loop]


@pytest.mark.smoke
@pytest.mark.parametrize("count", [0, 10, 30_000, 100_000, 2_000_000])
@pytest.mark.parametrize("order", ["C", "F"])
async def test_arrays(pair: Pair, count: int, order: Any) -> None:
    client, server = pair
    array = np.arange(2 * count, dtype=">i8").reshape((2, count), order=order)
    out = np.zeros_like(array)
    for into in (None, out, None, out):
        sending = asyncio.create_task(send_array(client, array))
        arrived = await recv_array(server, into)
        await sending
        assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
        assert not count or arrived.strides == array.strides
        assert np.array_equal(arrived, array)
        assert into is None or arrived is out
        out[:] = 0
    await are_alive(pair)


async def test_a_connection_that_is_lost_between_header_and_bytes(pair: Pair) -> None:
    client, server = pair
    with hold_reads(server) as held:  # or the bytes may come with the header
        receiving = asyncio.create_task(recv_array(server))
        sending = asyncio.create_task(send_array(client, np.zeros(4_000_000)))
        await until(lambda: bool(held))
        assert server.stats.messages_received == 1
        client.abort()
        await server.wait_closing()
    with pytest.raises((aiordma.ConnectionLostError, aiordma.ConnectionEndedError)):
        await receiving
    with contextlib.suppress(aiordma.ResourceClosedError, aiordma.ConnectionLostError):
        await sending


async def test_a_call_that_was_canceled_reports_no_loss(pair: Pair) -> None:
    """Its array is sent all the same, until the connection is over."""
    client, server = pair
    receiving = asyncio.create_task(recv_array(server))
    with reported() as reports, hold_reads(server) as held:
        sending = asyncio.create_task(send_array(client, np.zeros(4_000_000)))
        await until(lambda: bool(held))
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        client.abort()
        await client.wait_closed()
        collect()
    assert not reports
    with pytest.raises((aiordma.ConnectionLostError, aiordma.ConnectionEndedError)):
        await receiving
