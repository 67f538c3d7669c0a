"""Attention: the completions for which a managed completion queue wakes its loop.

Theory of operation
    A queue of connections is armed for solicited completions: the peers' messages are solicited,
    own sends are not.  While a task waits for an own request, the queue is armed for all
    completions.  Several connections may complete in one queue, so that these waits are counted;
    the end of the last has the queue armed for solicited completions again.

    A connection that is collected is closed in any thread, so that counting takes a lock; the
    thread that has the lock may be the thread that collects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._ffi import lib
from aiordma._ffi.check import check_errno
from aiordma.loop import fork

if TYPE_CHECKING:
    from aiordma.verbs.cq import CompletionQueue

__all__ = ["ARMED_FOR_ALL", "expect", "listen", "unlisten"]

ARMED_FOR_ALL = 1  # as QueueState.armed has it
_counts = fork.new_lock()


def listen(cq: CompletionQueue) -> bool:
    """Have every completion wake the loop, until as many calls of `unlisten`.

    Returns:
        Whether that is new; then the caller polls, because completions may be there already.

    Raises:
        OSError: The queue cannot be armed.
    """
    own = cq._aio
    with _counts:
        own.listeners += 1
        own.solicited = 0
    if own.armed == ARMED_FOR_ALL or not own.managed or cq.closed:
        return bool(own.listeners == 1)
    before, own.armed = own.armed, ARMED_FOR_ALL
    try:
        check_errno(lib.ibv_req_notify_cq(cq._require(), 0), "ibv_req_notify_cq")
    except OSError:
        own.armed = before
        raise
    return True


def unlisten(cq: CompletionQueue) -> None:
    """Undo one `listen`, from the next arming of the queue on."""
    own = cq._aio
    with _counts:
        own.listeners -= 1
        own.solicited = int(not own.listeners)


def expect(cq: CompletionQueue, change: int) -> None:
    """Change the number of connections for which the queue is armed late, by 1 or -1.

    The reason is at `drain_once` in _core/drain.c.
    """
    with _counts:
        cq._aio.arm_late += change
