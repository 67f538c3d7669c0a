"""Exceptions of callbacks: the library treats them as asyncio's loop does.

SystemExit and KeyboardInterrupt end `run_forever`, and nothing else: programs run a loop again, if
only to end their tasks.  Every other exception, GeneratorExit and CancelledError as well, is
reported to the loop's exception handler.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["ENDS_THE_LOOP", "report", "throw"]

#: Exceptions that asyncio's callbacks and tasks let through.
ENDS_THE_LOOP = (SystemExit, KeyboardInterrupt)


def report(
    loop: asyncio.AbstractEventLoop, exc: BaseException, message: str, **context: Any
) -> None:
    """Report `exc`, or have it end the loop in the loop's next turn; raises nothing.

    Args:
        loop: The loop; in its thread.
        exc: The exception.
        message: Text for the exception handler, which names the callback.
        context: Further entries for the exception handler, such as the transport.
    """
    if isinstance(exc, ENDS_THE_LOOP):
        throw(loop, exc)
        return
    try:
        loop.call_exception_handler({"message": message, "exception": exc, **context})
    except ENDS_THE_LOOP as ending:  # the program's own handler
        throw(loop, ending)


def throw(loop: asyncio.AbstractEventLoop, exc: BaseException) -> None:
    """Have `run_forever` raise `exc` in the loop's next turn: the caller has work to finish."""
    if not loop.is_closed():
        loop.call_soon(_raise, exc)


def _raise(exc: BaseException) -> None:
    raise exc
