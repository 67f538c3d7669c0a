"""Private parts of aiordma that a simulation sets, or asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from aiordma.cm import resolving
from aiordma.endpoint import link
from aiordma.link import completions, log_share
from aiordma.verbs import CompletionQueue, SendFlags, comp_channel
from aiordma.verbs.safety import address_of

__all__ = [
    "awaits_loop", "begin_to_destroy", "forget_times", "raw_frames", "set_budget",
    "set_processors", "usual_budget", "usual_processors",
]  # fmt: skip


@contextlib.contextmanager
def raw_frames() -> Iterator[None]:
    """Have messages of raw connections wake their peers, as the frames of the protocol have to."""
    before = link._SIGNALED
    link._SIGNALED = int(SendFlags.SIGNALED | SendFlags.SOLICITED)
    try:
        yield
    finally:
        link._SIGNALED = before


def forget_times() -> None:
    """Forget what the library keeps for a while: a clock that begins again would keep it longer."""
    resolving._ibacm = 0.0, False
    log_share.VIOLATIONS._periods.clear()


def usual_budget() -> int:
    """Completions that a drain takes at once."""
    return comp_channel._BUDGET


def set_budget(most: int) -> None:
    """Have later channels take so many completions at once."""
    comp_channel._BUDGET = most


def usual_processors() -> Callable[[], tuple[int, int]]:
    """What tells how many processors this process has, and the machine."""
    return completions._processors


def set_processors(told: Callable[[], tuple[int, int]]) -> None:
    """Have another function tell it."""
    completions._processors = told


def begin_to_destroy(cq: CompletionQueue) -> int:
    """Do the first step of a queue's end, as its thread does; its address, or 0 if it is gone."""
    if not cq._handle:
        return 0
    cq._aio.retire(address_of(cq))
    return address_of(cq)


def awaits_loop(cq: CompletionQueue, acknowledged: Callable[[int], int]) -> bool:
    """Whether the destruction of a queue would wait for the loop, which has an event of it.

    Args:
        cq: The queue, whose end has begun.
        acknowledged: How many events of a queue are acknowledged, by its address.
    """
    return bool(cq._handle) and cq._aio.events != acknowledged(address_of(cq))
