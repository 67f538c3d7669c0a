"""What unit tests share: both event loops, and hypothesis without chance."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.inside.endpoint import copy_up_to

from .endpoint.fabric import use_fake_regions

# Without chance a failure repeats; HYPOTHESIS_PROFILE=random looks for new ones, and prints the
# line that repeats what it found.  Whether examples are made quickly depends on the machine alone.
_ANY_SPEED: dict[str, Any] = {
    "deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow],
}  # fmt: skip
settings.register_profile("unit", derandomize=True, **_ANY_SPEED)
settings.register_profile("random", print_blob=True, max_examples=500, **_ANY_SPEED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))

FOLDER = Path(__file__).parent
LIMIT_S = 20.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def pytest_configure(config: pytest.Config) -> None:
    config.option.asyncio_debug = True


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A test that is a coroutine runs on both loops, and one of no loop in particular once."""
    if item.get_closest_marker("one_loop"):
        return {"asyncio": lambda: _new_loop("asyncio")}
    names = [config.getoption("--unit-loop")] if config.getoption("--unit-loop") else LOOPS
    return {name: functools.partial(_new_loop, name) for name in names}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give coroutines a limit, and keep to one loop, if the command line says so."""
    for item in items:
        if not isinstance(item, pytest.Function) or FOLDER not in item.path.parents:
            continue
        # The clock of a test for one loop may be the test's own.
        if inspect.iscoroutinefunction(item.obj) and not item.get_closest_marker("one_loop"):
            item.obj = _with_limit(item.obj)
    if only := config.getoption("--unit-loop"):
        others = LOOPS.keys() - {only}
        chosen = {item: others.isdisjoint(map(str, _parameters(item))) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not chosen[item]])
        items[:] = [item for item in items if chosen[item]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Keep the collector off what the tests of a file leave to the rest of the run.

    pytest keeps their reports, and libraries what they were imported for: hundreds of tests
    collect garbage, and would look through all of it.
    """
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # nobody thaws: that would bring back what was frozen after the collection
    return result


def _parameters(item: pytest.Item) -> Iterable[object]:
    spec = getattr(item, "callspec", None)
    return () if spec is None else spec.params.values()


async def _bounded(main: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return await main


def _with_limit(test: Callable[..., Coroutine[Any, Any, None]]) -> Any:
    @functools.wraps(test)
    async def limited(**fixtures: Any) -> None:
        await _bounded(test(**fixtures))

    return limited


def _new_loop(name: str) -> asyncio.AbstractEventLoop:
    loop = LOOPS[name]()
    loop.slow_callback_duration = 60  # a busy machine is no news; logs are looked at
    return loop


def _runner(name: str) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=lambda: _new_loop(name), debug=True)


def run_on(name: str, main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a new loop of the kind `name`, for a bounded time."""
    with _runner(name) as runner:
        return runner.run(_bounded(main))


@pytest.fixture(params=list(LOOPS))
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs coroutines on one new loop, asyncio's in one test and uvloop in the next."""
    with _runner(request.param) as runner:
        yield lambda main: runner.run(_bounded(main))


@pytest.fixture(params=["copied", "registered"])
def fake_regions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large messages go through the fake adapter; they are copied, or none is."""
    use_fake_regions(monkeypatch)
    copy_up_to(monkeypatch, 1 << 18 if request.param == "copied" else 0)


async def cancel_at_every_turn(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it is done, as a cancel scope of anyio does."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def settle(rounds: int = 5) -> None:
    """Let every other task run until it waits."""
    for _ in range(rounds):
        await asyncio.sleep(0)


@contextmanager
def eager_collector() -> Iterator[None]:
    """The youngest objects are looked at with each allocation, all of them rather often."""
    before = gc.get_threshold()
    gc.set_threshold(1, 3, 3)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
