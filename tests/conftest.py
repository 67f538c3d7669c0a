"""What every test shares: the choice of the event loop, and assertions that show their values."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hypothesis
import pytest

# pytest shows the values of what a test module asserts, and has to be asked for helper modules.
# Not "tests": that is imported by now, as the package of this file.
_HELPERS = (
    "conformance",
    "device",
    "fabric",
    "inside",
    "interop",
    "native_ends",
    "guests",
    "seeds",
    "unit",
)
pytest.register_assert_rewrite(*(f"tests.{name}" for name in _HELPERS))

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loop",
        choices=("asyncio", "uvloop"),
        default="asyncio",
        help="event loop that async tests run on",
    )
    parser.addoption(
        "--unit-loop",
        choices=("asyncio", "uvloop"),
        help="leave out the unit tests of the other loop; without it they run on both",
    )


#: Seconds after its limit in which a test may end; see `pytest_runtest_protocol`.
GRACE_S = float(os.environ.get("AIORDMA_TEST_GRACE_S", "30"))
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # nothing is captured yet


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def pytest_collection_finish() -> None:
    """Keep the collector off what lives as long as the run: thousands of tests, and their modules.

    Many tests collect garbage, and each time would look through all of it.
    """
    # When it first runs a test it asks who refers to the generators that it is to seed, and is not
    # told of what is frozen by then; nor where it is imported later, as by its plugin at the end.
    hypothesis.given(hypothesis.strategies.none())(lambda _: None)()
    gc.collect()
    gc.freeze()


def _limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    option: Any = item.config.getoption("timeout", None)
    return float(option or item.config.getini("timeout") or 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the run if a test does not end at its limit.

    pytest-timeout fails the test with a signal, whose handler Python runs between two lines: not
    while a call of C stands.  A thread that needs no Python tells then where all others are, and
    ends the process, which otherwise would use up the time of the whole stage.
    """
    if not (limit := _limit_of(item)):
        return (yield)
    faulthandler.dump_traceback_later(limit + GRACE_S, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def short_traces() -> Iterator[None]:
    """A loop in debug mode notes two frames of where each handle and future was made, not ten.

    Ten, each with a look at its file, took more time than many a test itself.  What the debug mode
    checks is checked.
    """
    extract = traceback.StackSummary.extract
    of_a_stack = traceback.walk_stack(sys._getframe()).gi_code  # type: ignore[attr-defined]

    def brief(frames: Any, **options: Any) -> traceback.StackSummary:
        if getattr(frames, "gi_code", None) is not of_a_stack:
            return extract(frames, **options)  # of an exception
        return traceback.StackSummary.from_list(
            traceback.FrameSummary(
                frame.f_code.co_filename, number, frame.f_code.co_name, lookup_line=False
            )
            for frame, number in itertools.islice(frames, 2)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traceback.StackSummary, "extract", brief)
        yield


def pytest_report_header(config: pytest.Config) -> str:
    return f"event loop: {config.getoption('--loop')}"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    if config.getoption("--loop") == "uvloop":
        import uvloop

        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
