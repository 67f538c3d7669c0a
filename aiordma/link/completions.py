"""Completions: how the completions of one queue pair come, and which of them wake its loop.

One entry of the channel's slot table serves a queue pair, so that a message costs no table entry
and no future: the 16-bit sub-index of a wr_id names the request.  Once C has the state it takes
the frequent completions; the owner of the entry takes the others.
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
    from aiordma.link.config_check import Waiting

__all__ = ["Completions"]


def _processors() -> tuple[int, int]:
    """The processors on which this process may run, and those of the machine."""
    return len(os.sched_getaffinity(0)), os.cpu_count() or 1


class Completions:
    """The completions of one queue pair.

    Args:
        channel: Completion channel of the queue.
        cq: The queue, perhaps shared.
        quiet: Whether the queue is armed for solicited completions only.
        unused: Whether nothing was posted yet, and the queue is of this queue pair alone.

    Attributes:
        id: The wr_id of the entry, without a sub-index; 0 before `begin`.
        in_c: Whether C takes the frequent completions.
        over: Nothing is delivered any more, nor asked of the queue.
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
        """Have completions delivered to `sink` from now on."""
        self.id = self._channel.table.add(sink)
        self.cq.manage(solicited_only=self._quiet, unused=self._unused)

    def begin_anew(self, sink: Sink) -> None:
        """The queue pair was reset: its earlier completions belong to no request any more."""
        self._channel.table.remove(self.id)
        self.id = self._channel.table.add(sink)

    def let_c_take(self, state: MessageState | StreamState, told: Callable[[int], object]) -> None:
        """Have C take the frequent completions, and call `told` with the events of a drain."""
        self.in_c = True
        self._channel.drain.add(self.id, state, told)

    def spins(self, config: Waiting, count: int) -> tuple[Spin, ...]:
        """Return so many Spins, as the configuration asks for them; none if all waits are by event.

        While this process polls on the only processor of the machine, its peers cannot run: all
        waits are by event.  If the process is bound to a processor, others may share it: an
        adaptive wait is by event, and a spin yields the processor.
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
        """The queue pair is closed: nothing is delivered any more."""
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
        """Poll the queue now, without waiting for the descriptor."""
        self._channel._sweep(self.cq)

    def after_drain(self, function: Callable[[], None]) -> None:
        """Run `function` when the polled completions have been dispatched."""
        self._channel.after_drain(function)

    # Wake-ups: a quiet queue is armed for solicited completions

    def listen(self) -> None:
        """Have own requests wake the loop, too, until as many `unlisten`.

        Raises:
            OSError: The queue cannot be armed.
        """
        self._listeners += 1
        wanted = self._listeners == 1 and self._quiet and not self.over
        if wanted and listen(self.cq):
            self.sweep()

    def unlisten(self) -> None:
        """Undo one `listen`."""
        self._listeners -= 1
        if not self._listeners and self._quiet and not self.over:
            unlisten(self.cq)

    def expect(self, *, answers: bool) -> None:
        """Note whether most requests are answered at once, and an answer makes the program post.

        Then the queue is armed late; see `drain_once` in _core/drain.c.  A caller alternates
        between the two.
        """
        if self._quiet:
            expect(self.cq, 1 if answers else -1)
