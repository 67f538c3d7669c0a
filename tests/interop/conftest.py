"""Interop tests: on a real device, with the fixtures and the oracle of the device tests."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.device.shared import *  # noqa: F403  # each folder on a device has these
from tests.device.shared import IS_SIW

# iWARP connects by the connection manager only.
collect_ignore = ["test_by_hand.py"] if IS_SIW else []

# Not twice: a port whose listener was killed may stay taken for a while.  Below the ports that the
# kernel chooses itself.
_PORTS = itertools.count(20_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of all folders that are collected with this one
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.interop)


@pytest.fixture
def port() -> int:
    """A port for a program that cannot tell which one it was given."""
    return next(_PORTS)


@pytest.fixture
def most(is_siw: bool) -> int:
    """How many connections a foreign program can have at a time.

    With software iWARP 144 pages is all that a process gets for its queues, of which ucmatose and
    cmtime need four for a connection; see tests/device/test_siw_limits.py.
    """
    return 30 if is_siw else 50
