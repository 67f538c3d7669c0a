"""Large messages between two hosts whose wire reorders, jitters, loses and doubles.

The full run is `large_wire.py`'s, by hand.
"""

from __future__ import annotations

import pytest

from tests.device.large_wire import FAULTS, Scene

pytestmark = [pytest.mark.device, pytest.mark.two_hosts, pytest.mark.usefixtures("wire")]

SEED = 20_26


@pytest.mark.parametrize("fault", FAULTS)
async def test_g04_large_messages_over_a_bad_wire(fault: str) -> None:
    """Each is right, or a typed error tells that it has not arrived."""
    count = 200 if fault == "reorder" else 40
    ended = await Scene(check=True, seed=SEED, largest=64 * 1024).run(FAULTS[fault], count)
    print(f"seed {SEED}, {fault}: {dict(ended)}")
    assert ended["wrong"] == 0
    assert ended.total() == count
    assert ended["right"] > count // 2


async def test_g04_the_wire_is_bad_enough() -> None:
    """Without the check the adapter's fault is seen: of 400 messages one to three were wrong."""
    scene = Scene(check=False, seed=SEED, largest=64 * 1024)
    ended = await scene.run(FAULTS["reorder"], 4000, until_wrong=True)
    print(f"seed {SEED}: {dict(ended)}")
    assert ended["wrong"] == 1
