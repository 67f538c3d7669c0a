"""Completions: delivers the completions of one queue pair, and decides which wake its loop.

A queue pair has one entry in the slot table of its completion channel, and the 16-bit sub-index of
a wr_id names the work request.  So a message needs neither a table entry nor a future.  C handles
the common completions; the owner of the entry gets the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.verbs.attention import expect, listen, unlisten
from aiordma.verbs.comp_channel import CompletionChannel, Sink
from aiordma.verbs.cq import CompletionQueue

if TYPE_CHECKING:
    from aiordma._core import MessageState, Spin, StreamState
    from aiordma.link.settings import Waiting

__all__ = ["Completions"]


def _processors() -> tuple[int, int]:
    """How many processors this process may use, and how many the machine has."""
    return len(os.sched_getaffinity(0)), os.cpu_count() or 1


class Completions:
    """The completions of one queue pair.

    Args:
        channel: The completion channel of the queue.
        cq: The completion queue, which may be shared.
        quiet: Whether the queue is armed for solicited completions only.
        unused: Whether the queue belongs to this queue pair alone, and nothing was posted yet.

    Attributes:
        id: The wr_id of the entry, with sub-index 0; 0 before `begin`.
        in_c: Whether C handles the common completions.
        over: Whether nothing is delivered any more.
    """

    __slots__ = (
        "_channel", "_listeners", "_quiet", "_spins", "_unused", "cq", "id", "in_c", "over",
    )  # fmt: skip

    over: bool
    in_c: bool

    def __init__(
        self,
        channel: CompletionChannel,
        cq: CompletionQueue,
        *,
        quiet: bool = False,
        unused: bool = False,
    ) -> None:
        self._channel = channel
        self._quiet = quiet
        self._unused = unused
        self._listeners = 0
        self._spins: tuple[Spin, ...] = ()
        self.cq: CompletionQueue = cq
        self.id: int = 0
        self.in_c = self.over = False

    def begin(self, sink: Sink) -> None:
        """Deliver completions to `sink` from now on."""
        self.id = self._channel.table.add(sink)
        self.cq.manage(solicited_only=self._quiet, unused=self._unused)

    def begin_anew(self, sink: Sink) -> None:
        """Discard completions of earlier requests, because the queue pair was reset."""
        self._channel.table.remove(self.id)
        self.id = self._channel.table.add(sink)

    def let_c_take(self, state: MessageState | StreamState, told: Callable[[int], object]) -> None:
        """Have C handle the common completions, and call `told` with the events of a drain."""
        self.in_c = True
        self._channel.drain.add(self.id, state, told)

    def spins(self, config: Waiting, count: int) -> tuple[Spin, ...]:
        """Return `count` Spins as the configuration requires, or none if no wait is to poll.

        On a machine with a single processor, no wait polls, because the peer could not run
        meanwhile.  If this process is confined to one processor of several, it may share that with
        others; then an adaptive wait does not poll, and a spin yields the processor.
        """
        if config.wait == "event":
            return ()
        own, all_of_them = _processors()
        adaptive = config.wait == "adaptive"
        if all_of_them > 1 and not (adaptive and own == 1):
            bound_s, yields = config.spin_us / 1e6, own == 1
            self._spins = tuple(
                self._channel._spin(self.cq, bound_s, adaptive=adaptive, yields=yields)
                for _ in range(count)
            )
        return self._spins

    def end(self) -> None:
        """Deliver nothing any more, because the queue pair is closed."""
        self.over = True
        for spin in self._spins:
            spin.close()
        if self.in_c:
            self.in_c = False
            self._channel.drain.remove(self.id)
        if self._listeners and self._quiet:
            unlisten(self.cq)
        if self.id:
            self._channel.table.remove(self.id)

    def sweep(self) -> None:
        """Poll the queue now, without an event."""
        self._channel._sweep(self.cq)

    def after_drain(self, function: Callable[[], None]) -> None:
        """Run `function` when all completions that were polled have been delivered."""
        self._channel.after_drain(function)

    # A quiet queue is armed for solicited completions, unless somebody listens for all.

    def listen(self) -> None:
        """Have completions of own requests wake the loop, until `unlisten` was called as often.

        Raises:
            OSError: The queue cannot be armed.
        """
        self._listeners += 1
        wanted = self._listeners == 1 and self._quiet and not self.over
        if wanted and listen(self.cq):
            self.sweep()

    def unlisten(self) -> None:
        """Undo one call of `listen`."""
        self._listeners -= 1
        if not self._listeners and self._quiet and not self.over:
            unlisten(self.cq)

    def expect(self, *, answers: bool) -> None:
        """Note whether completions are likely to follow one another, as with READs in a loop.

        While a program answers each completion with a request that completes at once, it is better
        to arm the queue late; see `drain_once` in _core/drain.c.  Each call with `answers=True` has
        to be followed by one with `answers=False`.
        """
        if self._quiet:
            expect(self.cq, 1 if answers else -1)
