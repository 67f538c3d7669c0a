"""Window: the receives that a peer may use, and the credits that say so.

Theory of operation
    At any time the adapter has a receive for every credit that the peer has, for every credit that
    it is owed, and for `control` messages without credit.  So what is owed need not be counted:
    it is what is posted beyond the other two.

    A slot of a pool may leave instead of being posted again.  It does so only if that sum still
    holds without it, which is always the case for the slot of a data message: with the message a
    credit has gone, too.  The window shrinks by credits that are not given back, never by taking
    any away.

    Credits that no message takes along go by themselves, in a CREDIT frame, once half of the window
    is owed.  Where that is one credit, as at the beginning of a pool's window, it would be a
    frame for each message: then it waits until the peer has none left, and the program has had
    the chance to answer: until it releases a message, or waits for the next.

    A CREDIT frame costs no credit, so the receives that it uses have to be counted: the peer keeps
    two.  One is known to be processed when the peer has spent a credit that came with it or after
    it; while two are not, a third has to wait, which does no harm, because a peer that has not
    processed them has credits to spend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiordma.endpoint.config import MIN_WINDOW
from aiordma.endpoint.link import Link
from aiordma.loop.empty import nobody

__all__ = ["Window"]

_CREDIT_FRAMES = 2


class Window:
    """The receiving side's account.

    Args:
        link: Has the receive slots.
        control: Receives for messages without credit.
        send_credit: Called when enough is owed for a CREDIT frame.
    """

    __slots__ = ("_c", "_control", "_link", "_marks", "_send_credit")

    def __init__(self, link: Link, control: int, send_credit: Callable[[], None]) -> None:
        self._link = link
        self._control = control
        self._send_credit = send_credit
        self._c = link.state
        # For each CREDIT frame that may be unprocessed: what was granted before it.
        self._marks: list[int] = []

    @property
    def posted(self) -> int:
        """Receives that the adapter has."""
        return int(self._c.posted)

    @posted.setter
    def posted(self, value: int) -> None:
        self._c.posted = value

    @property
    def unused(self) -> int:
        """Credits that the peer has."""
        return int(self._c.unused)

    @unused.setter
    def unused(self, value: int) -> None:
        self._c.unused = value

    @property
    def _granted(self) -> int:
        """Credits that the peer was given since the beginning."""
        return int(self._c.granted)

    @_granted.setter
    def _granted(self, value: int) -> None:
        self._c.granted = value

    @property
    def size(self) -> int:
        """Data messages for which there are slots; those that are leaving do not count."""
        return self._link.recv.count - self._control

    @property
    def owed(self) -> int:
        """Receives for data whose credit the peer does not have yet."""
        c = self._c
        owed = c.posted - self._control - c.unused
        return owed if owed > 0 else 0

    @property
    def due(self) -> bool:
        """Whether half of the window is owed, and a CREDIT frame may be sent."""
        half = (self.size + 1) // 2 or 1
        if self.owed < half or (half == 1 and self._c.unused > 0):
            return False
        self._forget_marks()
        return len(self._marks) < _CREDIT_FRAMES

    def spend(self) -> bool:
        """A message that costs a credit has come; False if the peer had none."""
        c = self._c
        if c.unused <= 0:
            return False
        c.unused -= 1
        return True

    def _forget_marks(self) -> None:
        """Forget the CREDIT frames that are known to be processed."""
        if marks := self._marks:
            spent = self._granted - self.unused
            while marks and spent > marks[0]:
                del marks[0]

    def take(self, most: int, *, alone: bool) -> int:
        """Credits for a frame that is about to be sent; `alone` for a CREDIT frame."""
        credits = min(self.owed, most)
        if credits:
            if alone:
                self._marks.append(self._granted)
            self._granted += credits
            self.unused += credits
        return credits

    # Slots

    def post(self, slots: Iterable[int]) -> None:
        """Give slots to the adapter."""
        slots = list(slots)
        self._link.post_recv(slots)
        self.posted += len(slots)
        self.credit()

    def part(self) -> None:
        """Nothing will be sent any more."""
        self._send_credit = nobody

    def credit(self) -> None:
        """Send a CREDIT frame if enough is owed."""
        c = self._c
        if c.n_back and self.owed + c.n_back >= c.due and not c.raw:
            self._post_back()  # they may be the last to come, and comes back here
        elif self.due:
            self._send_credit()

    def back(self, slot: int) -> None:
        """A slot is free: to the adapter again, or out of service."""
        if self._link.recv.leaving(slot) and self.posted >= self.unused + self._control:
            self._link.recv.hand_in(slot)
            self._link.fit()
        else:
            self.post((slot,))

    def adapt(self, held: int) -> None:
        """A message was released: fit the window to what the peer and the others need.

        Grows when the peer has used up its credits, and shrinks when connections of the pool wait
        for slots and this one has more than its share.

        Args:
            held: Slots that the program keeps; at most half of the window may be.
        """
        arena = self._link.recv
        if not self.unused:
            self._grow()
        elif (spare := arena.spare) and self.size - spare >= max(MIN_WINDOW, 2 * held):
            # Then all of its slots are posted, queued or kept: none is to be handed in yet.
            self._post_back()
            arena.shrink()
            self._fit()

    def _post_back(self) -> None:
        """Post the slots that C would post later, together with others."""
        if slots := self._c.take_freed():
            self.post(slots)

    def _grow(self) -> None:
        if self.unused:
            return
        arena = self._link.recv
        before = arena.count
        slots = list(arena.grow(self._grow))
        if arena.count != before:
            self._fit()
        if slots:
            self.post(slots)

    def _fit(self) -> None:
        """The number of slots has changed."""
        self._c.size(self.size)
        self._link.fit()
