"""Atomics between two hosts whose wire jitters, loses, doubles and reorders.

The full run is `atomics_wire.py`'s, by hand.
"""

from __future__ import annotations

import pytest

from tests.device.atomics_wire import Scene
from tests.device.large_wire import FAULTS

pytestmark = [pytest.mark.device, pytest.mark.two_hosts, pytest.mark.usefixtures("wire")]

COUNT = 600


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_value_is_right_or_an_error(fault: str) -> None:
    """And each atomic takes place once, if at all; the connection goes on."""
    ended = await Scene().run(FAULTS[fault], COUNT)
    print(f"{fault}: {dict(ended)}")
    assert (ended["wrong"], ended["repeated"]) == (0, 0)
    assert ended["right"] > COUNT // 2
    if fault == "jitter":
        # The wire is bad enough: of 500 atomics 8 to 50 were completed without a result.
        assert ended["ResultLostError"] > 0
