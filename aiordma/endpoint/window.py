"""Window: how many receive slots a connection has.

Credits, and the frames that carry them to the peer, are the business of the protocol
(`_core/connection.c`).  This file has the policy: the window begins small, grows when the peer has
used up its credits, and shrinks when other connections of the pool wait for slots and this one has
more than its share.  A connection without a pool grows at once, so that the peer can send
`recv_depth` messages ahead.  A member of a pool grows when its program releases a message.

A free slot may be returned to the pool, instead of being posted again, only if the adapter still
has a receive for each credit of the peer.  This is always true for the slot of a data message,
because the message has used up a credit.  So the window shrinks by granting fewer new credits;
credits that the peer has are never taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiordma._core import FOR_PYTHON, MessageState
from aiordma.endpoint.config import (
    CONTROL_SLOTS,
    COPIED_BYTES,
    MIN_WINDOW,
    ConnectionConfig,
)
from aiordma.endpoint.link import Link, memory_log
from aiordma.memory.arena import Arena

__all__ = ["Window"]


class Window:
    """The receive slots of one connection."""

    __slots__ = ("_config", "_link", "_state")

    def __init__(self, link: Link, config: ConnectionConfig) -> None:
        self._link = link
        self._config = config
        self._state: MessageState = link.state

    @property
    def _recv(self) -> Arena:
        return self._link.slots.recv

    @property
    def size(self) -> int:
        """How many data messages there are slots for, without slots that are being returned."""
        return self._link.slots.counts[0] - self._state.control

    def back(self, slot: int) -> None:
        """Post a free slot that C has left to Python, or return it to the pool."""
        state = self._state
        if self._recv.leaving(slot) and state.owed >= 0:
            self._recv.hand_in(slot)
            self._link.fit()
        else:
            self._post((slot,))

    def take_announcements(self, announce: Callable[[int, bytes, int | None], None]) -> None:
        """Call `announce` for each new announcement of the peer, and post its slot again."""
        state = self._state
        while state.large and (large := state.next_large(self._config.receives)) is not None:
            length, imm, body, slot = large
            try:
                announce(length, body, imm)
            finally:
                code = state.repost_slot(slot)
                if code == FOR_PYTHON:
                    self.back(slot)
                else:
                    self._link.check(code)

    def adapt(self) -> None:
        """Grow or shrink the window, after the program has released a message.

        It does not shrink below twice the messages that the program keeps.
        """
        arena, state = self._recv, self._state
        if not state.unused:
            self.grow()
        elif (spare := arena.spare) and self.size - spare >= max(MIN_WINDOW, 2 * state.kept):
            # Post the free slots first.  Then every slot is posted or holds a message, and each
            # slot that `shrink` takes away is returned when its message is released.
            self._link.add_receives([])
            arena.shrink()
            self._fit()

    def _post(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        if slots:
            self._link.add_receives(slots)

    def grow(self) -> None:
        """Get more slots, if the peer has used up its credits."""
        if not self._state.unused and self.size < self._config.recv_depth:
            self._step(self.grow)

    def fit_fragments(self, size: int) -> None:
        """Get enough slots to receive messages of `size` bytes in fragments.

        The peer has just announced such a message, because there was not enough room.
        """
        if self._state.grows and size <= min(self._config.rendezvous_threshold, COPIED_BYTES):
            frames = -(-size // self._config.eager_size)
            while self.size < min(2 * frames, self._config.recv_depth) and self._step(self.grow):
                pass

    def expect(self, answers: int, again: Callable[[], None]) -> int:
        """Get receives for DONE frames, which answer large messages of this side.

        Args:
            answers: How many are needed.
            again: Called when another call may get more.

        Returns:
            How many there are.
        """
        lacking = answers - self.answers
        if lacking > 0:
            self._step(again, lacking)
        return self.answers

    @property
    def answers(self) -> int:
        """How many receives there are for DONE frames."""
        return self._state.control - CONTROL_SLOTS

    def _step(self, again: Callable[[], None], answers: int = 0) -> int:
        """Add and post some slots, up to `answers` of them for DONE frames; return how many."""
        arena = self._recv
        before = arena.count
        slots = list(arena.grow(again))
        if arena.count != before:
            # Slots beyond `recv_depth` are for DONE frames only.
            answers = max(answers, self.size - self._config.recv_depth)
            self._fit(min(answers, len(slots)), grown=True)
            self._link.note("has %d slots to receive", arena.count, log=memory_log)
        self._post(slots)
        return len(slots)

    def _fit(self, answers: int = 0, *, grown: bool = False) -> None:
        """Tell C the new number of slots and their keys; `answers` more are for DONE frames."""
        self._state.resize(self._link.slots.counts[0], answers, grown)
        self._recv.enough = min(
            self._config.receives, self._config.recv_depth + self._state.control
        )
        self._link.fit()
