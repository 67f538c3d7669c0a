"""A task that runs its loop in itself, as nest_asyncio lets it; and loops that others drive."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

#: Makes a loop reentrant, in the way of nest_asyncio, which uvloop does not allow:
#: `run_until_complete` runs turns of the loop, with no task current meanwhile.  The loop's class is
#: marked by it.
_REENTRANT = """
import asyncio
import heapq
from asyncio import events, tasks

class Loop(asyncio.SelectorEventLoop):
    _nest_patched = True

    def run_until_complete(self, future):
        outer = events._get_running_loop()
        if outer is None:
            return super().run_until_complete(future)
        task = asyncio.ensure_future(future, loop=self)
        while not task.done():
            self._turn()
        return task.result()

    def _turn(self):
        self._process_events(self._selector.select(0.1 if not self._ready else 0))
        while self._scheduled and self._scheduled[0]._when <= self.time():
            self._ready.append(heapq.heappop(self._scheduled))
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            current = tasks.current_task()
            tasks._leave_task(self, current)
            try:
                handle._run()
            finally:
                tasks._enter_task(self, current)
"""

_NESTED = (
    _REENTRANT
    + """
import sys, time
import aiordma

def failed(loop, context):
    raise SystemExit(str(context))

async def main(address):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(failed)
    async with (
        aiordma.listen(address, 0) as listener,
        aiordma.connect(address, listener.port) as client,
        await listener.accept() as server,
    ):
        async def echo():
            async for message in server:
                await server.send(message)

        async def ask(text):
            await client.send(text)
            return bytes(await client.recv())

        echoing = asyncio.create_task(echo())
        started = time.monotonic()
        for number in range(20):
            assert await ask(b"outer") == b"outer"  # so that the drain has resumed this task
            assert loop.run_until_complete(ask(b"inner %d" % number)) == b"inner %d" % number
        took = time.monotonic() - started
        echoing.cancel()
    assert took < 10, f"{took} s: each receive waited for the safety poll"
    print("done")

loop = Loop()
loop.run_until_complete(main(sys.argv[1]))
loop.close()
"""
)


async def test_a_task_that_was_resumed_runs_the_loop_and_receives_in_it(address: str) -> None:
    """A process of its own: the loop is of another kind."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", _NESTED, address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
