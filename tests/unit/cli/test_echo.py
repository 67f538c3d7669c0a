"""The memory that `aiordma echo` exposes, shared among the sources of clients."""

from __future__ import annotations

import contextlib

from aiordma.cli.echo import Echo


def test_a_source_does_not_take_all_of_the_memory() -> None:
    echo = Echo(lambda *_, **__: None, 64)
    with contextlib.ExitStack() as all_of_them:
        with contextlib.ExitStack() as first:
            places = [first.enter_context(echo.exposing("192.0.2.1")) for _ in range(100)]
            assert places == [0] * 6 + [6] * 94
            others = [f"198.51.100.{number}" for number in range(3)]
            places = [all_of_them.enter_context(echo.exposing(other)) for other in others]
            assert places == [0, 0, 8]
        # An address that the host gives itself in its network is the same source.
        news = [f"2001:db8::{number}" for number in range(10)]
        places = [all_of_them.enter_context(echo.exposing(each)) for each in news]
        assert places == [0] * 6 + [6] * 4
    with echo.exposing(None) as place:
        assert place == 0
