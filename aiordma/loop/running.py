"""The loop that runs in this thread, if there is one: many a call comes from a finalizer."""

from __future__ import annotations

import asyncio

__all__ = ["running_loop"]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """As `asyncio.get_running_loop`, but None where none runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
