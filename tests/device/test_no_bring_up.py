"""iWARP connects a queue pair over a TCP connection of its own: by the connection manager alone."""

from __future__ import annotations

import errno

import pytest

from aiordma import NotSupportedError
from aiordma.verbs import BringUp, ExtendedCompletionQueue, WCFields
from aiordma.verbs.context import DeviceClock
from tests.device.bringing_up import hand_made

pytestmark = [pytest.mark.device, pytest.mark.siw]


async def test_the_error_says_which_way_leads_there() -> None:
    async with hand_made(1) as (end,):
        before = end.qp.state
        with pytest.raises(NotSupportedError, match="ConnectionId"):
            BringUp(end.qp)
        assert end.qp.state == before


async def test_a_send_before_the_connection() -> None:
    """Software iWARP says EPERM, as if the program had not the right."""
    async with hand_made(1) as (end,):
        with pytest.raises(OSError, match="connect it before it sends") as caught:
            await end.qp.send(end.region(bytearray(b"early")))
        assert caught.value.errno == errno.EINVAL


async def test_nor_has_it_extended_completion_queues() -> None:
    async with hand_made(1) as (end,):
        with pytest.raises(NotSupportedError, match="no extended completion queues"):
            ExtendedCompletionQueue(end.context, 16, fields=WCFields(0))
        assert end.context.query_clock() == DeviceClock(0, 0)
        with pytest.raises(NotSupportedError, match="ibv_query_rt_values_ex"):
            end.context.read_clock()
