"""SharedQueues: the completion queues that the connections of a loop and device share.

Theory of operation
    There is one queue, as long as it can grow.  If the device cannot grow it, or its limit is
    reached, the next queue is begun.  A queue without room is not tried again before one of its
    queue pairs is destroyed, so that a new connection tries one queue, however many are full.

    No queue ever overruns: it has room for all requests that its queue pairs may have under way.
    Completions of a destroyed queue pair may still be in the queue.  So its room counts until the
    queue has been polled, which is done before another queue pair gets it.

    Connections for which the queue is armed for solicited completions only, and others, have
    separate queues: arming concerns all queue pairs that complete in a queue.
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

# Completions that a shared queue has room for at first: one less than a power of two, because rings
# keep a place free, and adapters round up.
_CQE = 1023
# Software iWARP cannot grow a queue.  A queue of this size also reaches across the page of queues
# that its driver cannot have, which limits a process to some 40 connections (docs/surprises.md).
_IWARP_CQE = 32_768


class SharedQueue(CompletionQueue):
    """A shared queue; it calls `SharedQueues.has_room` when there may be room again.

    Attributes:
        shared: The queues that it belongs to; None when they are closed.
        left: Completions of queue pairs that have gone: they may be in the queue until it is swept.
    """

    __slots__ = ("left", "shared")

    def __init__(
        self, context: Context, cqe: int, channel: CompletionChannel, shared: SharedQueues
    ) -> None:
        self.shared: SharedQueues | None = shared
        self.left: int = 0
        super().__init__(context, cqe, channel)

    def _unpromise(self, depth: int, expected: int | None = None) -> None:
        shared = self.shared
        if shared is None:
            super()._unpromise(depth, expected)
            return
        with shared.lock:
            self.left += depth if expected is None else expected
        super()._unpromise(depth, 0)
        shared.has_room(self)

    def _expect(self, more: int) -> None:
        # Otherwise the ring grows: a finalizer may add slots, too, perhaps in the middle of a poll.
        if self.left and self.shared is not None and not self._can_expect(more):
            self.shared.sweep(self)
        super()._expect(more)


class SharedQueues:
    """The shared completion queues of one loop and device.

    Args:
        channel: Completion channel of the queues.

    Attributes:
        channel: Completion channel of the queues.
        queues: All of them.
        lock: Held while `left` of a queue changes.
    """

    def __init__(self, channel: CompletionChannel) -> None:
        self.channel: CompletionChannel = channel
        self.queues: list[SharedQueue] = []
        self._open: deque[SharedQueue] = deque()  # there may be room in these
        self._full: set[SharedQueue] = set()
        # The collector may destroy a queue pair in `take`.
        self.lock: threading.RLock = threading.RLock()

    @classmethod
    def of(
        cls, channel: CompletionChannel, *, quiet: bool
    ) -> tuple[SharedQueues, Callable[[], None]]:
        """Return the shared queues of the running loop and the channel's device, and their release.

        Args:
            channel: Completion channel of the queues.
            quiet: Whether the queues are armed for solicited completions only.
        """
        key = ("shared completions", id(channel.context), quiet)
        return registry.acquire(key, lambda: SharedQueues(channel))

    def take(self, completions: int, expected: int | None = None) -> CompletionQueue:
        """Return a queue with room for `completions`; the caller's queue pair reserves the room.

        Args:
            completions: Those that may arrive.
            expected: Those of them that are expected at first; None for all.

        Raises:
            OSError: The adapter cannot make a further queue.
        """
        expected = completions if expected is None else expected
        while self._open:
            cq = self._open[0]  # other threads put queues before it, and take none out
            if not cq.left and cq._make_room(completions, expected):
                return cq
            with self.lock:  # full, unless `has_room` is called meanwhile
                cq = self._open.popleft()
                self._full.add(cq)
            if cq.left:
                self.sweep(cq)
            if cq._make_room(completions, expected):
                self.has_room(cq)  # first in the line, to be filled before others
                return cq
        context = self.channel.context
        first = _IWARP_CQE if context.is_iwarp else _CQE
        # If a single connection asks for more than the device has, the device refuses the queue.
        room = max(min(first, context.attributes.max_cqe), completions)
        cq = SharedQueue(context, room, self.channel, self)
        self.queues.append(cq)
        self._open.append(cq)
        return cq

    def sweep(self, cq: SharedQueue) -> None:
        """Take all completions out of a queue, those of queue pairs that have gone among them."""
        left = cq.left  # others may go meanwhile, in another thread
        self.channel._sweep(cq)
        with self.lock:
            cq.left -= left
        CompletionQueue._unpromise(cq, 0, left)

    def has_room(self, cq: SharedQueue) -> None:
        """A queue pair of the queue has gone."""
        with self.lock:
            if cq in self._full:
                self._full.discard(cq)
                self._open.appendleft(cq)

    def close(self) -> None:
        """Close the queues: the last connection has released them."""
        queues, self.queues = self.queues, []
        for cq in queues:
            cq.shared = None
            cq.close()
