"""Safety: the poll of a channel's queues that finds completions whose event was lost.

The kernel drops a completion event when it has no memory for it.  While events come, the poll is
made here.  While none come, `SafetyPoll` polls the queues in C, at each alarm, and calls this class
only if it has found a completion.
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
from aiordma.verbs.attention import ARMED_FOR_ALL

if TYPE_CHECKING:
    from aiordma.verbs.comp_channel import CompletionChannel
    from aiordma.verbs.cq import CompletionQueue

__all__ = ["Safety", "address_of"]

_log = log_of()
#: Seconds between two safety polls: at least, and, because to wake an idle loop is dear, at most.
#: Two polls fit into the time that a listener gives a handshake.
_SAFETY_S, _IDLE_SAFETY_S = 1.0, 4.0
#: Seconds until a late event has come: a poll can find a completion before its event.
_GRACE_S = 0.02


def address_of(cq: CompletionQueue) -> int:
    """The address of the C object, for the drain."""
    return int(ffi.cast("uintptr_t", cq._handle))


class Safety:
    """The safety poll of a channel, which it does not keep alive.

    Args:
        channel: The channel.
    """

    __slots__ = ("__weakref__", "_alarm", "_channel", "_judging", "_pause_s", "_poll")

    def __init__(self, channel: CompletionChannel) -> None:
        self._channel = weakref.ref(channel)
        self._poll = SafetyPoll(channel.drain)
        self._alarm: Alarm | None = None
        self._pause_s = 0.0  # until the next poll
        self._judging: Timer | None = None
        fork.guard(self)

    def poison_after_fork(self) -> None:
        """In a forked child: read no descriptor that has the number of the alarm's."""
        self._poll.stop()

    def watch(self, cq: CompletionQueue) -> None:
        """Poll this queue, too, which is managed from now on.

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
        """A queue is closed.  In any thread."""
        self._poll.discard(address_of(cq))

    def poll_in(self, pause_s: float) -> None:
        """Poll in so many seconds, within the bounds."""
        self._pause_s = pause_s = max(_SAFETY_S, min(_IDLE_SAFETY_S, pause_s))
        self._poll.calm = pause_s >= _IDLE_SAFETY_S
        if self._alarm is not None:
            self._alarm.set(now() + pause_s, pause_s)

    def stop(self) -> None:
        """Poll no more, until the next `watch`.  In any thread."""
        self._poll.stop()
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.close()
        judging, self._judging = self._judging, None
        if judging is not None:
            judging.cancel()

    def _on_alarm(self) -> bool:
        channel = self._channel()
        if channel is not None:
            try:
                self._look(channel)
            except Exception as exc:  # it would end the alarm
                channel._report(exc)
        return False

    def _look(self, channel: CompletionChannel) -> None:
        swept = {token: (events, result) for token, events, result in self._poll.take()}
        if self._judging is not None:
            self._judging.run()
        managed = [cq for cq in channel._cqs.values() if cq.managed and not cq.closed]
        if not managed:
            self.stop()
            return
        # So that two events come in a pause, on average.
        self.poll_in(2 * self._pause_s / max(1, self._poll.new_events()))
        if (loop := channel._home) is not None:
            channel.drain.soon = resumes_tasks(loop)  # the program may switch the debug mode on
        # Under load an alarm is late, and so may events be.
        channel._kick()
        if channel._failure is not None:
            return
        drain = channel.drain
        spins = drain.poller is not None and drain.poller.asked
        found = []
        for cq in managed:
            events, first = swept.get(cq._token, (cq._aio.events, None))
            if first is None and (drain.n_pending or (spins and cq._aio.spins)):
                continue  # it is polled in another way
            polled, missed, dispatched = channel._sweep(cq, first)
            if polled:
                found.append((cq._token, events, missed))
            if missed or dispatched:
                self.poll_in(0.0)
        if found and self._alarm is not None and (loop := channel._home) is not None:
            self._judge_later(loop, found)

    def _judge_later(
        self, loop: asyncio.AbstractEventLoop, found: list[tuple[int, int, int]]
    ) -> None:
        method = weakref.WeakMethod(self._judge)

        def judge() -> None:
            if (function := method()) is not None:
                function(found)

        self._judging = call_later(loop, _GRACE_S, judge)

    def _judge(self, found: list[tuple[int, int, int]]) -> None:
        """Decide whether the event of completions that the safety poll has found is missing.

        Args:
            found: For each queue its token, the events that it had raised before, and the
                completions that should have raised another.
        """
        self._judging = None
        channel = self._channel()
        if channel is None or channel._failure is not None:
            return
        channel._kick()
        for token, events, missed in found:
            cq = channel._cqs.get(token)
            if cq is None or cq.closed or cq._aio.events != events:
                continue  # the event was only late
            if missed:
                channel._count_lost(missed)
                text = "%d completions raised no event and were found by polling"
                if cq._aio.solicited:
                    text += "; the peer may have sent without IBV_SEND_SOLICITED"
                _log.warning(text, missed)
            # If an event was lost, the queue is not armed any more.
            own = cq._aio
            own.armed = 0 if own.solicited else ARMED_FOR_ALL
            code = lib.ibv_req_notify_cq(cq._handle, own.solicited)
            if code:
                channel._report(os_error(code, "ibv_req_notify_cq"))
            channel._sweep(cq)
