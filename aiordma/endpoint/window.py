"""Window: receive slots out of a pool, which come and go.

Credits, and when the peer is told of them, are the protocol's (`_core/message.c`).  This is the
policy of a connection that shares slots with others: the window grows when the peer has used up its
credits, and shrinks when connections of the pool wait for slots and this connection has more than
its share.

A slot may leave, instead of being posted again, only if the adapter still has a receive for each
credit without it.  That is always the case for the slot of a data message: with the message a
credit has gone, too.  The window shrinks by credits that are not given back, never by taking any
away.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiordma._core import MessageState
from aiordma.endpoint.config import MIN_WINDOW
from aiordma.endpoint.link import Link

__all__ = ["Window"]


class Window:
    """The receive slots of one connection.

    Args:
        link: Has them.
    """

    __slots__ = ("_link", "_recv", "_state")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._recv = link.slots.recv
        self._state: MessageState = link.state

    @property
    def size(self) -> int:
        """Data messages for which there are slots; those that are leaving do not count."""
        return self._recv.count - self._state.control

    def back(self, slot: int) -> None:
        """A slot is free, and C has left it: to the adapter again, or out of service."""
        state = self._state
        if self._recv.leaving(slot) and state.posted >= state.unused + state.control:
            self._recv.hand_in(slot)
            self._link.fit()
        else:
            self._post((slot,))

    def adapt(self) -> None:
        """A message was released: fit the window to the needs of the peer and of the others.

        Messages that the program keeps take at most half of the window.
        """
        arena, state = self._recv, self._state
        if not state.unused:
            self._grow()
        elif (spare := arena.spare) and self.size - spare >= max(MIN_WINDOW, 2 * state.held):
            # Then all slots are posted, or hold messages: none is to be handed in yet.
            self._post(state.take_unposted())
            arena.shrink()
            self._fit()

    def _post(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        if slots:
            self._link.post_recv(slots)
            self._state.posted += len(slots)
            self._link.check(self._state.credit())

    def _grow(self) -> None:
        if self._state.unused:
            return
        arena = self._recv
        before = arena.count
        slots = list(arena.grow(self._grow))
        if arena.count != before:
            self._fit()
        self._post(slots)

    def _fit(self) -> None:
        """The number of slots has changed."""
        self._state.size(self.size)
        self._link.fit()
