"""Calls that may block in C or in the kernel, with a limit.

The commands have to answer on a machine where something is broken, and a broken driver may
not answer at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["LIMIT_S", "call_bounded"]

T = TypeVar("T")
LIMIT_S = 10.0


def call_bounded(function: Callable[[], T], limit_s: float | None = None) -> T:
    """Run `function` in a daemon thread, which does not keep the process from ending.

    Args:
        function: The call.
        limit_s: Seconds; `LIMIT_S` by default.

    Raises:
        TimeoutError: It did not return in time; it goes on in its thread.
        BaseException: The exception of `function`.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=work, name="aiordma-cli", daemon=True).start()
    limit = LIMIT_S if limit_s is None else limit_s
    try:
        return future.result(limit)
    except TimeoutError:
        if future.done():
            raise
        msg = f"no answer within {limit:g} s"
        raise TimeoutError(msg) from None
