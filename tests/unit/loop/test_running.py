"""The loop that runs: asked at each call, of whatever asyncio's function is by then."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from aiordma.loop.running import check_loop, check_thread, from_finalizer, running_loop

from ..conftest import Run


def test_the_loop_that_runs(run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert running_loop() is loop
        check_loop(loop, "object")
        check_thread(loop, "object")

    assert running_loop() is None
    run(main())


def test_a_library_that_replaces_the_function_of_asyncio_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As trio_asyncio does, although aiordma was imported before."""

    class Loop:
        def is_running(self) -> bool:
            return True

    loop = cast("asyncio.AbstractEventLoop", Loop())
    with pytest.raises(RuntimeError, match="the object belongs to another event loop"):
        check_loop(loop, "object")
    monkeypatch.setattr(asyncio, "_get_running_loop", lambda: loop)
    assert running_loop() is loop
    check_loop(loop, "object")
    check_thread(loop, "object")
    called: list[bool] = []
    from_finalizer(loop, lambda: called.append(True))
    assert called
