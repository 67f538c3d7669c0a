"""SharedQueues: the completion queues that the connections of a loop and device share.

Theory of operation
    One queue, as long as it can grow; where the device cannot do that, or has reached its limit,
    the next is begun.  A queue that had no room is not asked again before a queue pair of its has
    gone, so that a new connection asks one queue, however many are full.

    No queue ever runs over: it has room for all that its queue pairs may have under way.  What one
    that is gone has completed may still lie there, with no room promised for it any more; so it is
    taken out before room is promised to the next.

    Connections that are woken by solicited completions alone, and others, have queues of their own
    each: what a queue is armed for concerns all that complete there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from aiordma.loop import registry
from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue

__all__ = ["SharedQueues"]

_CQE = 1024  # completions that a shared queue has room for at first
# Software iWARP's cannot grow; one of this size also leaps over the page of queues that its driver
# cannot have, which would be the end after some 40 connections (docs/surprises.md).
_IWARP_CQE = 32_768


class _Queue(CompletionQueue):
    """One of them; it says when there may be room again.

    Attributes:
        shared: Those that it is one of; None when they are closed.
    """

    __slots__ = ("shared",)

    def __init__(
        self, context: Context, cqe: int, channel: CompletionChannel, shared: SharedQueues
    ) -> None:
        self.shared: SharedQueues | None = shared
        super().__init__(context, cqe, channel)

    def _unpromise(self, depth: int) -> None:
        shared = self.shared
        if shared is not None:
            shared._left.add(self)  # before its room is promised to others, in another thread
        super()._unpromise(depth)
        if shared is not None:
            shared._has_room(self)


class SharedQueues:
    """Those of one loop and device.

    Args:
        channel: Where they report.
    """

    def __init__(self, channel: CompletionChannel) -> None:
        self._channel = channel
        self.queues: list[_Queue] = []
        self._open: deque[_Queue] = deque()  # there may be room in these
        self._full: set[_Queue] = set()
        self._left: set[_Queue] = set()  # a queue pair of theirs has gone since they were swept
        self._lock = threading.RLock()  # queue pairs are destroyed in any thread, by anybody

    @classmethod
    def of(
        cls, channel: CompletionChannel, *, quiet: bool
    ) -> tuple[SharedQueues, Callable[[], None]]:
        """Those of the running loop and the channel's device, and their release.

        Args:
            channel: Where they report.
            quiet: Whether the loop is woken for solicited completions alone.
        """
        key = ("shared completions", id(channel.context), quiet)
        return registry.acquire(key, lambda: SharedQueues(channel))

    def take(self, completions: int) -> CompletionQueue:
        """A queue with room for so many more, which the queue pair then promises.

        Raises:
            OSError: The adapter has no more.
        """
        while self._open:
            with self._lock:  # full, unless it says otherwise meanwhile
                cq = self._open.popleft()
                self._full.add(cq)
            if cq in self._left:
                self._left.discard(cq)
                self._channel._sweep(cq)
            if cq._make_room(completions):
                self._has_room(cq)  # first in the line, to be filled before others
                return cq
        context = self._channel.context
        first = _IWARP_CQE if context.is_iwarp else _CQE
        # What is too much for the device it says by refusing it.
        room = max(min(first, context.attributes.max_cqe), completions)
        cq = _Queue(context, room, self._channel, self)
        self.queues.append(cq)
        self._open.append(cq)
        return cq

    def _has_room(self, cq: _Queue) -> None:
        with self._lock:
            if cq in self._full:
                self._full.discard(cq)
                self._open.appendleft(cq)

    def close(self) -> None:
        """The last connection has let go."""
        queues, self.queues = self.queues, []
        for cq in queues:
            cq.shared = None
            cq.close()
