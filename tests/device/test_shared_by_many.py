"""A thousand connections expose parts of one registered memory, and their rights end one by one."""

from __future__ import annotations

import pytest

from aiordma.endpoint.config import DEFAULTS, plan_of
from aiordma.testing.kernel_objects import object_counts
from tests.device.shared_by_many import ENDED, LOST, SIZE, regions_of, share
from tests.device.test_permissions import modes

pytestmark = [pytest.mark.device, pytest.mark.slow]


@pytest.mark.timeout(300)
def test_a_thousand_connections_expose_parts_of_one_registered_memory(
    address: str, loop_name: str, is_siw: bool
) -> None:
    # Software iWARP has 144 pages a process for all queues.
    number = 50 if is_siw else 1000
    before = object_counts()
    looks, lefts = 0, number
    with modes():
        for phase, told in share(address, number, loop_name):
            print(phase, told, flush=True)
            if phase == "server begin":
                assert (told["regions"], told["leases"]) == (1, 0)
            elif phase == "server shared":
                assert told["leases"] == told["connections"] == number
                assert told["regions"] == 1
                assert SIZE <= told["pinned"] <= SIZE + number * plan_of(DEFAULTS).pinned
            elif phase == "server written":
                assert told["written"] == number // 2
            elif phase == "client look":
                # Without windows the key is that of the memory: it ends with the memory.
                assert told["refused"] == (0 if is_siw else 1)
                looks += 1
            elif phase == "client left":
                lefts -= 1
                assert told["worked"] == lefts
            elif phase == "server end":
                assert (told["regions"], told["leases"], told["connections"]) == (1, 0, 0)
                assert told["pinned"] == SIZE
    assert looks == ENDED + LOST + 1
    assert lefts == number - ENDED - LOST
    assert regions_of(SIZE) == 0
    assert object_counts() == before
