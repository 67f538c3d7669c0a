"""Make the coroutines of C look like Python's to inspect, asyncio and debuggers."""

from __future__ import annotations

import sys
from types import FrameType, FunctionType
from typing import TYPE_CHECKING

from aiordma._core import Coroutine

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["markcoroutinefunction", "show_frames"]

if sys.version_info >= (3, 12):
    from inspect import markcoroutinefunction
else:
    from typing import TypeVar

    _F = TypeVar("_F", bound="Callable[..., object]")

    def markcoroutinefunction(function: _F) -> _F:
        """A function that returns a coroutine of C cannot be marked."""
        return function


def show_frames(
    send: Callable[..., Any],
    recv: Callable[..., Any],
    anext_: Callable[..., Any],
    request: Callable[..., Any],
    recv_into: Callable[..., Any],
) -> None:
    """Have `cr_frame` and `cr_code` of the coroutines that these functions make name them.

    A coroutine of C has no frame.  But up to Python 3.14 inspect considers a coroutine without one
    ended, and stacks of tasks, which are made of frames, would not show that a task is in `recv`.
    """
    if Coroutine is not None:  # the compiled module is there
        shown = (send, recv, anext_, request, recv_into)  # as enum aio_call
        Coroutine._set_frames(*(_frame_of(function) for function in shown))


async def _nothing() -> None:
    """The code of such a frame, which is never run."""


def _frame_of(function: Callable[..., Any]) -> FrameType:
    """A frame at the first line of a function, without variables and without a caller."""
    shown: Any = function
    code = _nothing.__code__.replace(
        co_filename=shown.__code__.co_filename,
        co_firstlineno=shown.__code__.co_firstlineno,
        co_name=shown.__name__,
        co_qualname=shown.__qualname__,
    )
    coroutine = FunctionType(code, shown.__globals__)()
    frame: FrameType = coroutine.cr_frame
    coroutine.close()
    return frame
