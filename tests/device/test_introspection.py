"""What asyncio, inspect and debuggers see of a task that waits in a call of the library."""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from tests.device.shared import has_atomics

pytestmark = [pytest.mark.device, pytest.mark.smoke]

of_each_kind = pytest.mark.usefixtures("kind_of_task")
Work = Callable[[], Coroutine[Any, Any, Any]]
AROUND: dict[str, Callable[[Work], Any]] = {
    "await": lambda work: work(),
    "wait_for": lambda work: asyncio.wait_for(work(), 60),
    "timeout": lambda work: _in_timeout(work),
    "shield": lambda work: _in_shield(work),
    "gather": lambda work: asyncio.gather(work()),
    "group": lambda work: _in_group(work),
}


async def _in_timeout(work: Work) -> None:
    async with asyncio.timeout(60):
        await work()


async def _in_shield(work: Work) -> None:
    inner = asyncio.ensure_future(work())
    try:
        await asyncio.shield(inner)
    finally:
        inner.cancel()
        await asyncio.wait([inner])


async def _in_group(work: Work) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(work())


def _eager(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """As `asyncio.eager_task_factory`, which refuses what uvloop tells it on Python 3.13."""
    return asyncio.Task(coroutine, loop=loop, **options | {"eager_start": True})


#: Tasks that begin in a later turn, and those that begin at once.
TASKS: dict[str, Any] = {"later": None}
if sys.version_info >= (3, 12):
    TASKS["eager"] = _eager
#: pytest, with asyncio's tasks and futures in Python.
WITHOUT_C = (
    "import sys; sys.modules['_asyncio'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


@pytest.fixture(params=list(TASKS))
async def kind_of_task(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """The tasks of the test are of one kind."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(TASKS[request.param])
    yield
    loop.set_task_factory(None)


def chain(coroutine: Any) -> list[Any]:
    """The coroutines of a task, from the outer one to that which waits."""
    found = []
    while hasattr(coroutine, "cr_await"):
        found.append(coroutine)
        coroutine = coroutine.cr_await
    return found


def look_at(task: asyncio.Task[Any]) -> None:
    """All that a monitor may ask of a task."""
    assert task.get_stack()
    out = io.StringIO()
    task.print_stack(file=out)
    assert "Stack for" in out.getvalue()
    assert "coro=<" in repr(task)
    for coroutine in chain(task.get_coro()):
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED
        inspect.getcoroutinelocals(coroutine)
        assert coroutine.cr_frame.f_code is coroutine.cr_code
    if sys.version_info >= (3, 14):
        assert asyncio.capture_call_graph(task).call_stack
        text = asyncio.format_call_graph(task)
        for coroutine in chain(task.get_coro()):
            assert f" {coroutine.cr_code.co_qualname}()" in text


def _is_suspended(task: asyncio.Task[Any]) -> bool:
    return inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_SUSPENDED  # type: ignore[arg-type]


async def look_at_waits(calls: dict[str, Work]) -> None:
    """Look at tasks that wait in each of the calls, by themselves and within asyncio's own."""
    for name, call in calls.items():
        for around, wrap in AROUND.items():
            before = asyncio.all_tasks()

            async def work(wrap: Any = wrap, call: Work = call) -> None:
                await wrap(call)

            task = asyncio.create_task(work(), name=f"{name} in {around}")
            for _ in range(20):  # until all of them wait
                await asyncio.sleep(0)
            assert not task.done(), task
            new = asyncio.all_tasks() - before
            assert task in new
            for each in new:
                if each is task or _is_suspended(each):  # a server's may begin or end just now
                    look_at(each)
            task.cancel()
            await asyncio.wait([task])


@asynccontextmanager
async def meeting(address: str) -> AsyncIterator[tuple[Any, Any, Any]]:
    config = aiordma.ConnectionConfig(recv_depth=2)
    async with (
        aiordma.listen(address, 0, config=config) as listener,
        aiordma.connect(address, listener.port, config=config) as client,
        await listener.accept() as server,
    ):
        yield listener, client, server


@of_each_kind
async def test_messages(address: str) -> None:
    async with meeting(address) as (listener, client, _):

        async def iterate() -> None:
            async for _ in client:
                pass

        memory = bytearray(100)
        await look_at_waits({
            "recv": client.recv,
            "async for": iterate,
            "recv_into": lambda: client.recv_into(memory),
            "accept": listener.accept,
        })  # fmt: skip
        filling = asyncio.create_task(_fill(client))
        for _ in range(20):  # the peer takes none, so that it has to wait
            await asyncio.sleep(0)
        await look_at_waits({"send": lambda: client.send(b"more")})
        filling.cancel()
        await asyncio.wait([filling])


async def _fill(connection: Any) -> None:
    while True:
        await connection.send(b"x")


@of_each_kind
async def test_one_sided_and_connects(address: str) -> None:
    """They end soon: they are looked at in the turn in which they begin to wait."""
    async with meeting(address) as (listener, client, server):
        lease = server.expose(64, read=True, write=True, atomic=has_atomics())
        remote = await lease.__aenter__()
        calls: dict[str, Work] = {
            "read": lambda: client.read(remote, bytearray(8)),
            "write": lambda: client.write(remote, b"12345678"),
            "connect": lambda: aiordma.connect(address, listener.port),
        }
        if has_atomics():
            calls["fetch_add"] = lambda: client.fetch_add(remote, 1)
            calls["compare_swap"] = lambda: client.compare_swap(remote, 1, 2)
        for call in calls.values():
            task = asyncio.create_task(call())
            if not _is_suspended(task):  # an eager one waits already: it may be done in a turn
                await asyncio.sleep(0)
            assert not task.done(), task
            look_at(task)
            opened = await task
            if isinstance(opened, aiordma.Connection):
                await opened.close()
                await (await listener.accept()).close()
        await lease.revoke()


@of_each_kind
async def test_a_request(address: str) -> None:
    async with meeting(address) as (_, client, server):
        kept: list[Any] = []

        async def hear() -> None:
            async for request in server.requests():
                kept.append(request)  # and never answer  # noqa: PERF401

        hearing = asyncio.create_task(hear())
        await look_at_waits({"request": lambda: client.request(b"?")})
        hearing.cancel()
        await asyncio.wait([hearing])


@of_each_kind
async def test_a_pool(address: str) -> None:
    async def keep(request: aiordma.Request) -> None:
        await asyncio.Event().wait()

    async with (
        aiordma.serve_requests(keep, address, 0) as server,
        aiordma.Pool(address, server.port, max_size=1) as pool,
        pool.connection(),
    ):

        async def borrow() -> None:
            async with pool.connection():
                pass

        await look_at_waits({"connection": borrow, "request": lambda: pool.request(b"?")})


@of_each_kind
async def test_streams(address: str) -> None:
    met: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    server = await aiordma.start_server(lambda *ends: met.set_result(ends), address, 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        reader, writer = await aiordma.open_connection(address, port)
        writer.write(b"begin")
        theirs, answers = await met
        assert await theirs.readexactly(5) == b"begin"
        await look_at_waits({
            "readexactly": lambda: reader.readexactly(4),
            "readline": reader.readline,
            "read": lambda: reader.read(4),
        })  # fmt: skip
        for each in (writer, answers):
            each.close()
            await each.wait_closed()


@pytest.mark.program
def test_without_the_tasks_of_c(loop_name: str) -> None:
    """All of the above once more."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_C, "-q", "-W", "error", "-p", "no:cacheprovider",
         f"--loop={loop_name}", "-k", "later", __file__],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


async def test_debug_mode_names_the_task_that_holds_up_the_loop(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As over TCP: and not the reader of the completion channel."""
    loop = asyncio.get_running_loop()
    before = loop.get_debug(), loop.slow_callback_duration
    loop.set_debug(True)
    loop.slow_callback_duration = 0.2
    caplog.set_level(logging.WARNING, "asyncio")
    try:
        async with meeting(address) as (_, client, server):

            async def hear() -> None:
                await client.recv()
                time.sleep(0.3)  # noqa: ASYNC251 - it blocks the loop

            task = asyncio.create_task(hear(), name="the slow one")
            await asyncio.sleep(0.05)
            await server.send(b"one")
            await task
    finally:
        loop.set_debug(before[0])
        loop.slow_callback_duration = before[1]
    lines = [record.getMessage() for record in caplog.records if "took" in record.getMessage()]
    assert any("the slow one" in line for line in lines), lines
    assert not any("Readable" in line for line in lines), lines
