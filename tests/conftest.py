"""What every test shares: the choice of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

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
