"""Private parts of aiordma that a simulation sets, or asks for."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.cm import resolving
from aiordma.link import log_share
from aiordma.verbs import CompletionQueue, comp_channel
from aiordma.verbs.safety import address_of

__all__ = ["awaits_loop", "forget_times", "set_budget", "usual_budget"]


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


def awaits_loop(cq: CompletionQueue, acknowledged: Callable[[int], int]) -> bool:
    """Whether the destruction of a queue would wait for the loop, which has an event of it.

    Args:
        cq: The queue.
        acknowledged: How many events of a queue are acknowledged, by its address.
    """
    if not cq._handle:
        return False
    own = cq._aio
    return bool(own.events != acknowledged(address_of(cq)) + own.unacknowledged)
