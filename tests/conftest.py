"""What every test shares: the choice of the event loop, and assertions that show their values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

# pytest shows the values of what a test module asserts, and has to be asked for helper modules.
# Not "tests": that is imported by now, as the package of this file.
_HELPERS = ("conformance", "device", "interop", "native_ends", "runner", "seeds", "unit")
pytest.register_assert_rewrite(*(f"tests.{name}" for name in _HELPERS))

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loop",
        choices=("asyncio", "uvloop"),
        default="asyncio",
        help="event loop that async tests run on",
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"event loop: {config.getoption('--loop')}"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    if config.getoption("--loop") == "uvloop":
        import uvloop

        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
