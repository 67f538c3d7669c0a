"""Attention: the completions for which a managed completion queue wakes its loop.

Theory of operation
    A queue of connections is armed for solicited completions: the peers' messages are solicited,
    this side's sends are not.  While a task waits for a request of this side, the queue is armed
    for all completions.  Several connections may complete in one queue, so these waits are counted;
    when the last ends, the queue is armed for solicited completions again.

    A connection that is collected is closed in any thread: each count is changed by one call of C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._ffi import lib
from aiordma._ffi.check import check_errno

if TYPE_CHECKING:
    from aiordma.verbs.cq import CompletionQueue

__all__ = ["expect", "listen", "unlisten"]


def listen(cq: CompletionQueue) -> bool:
    """Have every completion wake the loop, until as many calls of `unlisten`.

    Returns:
        Whether that is new; then the caller polls, because completions may be there already.

    Raises:
        OSError: The queue cannot be armed.
    """
    own = cq._aio
    own.listen()
    if own.armed_for_all or not own.managed or cq.closed:
        return bool(own.listeners == 1)
    own.note_arming(True)
    try:
        check_errno(lib.ibv_req_notify_cq(cq._require(), 0), "ibv_req_notify_cq")
    except OSError:
        own.note_arming(False)
        raise
    return True


def unlisten(cq: CompletionQueue) -> None:
    """Undo one `listen`, from the next arming of the queue on."""
    cq._aio.unlisten()


def expect(cq: CompletionQueue, change: int) -> None:
    """Change the number of connections for which the queue is armed late, by 1 or -1.

    The reason is at `drain_once` in _core/drain.c.
    """
    cq._aio.want_arm_late(change)
