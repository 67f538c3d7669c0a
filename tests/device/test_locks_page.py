"""The lock server of docs/locks.md: when a lock is free again whose holder is gone."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import aiordma
from tests.device.running import Program
from tests.pages import blocks

pytestmark = [pytest.mark.device, pytest.mark.program]

PORT = "18519"
FILES = {block.name: block.text for block in blocks("locks.md") if block.name}
IDLE = "keepalive_s=1, idle_timeout_s=3"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[ExitStack]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("how", "silence", "most_s"),
    [
        # The kernel tells of a death; so it is not the silence that frees the lock.
        pytest.param(signal.SIGKILL, IDLE.replace("1,", "20,").replace("3", "60"), 15, id="killed"),
        pytest.param(signal.SIGSTOP, IDLE, 10, id="stopped"),
    ],
)
async def test_a_lock_is_free_when_its_holder_is_gone(
    how: signal.Signals, silence: str, most_s: float, programs: ExitStack, address: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    file = tmp_path / "lock_server.py"
    assert IDLE in FILES[file.name]
    file.write_text(FILES[file.name].replace(IDLE, silence))
    server = programs.enter_context(Program(str(file), address))
    await asyncio.to_thread(server.until, "listening on")
    holder = programs.enter_context(Program(str(tmp_path / "worker.py"), address, "60"))
    first = int((await asyncio.to_thread(holder.until, "token")).split()[1])
    async with aiordma.connect(address, int(PORT)) as conn:
        waiting = asyncio.create_task(conn.request(b"lock orders me", timeout=most_s))
        await asyncio.sleep(0)
        # The server has begun with the request before this one.
        (await conn.request(b"unlock orders nobody", timeout=most_s)).release()
        assert not waiting.done()
        began = time.monotonic()
        holder.process.send_signal(how)
        with await waiting as answer:
            second = int(answer.decode())
        took_s = time.monotonic() - began
        assert second > first
        assert took_s < most_s, took_s
        print(f"free after {took_s:.2f} s")
        with pytest.raises(aiordma.RequestError) as late:
            await conn.request(f"set orders {first} late".encode())
        assert late.value.remote_type == "LockLost"
        (await conn.request(f"set orders {second} in time".encode())).release()
        if how is signal.SIGSTOP:
            holder.process.send_signal(signal.SIGCONT)
            holder.end(signal.SIGKILL)
    status, errors = await asyncio.to_thread(server.end, signal.SIGINT)
    assert (status, errors) == (0, "")


async def test_a_lock_that_was_granted_too_late_is_given_back(
    programs: ExitStack, address: str, tmp_path: Path
) -> None:
    """An answer may cross with the cancellation of its request: `locked` unlocks all the same."""
    server = programs.enter_context(Program(str(tmp_path / "lock_server.py"), address))
    await asyncio.to_thread(server.until, "listening on")
    scope: dict[str, object] = {}
    exec(FILES["worker.py"].partition("async def main")[0], scope)
    locked = scope["locked"]
    assert callable(locked)

    async def ask(conn: aiordma.Connection, words: bytes) -> None:
        (await conn.request(words, timeout=10)).release()

    async with (
        aiordma.connect(address, int(PORT)) as conn,
        aiordma.connect(address, int(PORT)) as other,
    ):

        async def hold() -> None:
            async with locked(conn, "orders"):
                await asyncio.Event().wait()

        for _ in range(20):
            await ask(other, b"lock orders me")
            waiting = asyncio.create_task(hold())
            await asyncio.sleep(0)
            await ask(conn, b"unlock orders nobody")  # the server has the request before this one
            # The server answers this first, and then grants the lock to the task.
            await ask(other, b"unlock orders me")
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
    assert await asyncio.to_thread(server.end, signal.SIGINT) == (0, "")
