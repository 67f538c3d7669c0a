"""Pacing: how many connects to one address are under way at a time.

Theory of operation
    Connects that begin all at once end all at once: each step of each connect waits for the same
    step of all others, requests overflow the queues of the peer's kernel, which asks again after
    seconds, and on a busy machine all of them miss their deadlines together.  So the connects of a
    loop to an address take turns, a few at a time: the first are made before the last begin.

    A peer may make connects wait for each other, or be dead: if none ends for a while, more begin.

    A connect that waits for its turn has sent no request to its peer, so this time does not count
    against its limit.  The wait is bounded all the same: the connects before it have limits, and
    begin in ever larger numbers while none of them ends.

    A listener whose backlog is full refuses.  `paced` tries again, after a longer pause each time,
    until the caller's deadline.  `Course` notes the refusals, for the error at the deadline.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiordma.cm.address import Address
from aiordma.errors import ConnectionRejectedError
from aiordma.link.tally import count
from aiordma.loop import registry
from aiordma.loop.limit import Limit
from aiordma.loop.wait_line import WaitLine

__all__ = ["Course", "paced"]

T = TypeVar("T")
AT_A_TIME = 8
STALLED_S = 2.0  # if no connect ends for so long, twice as many may be under way
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class Course:
    """The progress of the connects of one call.

    Args:
        limit: Limit of the call; it stands still while a connect waits for its turn.

    Attributes:
        ready: Whether this machine's libraries are loaded, and its devices known.
        asked: Whether a request has gone to the peer.
        waiting: Connects that were under way when this call's connect began to wait for its turn;
            0 if it does not wait.
        refusal: The last refusal that asked to be tried again.
        refusals: Number of such refusals.
    """

    __slots__ = ("_answers", "_pace", "asked", "limit", "ready", "refusal", "refusals", "waiting")

    def __init__(self, limit: Limit) -> None:
        self.limit: Limit = limit
        self.ready: bool = False
        self.asked: bool = False
        self.waiting: int = 0
        self.refusal: ConnectionRejectedError | None = None
        self.refusals: int = 0
        self._pace: _Pace | None = None
        self._answers = 0

    @property
    def heard(self) -> bool:
        """Whether the peer has answered another connect of this loop meanwhile."""
        return self._pace is not None and self._pace.answers > self._answers


class _Pace:
    """The connects of a loop to one address."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = AT_A_TIME
        self._timer: asyncio.TimerHandle | None = None
        self._line: WaitLine[None] = WaitLine()
        self.under_way = 0
        self.answers = 0

    def enter(self) -> Coroutine[Any, Any, None] | None:
        """Take a turn, or return what waits for one.  Cancellation: ends the wait."""
        if self.under_way < self._room:
            self.under_way += 1
            return None
        turn = self._line.wait(lambda _: self.leave())
        self._watch()
        return turn

    def leave(self) -> None:
        """End a turn: its connect is over."""
        self.under_way -= 1
        self._room = AT_A_TIME
        self._admit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watch()

    def _admit(self) -> None:
        while self.under_way < self._room and self._line.grant(None):
            self.under_way += 1

    def _watch(self) -> None:
        if self._line.places and self._timer is None:
            self._timer = self._loop.call_later(STALLED_S, self._stalled)

    def _stalled(self) -> None:
        self._timer = None
        self._room = 2 * self.under_way
        self._admit()
        self._watch()

    def close(self) -> None:
        """Cancel the timer; no connect is under way."""
        if self._timer is not None:
            self._timer.cancel()


async def paced(
    address: Address, attempt: Callable[[], Coroutine[Any, Any, T]], course: Course
) -> T:
    """Await `attempt()` in its turn, and again after each refusal with `try_again`.

    There is no bound but the caller's.

    Args:
        address: The peer's address and port.
        attempt: Connects; closes its resources if it fails or is canceled.
        course: Notes the progress.

    Raises: as `attempt`.

    Cancellation: the attempt is canceled, and has closed its resources.
    """
    loop = asyncio.get_running_loop()
    pace, release = registry.acquire(("pace", address), functools.partial(_Pace, loop), loop)
    pause = FIRST_PAUSE_S
    course._pace, course._answers = pace, pace.answers
    try:
        while True:
            turn = pace.enter()
            if turn is not None:
                course.waiting = pace.under_way
                course.limit.pause()
                try:
                    await turn
                finally:
                    course.limit.resume()
                course.waiting = 0
            try:
                connection = await attempt()
            except ConnectionRejectedError as exc:
                pace.answers += 1
                if not exc.try_again:
                    raise
                course.refusals += 1
                count("connect_retried")
                course.refusal = exc
            else:
                pace.answers += 1
                return connection
            finally:
                pace.leave()
            # Connects that were refused together do not come back together.
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, LONGEST_PAUSE_S)
    finally:
        release()
