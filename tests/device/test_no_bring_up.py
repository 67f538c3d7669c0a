"""iWARP connects a queue pair over a TCP connection of its own: by the connection manager alone."""

from __future__ import annotations

import pytest

from aiordma import NotSupportedError
from aiordma.verbs import BringUp
from tests.device.bringing_up import hand_made

pytestmark = [pytest.mark.device, pytest.mark.siw]


async def test_the_error_says_which_way_leads_there() -> None:
    async with hand_made(1) as (end,):
        before = end.qp.state
        with pytest.raises(NotSupportedError, match="ConnectionId"):
            BringUp(end.qp)
        assert end.qp.state == before
