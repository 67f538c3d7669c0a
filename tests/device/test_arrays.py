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
from tests.device.oracle import until
from tests.device.stepping import Steps, for_every_step, run_canceled

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


@pytest.mark.parametrize("count", [10, 400_000])
async def test_a_cancel_at_every_step(pair: Pair, late: bool, count: int) -> None:
    """Of either side: arrays stay whole, and none that is received is lost."""
    client, server = pair

    async def receive(steps: Steps) -> None:
        array = np.arange(count)
        sending = asyncio.create_task(send_array(client, array))
        arrived = await run_canceled(recv_array(server), steps)
        if arrived is None:
            arrived = await recv_array(server)
        assert np.array_equal(arrived, array)
        await sending

    async def send(steps: Steps) -> None:
        first, second = np.arange(count), np.arange(count) + 1
        receiving = asyncio.create_task(recv_array(server))
        await run_canceled(send_array(client, first), steps)
        last = asyncio.create_task(send_array(client, second))
        arrived = await receiving
        if arrived[0] == 0:
            assert np.array_equal(arrived, first)
            arrived = await recv_array(server)
        assert np.array_equal(arrived, second)
        await last

    await for_every_step(receive, late=late, complete=False)
    await for_every_step(send, late=late, complete=False)
    await are_alive(pair)


async def test_a_connection_that_is_lost_between_header_and_bytes(pair: Pair) -> None:
    client, server = pair
    receiving = asyncio.create_task(recv_array(server))
    sending = asyncio.create_task(send_array(client, np.zeros(4_000_000)))
    await until(lambda: server.stats.messages_received == 1)
    client.abort()
    with pytest.raises((aiordma.ConnectionLostError, aiordma.ConnectionEndedError)):
        await receiving
    with contextlib.suppress(aiordma.ResourceClosedError, aiordma.ConnectionLostError):
        await sending
