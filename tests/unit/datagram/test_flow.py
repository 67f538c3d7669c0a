"""Water marks: a protocol is paused once, and goes on once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.datagram.flow import FlowControl


class Paused:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")


@contextlib.contextmanager
def made() -> Iterator[tuple[FlowControl, Paused]]:
    loop, protocol = asyncio.new_event_loop(), Paused()
    try:
        yield FlowControl(loop, None, protocol), protocol
    finally:
        loop.close()


@pytest.fixture
def flow() -> Iterator[tuple[FlowControl, Paused]]:
    with made() as pair:
        yield pair


def test_defaults(flow: tuple[FlowControl, Paused]) -> None:
    control, protocol = flow
    assert (control.low, control.high) == (16 * 1024, 64 * 1024)
    control.add(64 * 1024)
    assert not protocol.calls
    control.add(1)
    assert protocol.calls == ["pause"]
    control.remove(48 * 1024)
    assert protocol.calls == ["pause"]
    control.remove(1)
    assert protocol.calls == ["pause", "resume"]


@pytest.mark.parametrize(
    ("high", "low", "expected"),
    [(100, None, (25, 100)), (None, 100, (100, 400)), (0, None, (0, 0)), (5, 5, (5, 5))],
)
def test_limits(
    flow: tuple[FlowControl, Paused], high: int | None, low: int | None, expected: tuple[int, int]
) -> None:
    control, _ = flow
    control.set_limits(high, low)
    assert (control.low, control.high) == expected


@pytest.mark.parametrize(("high", "low"), [(1, 2), (-1, None), (5, -1)])
def test_limits_that_make_no_sense(
    flow: tuple[FlowControl, Paused], high: int, low: int | None
) -> None:
    with pytest.raises(ValueError, match="must be >="):
        flow[0].set_limits(high, low)


def test_new_limits_count_at_once(flow: tuple[FlowControl, Paused]) -> None:
    control, protocol = flow
    control.add(100)
    control.set_limits(99)
    assert protocol.calls == ["pause"]


@given(st.lists(st.integers(-50, 50)), st.integers(0, 100), st.integers(0, 100))
def test_calls_alternate(changes: list[int], one: int, other: int) -> None:
    with made() as (control, protocol):
        control.set_limits(max(one, other), min(one, other))
        for change in changes:
            if change >= 0:
                control.add(change)
            else:
                control.remove(min(-change, control.size))
            if control.size > control.high:
                assert control.paused
            if control.size <= control.low:
                assert not control.paused
        assert protocol.calls[::2] == ["pause"] * len(protocol.calls[::2])
        assert protocol.calls[1::2] == ["resume"] * len(protocol.calls[1::2])
        assert control.paused == bool(len(protocol.calls) % 2)
