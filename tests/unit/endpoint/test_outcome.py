"""Outcome.explaining: which errors of a block it replaces, and that it keeps none of them."""

from __future__ import annotations

import errno
import weakref

import pytest

from aiordma.endpoint.outcome import Outcome, closed_error
from aiordma.errors import ConnectionLostError, ResourceClosedError, lost_error


def test_only_what_the_end_of_the_connection_closes_is_replaced() -> None:
    outcome = Outcome()
    with pytest.raises(ResourceClosedError, match="the region"), outcome.explaining():
        raise ResourceClosedError("the region is closed")
    outcome.cause = lost_error(OSError(errno.EIO, "broken"))
    with pytest.raises(ConnectionLostError, match="broken") as caught, outcome.explaining():
        raise ResourceClosedError("the region is closed")
    assert caught.value is not outcome.cause
    with pytest.raises(KeyError), outcome.explaining():
        raise KeyError
    with outcome.explaining():
        """Nothing is raised."""


class Held:
    """What the block has."""


@pytest.mark.usefixtures("without_collector")
def test_what_is_replaced_is_not_kept() -> None:
    gone: list[weakref.ref[Held]] = []

    def fail() -> None:
        held = Held()
        gone.append(weakref.ref(held))
        raise ResourceClosedError("the region is closed")

    outcome = Outcome()
    outcome.cause = closed_error()
    with pytest.raises(ResourceClosedError, match="connection"), outcome.explaining():
        fail()
    assert gone[0]() is None
