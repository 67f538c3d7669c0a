"""The loop that runs in this thread, if there is one: many a call comes from a finalizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["from_finalizer", "running_loop"]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """As `asyncio.get_running_loop`, but None where none runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def from_finalizer(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Run `function`, which belongs to `loop`: in the loop's thread if it runs in another one.

    The collector calls finalizers in whatever thread it comes to run in, while the loop's may be
    in the middle of a C call on the same connection.  Where the loop runs in this thread, or
    nowhere, `function` is called at once.
    """
    if loop.is_running() and loop is not running_loop():
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # it was closed in this moment
            function()
    else:
        function()
