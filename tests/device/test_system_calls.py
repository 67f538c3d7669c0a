"""How many system calls a message takes: one each of four; see docs/hot-path.md."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.device, pytest.mark.slow, pytest.mark.timeout(200)]

#: The numbers of round trips of two runs, whose difference is 1,000 messages.
FEW, MANY = 50, 550
MESSAGES = 2 * (MANY - FEW)
#: What is asked of the kernel now and then: a look at a queue each second, a turn of the loop more.
SPARE = 0.1
#: Asks for no more than the time, and only User-Mode Linux is asked at all: others tell it without.
CLOCKS = ("clock_gettime", "gettimeofday", "time")


async def calls(address: str, trips: int, loop: str, told: Path) -> Counter[str]:
    """Count the system calls of the thread that the loop runs in, and both ends with it."""
    process = await asyncio.create_subprocess_exec(
        *("strace", "-c", "-o", str(told)),
        *(sys.executable, str(Path(__file__).with_name("echo_alone.py"))),
        *(address, str(trips), loop),
    )
    try:
        async with asyncio.timeout(90):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    # Percent, seconds, microseconds a call, calls, errors if there are any, name.
    row = re.compile(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", re.MULTILINE)
    listed = row.findall(told.read_text())  # noqa: ASYNC240  # nothing else waits
    found = Counter({name: int(count) for count, name in listed})
    assert found.pop("total") == found.total()
    return found


async def test_a_message_takes_one_call_of_each(
    address: str, is_siw: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    loop = str(request.config.getoption("--loop"))
    # The doorbell, the event, arming the queue; and the loop, which has both ends here.
    expected = {"write": 1, "read": 1, "ioctl": 1}
    if is_siw:
        # Its queues are armed in memory.  It never wakes for solicited completions alone; but the
        # two ends complete in one queue, so that a send's completion comes with the message.
        expected = {"write": 1, "read": 1}
    expected["epoll_pwait" if loop == "uvloop" else "epoll_wait"] = 1

    few, many = [
        await calls(address, trips, loop, tmp_path / f"calls{trips}") for trips in (FEW, MANY)
    ]
    # What is done once, as loading modules, is done in both.
    each = {name: (many[name] - few[name]) / MESSAGES for name in many if name not in CLOCKS}
    often = {name: number for name, number in each.items() if number > SPARE}
    print(often)
    assert often == pytest.approx(expected, abs=SPARE)
