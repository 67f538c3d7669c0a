"""Threads that cannot be started, at each place where the library starts one."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.device, pytest.mark.program]

PROGRAM = Path(__file__).with_name("thread_starts.py")
LIMIT_S = 90.0


async def run(*arguments: str) -> tuple[int, int]:
    """Run the program, and return how many starts were refused, and how many there were."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(PROGRAM), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = out.decode()
    print(text, err.decode())
    assert process.returncode == 0
    assert not err
    found = re.match(r"(\d+) of (\d+) starts refused; .*; then it works\n", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("for_ever", [(), ("for-ever",)], ids=["once", "for ever"])
async def test_every_start_may_fail(address: str, for_ever: tuple[str, ...]) -> None:
    number, refused = 0, 1
    while refused:
        number += 1
        refused, starts = await run(address, str(number), *for_ever)
        assert number < 40, f"{starts} threads for one conversation"
    assert number > 1, "no thread was started at all"
