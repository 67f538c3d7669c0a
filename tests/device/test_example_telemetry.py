"""examples/telemetry.py: slow, lost and killed subscribers beside fast ones."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from tests.device.running import Program

pytestmark = [pytest.mark.device, pytest.mark.program, pytest.mark.one_loop]

PROGRAM = "telemetry.py"
RATE_HZ = 50
WORK_S = 0.3
#: Of what depends on the clock: on a busy machine a program stands still now and then.
TRIES = 4
SUMMARY = re.compile(r"(\d+) readings, (\d+) missed, none older than (\d+\.\d+) s")


@pytest.fixture
def publisher(address: str) -> Iterator[Program]:
    with Program(PROGRAM, "publish", "--host", address, "--rate", str(RATE_HZ)) as program:
        assert program.line() == f"listening on {address} 18527"
        yield program


def subscriber(address: str, *words: str) -> Program:
    return Program(PROGRAM, "subscribe", "--host", address, *words)


def summary(program: Program) -> tuple[int, int, float]:
    found = SUMMARY.fullmatch(program.until("readings"))
    assert found is not None
    return int(found[1]), int(found[2]), float(found[3])


def test_a_slow_subscriber_gets_the_newest(publisher: Program, address: str) -> None:
    """It misses what came while it worked, and nothing is older than one time of work."""
    found: list[tuple[int, float]] = []
    for _ in range(TRIES):
        with subscriber(address, "--count", "6", "--work", str(WORK_S)) as slow:
            seen, missed, oldest = summary(slow)
            assert slow.end() == (0, "")
        assert seen == 6
        assert "has left after" in publisher.line()
        found.append((missed, oldest))
        # As old as two readings, or fewer: one of the programs may have stood still meanwhile.
        if oldest < 2 * WORK_S and missed >= 3 * WORK_S * RATE_HZ:
            break
    else:
        pytest.fail(f"missed, and the oldest in seconds: {found}")
    assert publisher.end(signal.SIGINT) == (0, "")


def test_a_killed_subscriber_harms_nobody(publisher: Program, address: str) -> None:
    with (
        subscriber(address) as killed,
        subscriber(address, "--count", "40") as other,
    ):
        assert killed.line() == "subscribed"
        killed.end(signal.SIGKILL)
        assert summary(other)[0] == 40
        assert other.end() == (0, "")
    assert sum("(lost)" in publisher.line() for _ in range(2)) == 1
    assert publisher.end(signal.SIGINT) == (0, "")


def test_the_publisher_ends_first(publisher: Program, address: str) -> None:
    with subscriber(address) as other:
        assert other.line() == "subscribed"
        publisher.process.send_signal(signal.SIGKILL)
        assert other.end(None)[0] == 1


def test_an_interrupted_subscriber(publisher: Program, address: str) -> None:
    with subscriber(address) as other:
        assert other.line() == "subscribed"
        assert other.end(signal.SIGINT) == (130, "")
    assert "has left after" in publisher.line()
    assert publisher.end(signal.SIGINT) == (0, "")


def test_a_subscriber_that_lets_more_wait_is_refused(publisher: Program, address: str) -> None:
    """The publisher says why, and goes on."""
    words = f"""
import asyncio, aiordma

async def main():
    async with aiordma.connect({address!r}, 18527) as conn:
        async for message in conn:
            print("a reading")
        print("the publisher has closed")

asyncio.run(main())
"""
    with Program("-c", words) as other:
        assert other.line() == "the publisher has closed"
        assert other.end() == (0, "")
    status, error = publisher.end(signal.SIGINT)
    assert status == 0
    assert "recv_depth=1" in error
