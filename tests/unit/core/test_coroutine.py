"""The coroutines of `Connection.send`, `recv` and `__anext__`: in C, and as those of Python."""

from __future__ import annotations

import asyncio
import collections.abc
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest

from aiordma._core import Coroutine
from aiordma.errors import ResourceClosedError
from tests.inside.endpoint import left_is, receive_in_python

from ..conftest import LIMIT_S, Run, settle
from ..endpoint.test_receiver import lost
from .test_message_waiting import Side, parked, traced
from .test_wakeup import called_by_the_loop

CALLS: dict[str, Callable[[Any], Any]] = {
    "send": lambda core: core.send(b"x"),
    "recv": lambda core: core.recv(),
    "__anext__": lambda core: core.__anext__(),
}
RECEIVES = ("recv", "__anext__")


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


def test_nothing_happens_before_it_runs(run: Run, name: str) -> None:
    async def main() -> None:
        side = Side()
        side.arrives(b"one")
        side.state.credits = 4
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
        side.state.credits = 1
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
