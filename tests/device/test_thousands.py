"""A thousand connections with default settings within a tenth of 1 GiB of pinned memory.

`make bench-many` has ten thousand within 1 GiB.
"""

from __future__ import annotations

import pytest

from aiordma.endpoint.config import DEFAULTS, plan_of
from aiordma.testing.kernel_objects import object_counts
from tests.device.test_permissions import modes
from tests.device.thousands import NUMBER_OF_MESSAGES, crowd, memlock_of

IDLE_S = 10.0

pytestmark = [pytest.mark.device, pytest.mark.slow]


@pytest.mark.kernel
@pytest.mark.timeout(300)
def test_a_thousand_connections_within_a_tenth_of_a_gibibyte(
    address: str, loop_name: str, is_siw: bool
) -> None:
    """They all talk, are silent, talk again with messages of many sizes, and close."""
    # Software iWARP has 144 pages a process for all queues.
    number = 50 if is_siw else 1000
    before = object_counts()
    with modes():
        told = crowd(address, number, loop_name, IDLE_S)
    for end in ("client", "server"):
        connected, talked, closed = (told[f"{end} {p}"] for p in ("connect", "talk", "close"))
        assert connected["pinned"] <= number * plan_of(DEFAULTS).pinned
        assert connected["pinned"] >= number * 60_000
        assert talked["pinned"] <= memlock_of(number)
        assert closed["pinned"] == 0
        # The loop, the device, and one timer each for silence and for lost events.
        assert connected["timers"] <= 2
        assert closed["timers"] == 0
        assert connected["descriptors"] - told["server begin"]["descriptors"] < 10
        # Looks at silence, and a look for lost events each four seconds; not for each connection.
        assert told[f"{end} idle"]["wakeups"] < 60
    assert told["server talk"]["messages"] == number * NUMBER_OF_MESSAGES
    # A connect takes no longer among a thousand than among a few.
    connect = told["client connect"]
    assert connect["last_cpu_ms"] < 3 * connect["first_cpu_ms"]
    assert object_counts() == before
