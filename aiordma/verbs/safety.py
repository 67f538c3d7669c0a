"""The safety poll: finds completions whose event the kernel has dropped.

The kernel drops a completion event when it has no memory for it, and the completion would then wait
for the next event.  So each completion channel has a timer that polls its queues now and then.
While events arrive, this class does the polling.  On an idle channel `SafetyPoll` does it in C, and
calls this class only when it has found a completion.

A completion that was found by polling does not prove that its event was lost: the event may only be
late.  So the channel gets a moment to deliver it, and only then is the event counted as lost.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from aiordma._core import SafetyPoll
from aiordma._ffi import ffi, lib
from aiordma.errors import os_error
from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.running import resumes_tasks
from aiordma.loop.timers import Alarm, Timer, call_later, now
from aiordma.loop.weak import living

if TYPE_CHECKING:
    from aiordma.verbs.comp_channel import CompletionChannel, Swept
    from aiordma.verbs.cq import CompletionQueue

__all__ = ["Safety", "address_of"]

_log = log_of()
#: The shortest and the longest time between two polls, in seconds.  An idle loop is polled rarely,
#: because waking it is expensive; but two polls have to fit into the time that a listener allows
#: for a handshake.
_SAFETY_S, _IDLE_SAFETY_S = 1.0, 4.0
#: How long to wait, in seconds, for the event of a completion that a poll has found first.
_GRACE_S = 0.02


def address_of(cq: CompletionQueue) -> int:
    """The address of a queue's `struct ibv_cq`, which is how the drain names the queue."""
    return int(ffi.cast("uintptr_t", cq._handle))


class Safety:
    """The safety poll of one completion channel.

    Args:
        channel: The channel.  It owns this object, which does not keep it alive.
    """

    __slots__ = ("__weakref__", "_alarm", "_channel", "_pause_s", "_poll", "_verification")

    def __init__(self, channel: CompletionChannel) -> None:
        self._channel = weakref.ref(channel)
        self._poll = SafetyPoll(channel.drain)
        self._alarm: Alarm | None = None
        self._pause_s = 0.0  # until the next poll
        self._verification: Timer | None = None
        fork.guard(self)

    def poison_after_fork(self) -> None:
        """Stop in a forked child, where another file may have the descriptor of the alarm."""
        self._poll.stop()

    def watch(self, cq: CompletionQueue) -> None:
        """Poll this queue as well, because the event loop serves it from now on.

        Raises:
            OSError: The limit of open files is reached.
        """
        channel = cq.channel
        assert channel is not None
        loop = channel._home
        if self._alarm is None and loop is not None:
            self._alarm = Alarm(loop, self._on_alarm, channel._report, self._poll.by)
            self.poll_in(_SAFETY_S)
        self._poll.add(address_of(cq))

    def forget(self, cq: CompletionQueue) -> None:
        """Do not poll a queue any more: it is being closed.  May be called in any thread."""
        self._poll.discard(address_of(cq))

    def poll_in(self, pause_s: float) -> None:
        """Poll after `pause_s` seconds, or the nearest time within the bounds."""
        self._pause_s = pause_s = max(_SAFETY_S, min(_IDLE_SAFETY_S, pause_s))
        self._poll.expect_calm(pause_s >= _IDLE_SAFETY_S)
        if self._alarm is not None:
            self._alarm.set(now() + pause_s, pause_s)

    def stop(self) -> None:
        """Stop polling until the next `watch`.  May be called in any thread."""
        self._poll.stop()
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.close()
        verification, self._verification = self._verification, None
        if verification is not None:
            verification.cancel()

    def _on_alarm(self) -> bool:
        channel = self._channel()
        if channel is not None:
            try:
                self._poll_channel(channel)
            except Exception as exc:  # an exception that left this method would end the alarm
                channel._report(exc)
        return False

    def _poll_channel(self, channel: CompletionChannel) -> None:
        swept = {token: (events, result) for token, events, result in self._poll.take()}
        managed = [cq for cq in living(channel._cqs.valuerefs()) if cq.managed and not cq.closed]
        if not managed:
            self.stop()
            return
        # Aim at two events between two polls, on average.
        self.poll_in(2 * self._pause_s / max(1, self._poll.new_events()))
        if (loop := channel._home) is not None:
            # The program may have switched the loop's debug mode since the last poll.
            channel.drain.resume_by_loop(resumes_tasks(loop))
        found: list[tuple[int, int, int]] = []
        # Completions that C has polled come first: those that are still in a queue are younger.
        for cq in managed:
            if cq._token in swept:
                self._sweep(found, cq, *swept[cq._token])
        if self._verification is not None:
            self._verification.run()
        # Under load this alarm is late, and events may be waiting in the descriptor.  Take them
        # first: their completions are not to be mistaken for completions without an event.
        channel._kick()
        if channel._failure is not None:
            return
        drain = channel.drain
        spins = drain.poller is not None and drain.poller.asked
        for cq in managed:
            if cq._token in swept or drain.n_pending or (spins and cq._aio.spins):
                continue  # the drain or a Poller polls it
            self._sweep(found, cq, cq._aio.events)
        if found and self._alarm is not None and (loop := channel._home) is not None:
            self._verify_later(loop, found)

    def _sweep(
        self,
        found: list[tuple[int, int, int]],
        cq: CompletionQueue,
        events: int,
        first: Swept | None = None,
    ) -> None:
        """Poll a queue until it is empty, and add an entry to `found` if it had completions."""
        channel = self._channel()
        assert channel is not None
        polled, missed, dispatched = channel._sweep(cq, first)
        if polled:
            found.append((cq._token, events, missed))
        if missed or dispatched:
            self.poll_in(0.0)

    def _verify_later(
        self, loop: asyncio.AbstractEventLoop, found: list[tuple[int, int, int]]
    ) -> None:
        method = weakref.WeakMethod(self._count_lost_events)

        def verify() -> None:
            if (function := method()) is not None:
                function(found)

        self._verification = call_later(loop, _GRACE_S, verify)

    def _count_lost_events(self, found: list[tuple[int, int, int]]) -> None:
        """Count completions of a poll whose event has still not arrived, and arm their queues.

        Args:
            found: For each queue, its token, the number of events that it had raised before the
                poll, and the number of completions that should have raised another event.
        """
        self._verification = None
        channel = self._channel()
        if channel is None or channel._failure is not None:
            return
        channel._kick()
        for token, events, missed in found:
            cq = channel._cqs.get(token)
            if cq is None or cq.closed or cq._aio.events != events:
                continue  # the event has arrived; it was only late
            if missed:
                channel._count_lost(missed)
                text = "%d completions raised no event and were found by polling"
                if cq._aio.solicited:
                    text += "; the peer may have sent without IBV_SEND_SOLICITED"
                _log.warning(text, missed)
            # Arming lasts for one event.  If that event was lost, the queue is not armed any more.
            own = cq._aio
            own.note_arming(not own.solicited)
            code = lib.ibv_req_notify_cq(cq._handle, own.solicited)
            if code:
                channel._report(os_error(code, "ibv_req_notify_cq"))
            channel._sweep(cq)
