"""The coroutines of `send`, `recv`, `recv_into` and `__anext__`: in C, and as those of Python."""

from __future__ import annotations

import asyncio
import collections.abc
import gc
import inspect
import io
import subprocess
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from aiordma._core import Coroutine
from aiordma.errors import ResourceClosedError
from tests.inside.endpoint import left_is, receive_in_python, set_terms

from ..conftest import LIMIT_S, Run, settle
from ..endpoint.test_sender import lost
from .test_message_waiting import Side, parked, traced
from .test_wakeup import called_by_the_loop
from .test_wakeup_tasks import EAGER, TASKS

CALLS: dict[str, Callable[[Any], Any]] = {
    "send": lambda core: core.send(b"x"),
    "recv": lambda core: core.recv(),
    "recv_into": lambda core: core.recv_into(bytearray(64)),
    "__anext__": lambda core: core.__anext__(),
}
RECEIVES = ("recv", "recv_into", "__anext__")


@pytest.fixture(params=CALLS)
def name(request: pytest.FixtureRequest) -> str:
    """A method that returns a Coroutine."""
    return str(request.param)


def test_it_is_a_coroutine_by_name_and_by_protocol(run: Run, name: str) -> None:
    async def main() -> None:
        coroutine = CALLS[name](Side().core)
        assert asyncio.iscoroutine(coroutine)
        assert isinstance(coroutine, collections.abc.Coroutine)
        assert isinstance(coroutine, Coroutine)
        assert inspect.isawaitable(coroutine)
        assert (coroutine.__name__, coroutine.__qualname__) == (name, f"Connection.{name}")
        assert repr(coroutine).startswith(f"<coroutine object Connection.{name} at 0x")
        assert (coroutine.cr_running, coroutine.cr_await) == (False, None)
        task: asyncio.Task[object] = asyncio.create_task(coroutine)
        assert f"coro=<Connection.{name}" in repr(task)
        task.cancel()
        await asyncio.wait([task])

    run(main())


def test_inspect_takes_the_methods_for_coroutine_functions(run: Run, name: str) -> None:
    """Python 3.11 has no way to say so."""

    async def main() -> None:
        method = getattr(Side().core, name)
        assert inspect.iscoroutinefunction(method) == (sys.version_info >= (3, 12))

    run(main())


#: The attributes of a coroutine of Python, of the version that runs this.
SURFACE = [name for name in dir(collections.abc.Coroutine) if not name.startswith("_")] + [
    name for name in dir(types.CoroutineType) if name.startswith("cr_")
]


def state_of(coroutine: Any) -> str:
    """As inspect tells, which asks other attributes in each version of Python."""
    state = inspect.getcoroutinestate(coroutine)
    assert coroutine.cr_state == state
    assert coroutine.cr_running == (state == inspect.CORO_RUNNING)
    assert coroutine.cr_suspended == (state == inspect.CORO_SUSPENDED)
    assert (coroutine.cr_frame is None) == (state == inspect.CORO_CLOSED)
    assert coroutine.cr_origin is None
    assert inspect.getcoroutinelocals(coroutine) == {}
    return state


def test_it_has_what_a_coroutine_of_python_has(run: Run, name: str) -> None:
    async def main() -> None:
        coroutine = CALLS[name](Side().core)
        assert {"send", "throw", "close", "cr_await", "cr_frame", "cr_code"} <= set(SURFACE)
        assert [attribute for attribute in SURFACE if not hasattr(coroutine, attribute)] == []
        code = coroutine.cr_code
        assert (code.co_name, code.co_qualname) == (name, f"Connection.{name}")
        frame = coroutine.cr_frame
        assert (frame.f_code, frame.f_back, frame.f_lineno) == (code, None, code.co_firstlineno)
        lines, first = inspect.getsourcelines(getattr(type(Side().core), name))
        assert (code.co_filename, code.co_firstlineno) == (
            inspect.getsourcefile(getattr(type(Side().core), name)),
            first,
        )
        assert traceback.extract_stack(frame)[0].line == lines[0].strip()
        coroutine.close()

    run(main())


@pytest.mark.parametrize("name", RECEIVES, indirect=True)
def test_inspect_tells_its_state(run: Run, name: str) -> None:
    async def main() -> None:
        side, states = Side(), list[str]()
        coroutine = CALLS[name](side.core)
        assert state_of(coroutine) == inspect.CORO_CREATED
        coroutine.send(None)
        assert state_of(coroutine) == inspect.CORO_SUSPENDED
        assert coroutine.cr_await is side.state.receive_wakeup
        second = CALLS["recv"](side.core)  # goes on in Python, because a task waits already
        second.send(None)
        assert state_of(second) == inspect.CORO_SUSPENDED
        assert inspect.iscoroutine(second.cr_await)
        for each in (second, coroutine):
            each.close()
            assert state_of(each) == inspect.CORO_CLOSED
            assert each.cr_await is None

        async def go_on() -> None:
            states.append(state_of(third))
            assert third.cr_await is None

        receive_in_python(side.core, go_on)
        third = CALLS["recv"](side.core)
        with pytest.raises(StopIteration):
            third.send(None)
        assert states == [inspect.CORO_RUNNING]
        assert state_of(third) == inspect.CORO_CLOSED

    run(main())


@pytest.mark.parametrize("kind", [*TASKS, "eager"])
def test_the_stack_of_its_task_names_the_call(run: Run, name: str, kind: str) -> None:
    """Of a task that waits, and of one whose call has raised; a queued send waits for credits."""
    if kind == "eager" and EAGER is None:
        assert not hasattr(asyncio, "eager_task_factory"), "only Python 3.11 has none"
        return

    async def main() -> None:
        loop, side = asyncio.get_running_loop(), Side(stall_timeout_s=None)
        make: Any = EAGER if kind == "eager" else TASKS[kind]
        task = make(CALLS[name](side.core), loop=loop)
        await settle()
        assert not task.done()
        assert [frame.f_code.co_qualname for frame in task.get_stack()] == [f"Connection.{name}"]
        text = io.StringIO()
        task.print_stack(file=text)
        assert f"in {name}" in text.getvalue()
        assert f"coro=<Connection.{name}() running at" in repr(task)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert task.get_stack() == []

    run(main())


if sys.version_info >= (3, 14):
    AROUND: dict[str, Callable[[Any], Any]] = {
        "await": lambda call: call,
        "wait_for": lambda call: asyncio.wait_for(call, LIMIT_S),
        "shield": asyncio.shield,
        "gather": asyncio.gather,
    }

    def frames_of(graph: Any) -> list[str]:
        """The functions of a call graph, and of those that wait for it, from within."""
        own = [entry.frame.f_code.co_qualname for entry in graph.call_stack]
        return own + [each for parent in graph.awaited_by for each in frames_of(parent)]

    @pytest.mark.parametrize("around", AROUND)
    def test_call_graphs_show_it(run: Run, name: str, around: str) -> None:
        async def main() -> None:
            side = Side(stall_timeout_s=None)

            async def work() -> None:
                await AROUND[around](CALLS[name](side.core))

            before = asyncio.all_tasks()
            task = asyncio.create_task(work())
            await settle()
            assert not task.done()
            new = asyncio.all_tasks() - before
            graphs = {each: asyncio.capture_call_graph(each) for each in new}
            inner = next(each for each in new if each is not task or len(new) == 1)
            shown = frames_of(graphs[inner])
            assert any(each == f"Connection.{name}" for each in shown)
            assert work.__qualname__ in shown
            text = asyncio.format_call_graph(inner)
            assert f"in Connection.{name}()" in text
            for each in new:
                each.cancel()
            await asyncio.wait(new)

        run(main())

    def test_another_process_lists_the_tasks_that_wait_in_it() -> None:
        """`python -m asyncio ps` reads the memory of a process: of coroutines of Python alone."""
        from asyncio.tools import get_all_awaited_by

        child = subprocess.Popen(
            [sys.executable, "-c", _WAITING],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"waiting\n"
            shown = {
                task.task_name: [
                    frame.funcname for coro in task.coroutine_stack for frame in coro.call_stack
                ]
                for thread in get_all_awaited_by(child.pid)
                for task in thread.awaited_by
            }
        finally:
            child.communicate(timeout=LIMIT_S)
        assert child.returncode == 0
        assert shown["direct"] == []
        assert shown["inside"] == ["work"]

    _WAITING = """
import asyncio, sys
from tests.unit.core.test_message_waiting import Side

async def work(side):
    await side.core.recv()

async def main():
    sides = Side(), Side()
    tasks = [
        asyncio.create_task(sides[0].core.recv(), name="direct"),
        asyncio.create_task(work(sides[1]), name="inside"),
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    print("waiting", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

asyncio.run(main())
"""


def test_nothing_happens_before_it_runs(run: Run, name: str) -> None:
    async def main() -> None:
        side = Side()
        side.arrives(b"one")
        set_terms(side.state, credits=4)
        coroutine = CALLS[name](side.core)
        assert (side.state.arrived, side.link.sent) == (1, [])
        coroutine.close()
        assert (side.state.arrived, side.link.sent) == (1, [])

    run(main())


def test_one_that_never_runs_warns(run: Run, name: str) -> None:
    async def main() -> None:
        with pytest.warns(RuntimeWarning, match=rf"coroutine 'Connection\.{name}' was never await"):
            CALLS[name](Side().core)

    run(main())


def test_one_that_is_closed_or_thrown_into_before_it_runs_is_over(run: Run, name: str) -> None:
    async def main() -> None:
        closed, thrown = (CALLS[name](Side().core) for _ in range(2))
        closed.close()
        closed.close()
        with pytest.raises(ZeroDivisionError, match="now"):
            thrown.throw(ZeroDivisionError("now"))
        for coroutine in (closed, thrown):
            with pytest.raises(RuntimeError, match="cannot reuse"):
                coroutine.send(None)
            with pytest.raises(RuntimeError, match="cannot reuse"):
                coroutine.throw(ValueError())
            with pytest.raises(RuntimeError, match="cannot reuse"):
                await coroutine

    run(main())


def test_the_first_value_is_none(run: Run, name: str) -> None:
    async def main() -> None:
        coroutine = CALLS[name](Side().core)
        with pytest.raises(TypeError, match="just-started"):
            coroutine.send(1)
        coroutine.close()

    run(main())


def test_it_cannot_be_awaited_twice(run: Run, name: str) -> None:
    async def main() -> None:
        side = Side()
        coroutine = CALLS[name](side.core)

        async def wait() -> None:
            await coroutine

        first = asyncio.create_task(wait())
        await settle()
        assert not first.done()
        with pytest.raises(RuntimeError, match="awaited already"):
            await coroutine
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(RuntimeError, match="cannot reuse"):
            await coroutine

    run(main())


def test_it_does_not_run_from_within(run: Run) -> None:
    """Not even where it runs Python code."""

    async def main() -> None:
        side = Side()
        caught: list[BaseException] = []
        coroutine: Any = side.core.recv()

        def intrude() -> None:
            assert coroutine.cr_running
            for use in (
                lambda: coroutine.send(None),
                coroutine.close,
                lambda: coroutine.throw(OSError()),
            ):
                try:
                    use()
                except ValueError as exc:
                    caught.append(exc)

        async def go_on() -> None:
            intrude()

        receive_in_python(side.core, go_on)
        task = asyncio.create_task(coroutine)
        await settle()
        assert [str(exc) for exc in caught] == ["coroutine already executing"] * 3
        await task

    run(main())


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("how", ["cancel", "close", "collect"])
@pytest.mark.parametrize("name", RECEIVES, indirect=True)
def test_a_wait_that_is_given_up_leaves_its_message_to_the_next(
    run: Run, name: str, how: str, trace: bool
) -> None:
    async def main() -> None:
        side = Side()
        with traced(trace):
            coroutine = CALLS[name](side.core)
            first = asyncio.create_task(coroutine) if how == "cancel" else None
            if first is None:
                coroutine.send(None)
            await settle()
            second = asyncio.create_task(side.recv())
            await settle()
            assert not second.done()
            side.arrives(b"one")
            if first is not None:
                first.cancel()
            elif how == "close":
                coroutine.close()
            del coroutine
            gc.collect()
            side.tell()
            async with asyncio.timeout(LIMIT_S):
                assert await second == b"one"

    run(main())


@pytest.mark.parametrize("how", ["close", "throw", "drop"])
@pytest.mark.parametrize("name", RECEIVES, indirect=True)
def test_one_that_is_given_up_ends_once_although_python_code_raises(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    """A report of a Coroutine that is ending would take a reference, and end it once more."""

    async def main() -> None:
        side = Side()

        def interrupted() -> None:
            raise KeyboardInterrupt

        reported: list[object] = []
        left_is(monkeypatch, interrupted)
        monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.object))
        coroutine = CALLS[name](side.core)
        coroutine.send(None)
        if how == "close":
            coroutine.close()
        elif how == "throw":
            with pytest.raises(OSError, match="thrown"):
                coroutine.throw(OSError("thrown"))
        del coroutine
        assert reported == [side.core]
        coroutines = [CALLS[name](side.core) for _ in range(8)]
        assert len(set(map(id, coroutines))) == len(coroutines)
        for coroutine in coroutines:
            coroutine.close()

    run(main())


@pytest.mark.parametrize("trace", [False, True])
def test_values_and_exceptions_pass_between_a_task_and_python_code(run: Run, trace: bool) -> None:
    async def main() -> None:
        side = Side()
        log: list[object] = []

        class Pause:
            def __await__(self) -> Generator[str, object, None]:
                try:
                    log.append((yield "first"))
                    log.append((yield "second"))
                except KeyError:
                    log.append((yield "caught"))

        async def go_on() -> str:
            await Pause()
            return "done"

        receive_in_python(side.core, go_on)
        with traced(trace):
            for thrown in (False, True):
                coroutine: Any = side.core.recv()
                assert coroutine.send(None) == "first"
                assert coroutine.cr_await is not None
                assert (coroutine.throw(KeyError()) if thrown else coroutine.send(1)) == (
                    "caught" if thrown else "second"
                )
                with pytest.raises(StopIteration) as stop:
                    coroutine.send(2)
                assert stop.value.value == "done"
        assert log == [1, 2, 2]

    run(main())


def test_iteration_ends_with_the_connection_and_a_break_raises(run: Run) -> None:
    async def main() -> None:
        closed, broken = Side(), Side()
        bodies: list[bytes] = []

        async def iterate(side: Side) -> None:
            async for message in side.core:
                bodies.append(bytes(message))  # noqa: PERF401 - kept when the iteration raises

        tasks = [asyncio.create_task(iterate(side)) for side in (closed, broken)]
        await settle()
        for side in (closed, broken):
            side.arrives(b"one")
            await called_by_the_loop(side.tell)
        closed.receiver.fail(lambda: ResourceClosedError(0, "closed"))
        broken.receiver.fail(lost)
        await tasks[0]
        with pytest.raises(ConnectionResetError):
            await tasks[1]
        assert bodies == [b"one", b"one"]

    run(main())


def test_it_keeps_nothing_once_it_is_over(run: Run) -> None:
    async def main() -> None:
        side = Side()
        side.arrives(b"one")
        coroutine = side.core.recv()
        message = await coroutine
        gone = weakref.ref(message)
        del message
        assert gone() is None

        data = bytes(range(9))
        set_terms(side.state, credits=1)
        count = sys.getrefcount(data)
        sending = side.core.send(data)
        assert sys.getrefcount(data) == count + 1
        await sending
        del sending
        assert sys.getrefcount(data) == count

    run(main())


def test_a_task_in_a_cycle_with_its_coroutine_is_collected(run: Run) -> None:
    async def main() -> None:
        side = Side()
        task = await parked(side)
        task.cancel()
        await asyncio.wait([task])
        coroutine: Any = side.core.recv()
        cycle: list[Any] = [coroutine]
        side.core.__dict__["cycle"] = cycle
        gone = weakref.ref(side.core)
        coroutine.close()
        del coroutine, cycle, side, task
        gc.collect()
        assert gone() is None

    run(main())
