"""Programs that know nothing of RDMA, under the switch: those that need no package more.

`make programs` has the whole list.
"""

from __future__ import annotations

import logging

import pytest

from tests.device.switching import Switched
from tests.programs.listed import programs

pytestmark = pytest.mark.device

NAMES = ("aiohttp_server", "aiohttp_client", "https", "anyio_client", "anyio_listener")


@pytest.mark.parametrize("name", NAMES)
async def test_h06_a_program(
    switched: Switched, address: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes the way that the list says, and what leaves RDMA says so."""
    caplog.set_level(logging.INFO, "aiordma")
    await switched(lambda: programs[name].exchange(address))
    said = [record.getMessage() for record in caplog.records if record.name == "aiordma"]
    ways = {" not over RDMA: " in line for line in said if " over RDMA: " in line}
    assert ways == {programs[name].expected != "RDMA"}
