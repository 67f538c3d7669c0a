"""How a connection ends: which of the two directions are open, and what is said about it.

Theory of operation
    A side that will send no more says SHUTDOWN, or DISCONNECT if the other has said SHUTDOWN
    before, or if it wants to receive no more either.  DISCONNECT is not answered.  Two SHUTDOWN
    that cross end the connection as well, without another word.

    A word of ours ends the connection only when it has *completed*: data may be under way in
    front of it, and the caller tears the queue pair down once `disconnected` is set.  A DISCONNECT
    of the peer does so at once: it reads no more, so there is nothing to wait for.
"""

from __future__ import annotations

from aiordma.rsocket.wire import Control, Kind, pack_word

__all__ = ["Ending"]

_DISCONNECT = pack_word(Kind.CTRL, Control.DISCONNECT)
_SHUTDOWN = pack_word(Kind.CTRL, Control.SHUTDOWN)


class Ending:
    """The end of one connection.

    Attributes:
        writable: Our direction is open.
        eof: The peer has said that it sends no more, or can say nothing any more.
        wants_credit: The peer may still send and we still want to receive.
        peer_left: The peer has said DISCONNECT.
        disconnected: The connection is over.
        pending: Our word that waits to be posted.
    """

    __slots__ = (
        "_completed", "_said", "disconnected", "eof", "peer_left", "pending", "wants_credit",
        "writable",
    )  # fmt: skip

    def __init__(self) -> None:
        self.writable = True
        self.eof = False
        self.wants_credit = True
        self.peer_left = False
        self.disconnected = False
        self.pending: int | None = None
        self._said: int | None = None  # our last word that was posted
        self._completed: int | None = None  # and that has completed

    def shutdown(self) -> None:
        """Close our direction; again does nothing."""
        if not self.writable:
            return
        self.writable = False
        if self.eof:
            self.disconnect()
        else:
            self.pending = _SHUTDOWN

    def disconnect(self) -> None:
        """Close both directions; again does nothing."""
        self.writable = self.wants_credit = False
        # Where both have said SHUTDOWN there is nothing to add.
        if not self.disconnected and self._said != _DISCONNECT and not (self._said and self.eof):
            self.pending = _DISCONNECT

    def say(self) -> int | None:
        """The word to post now, or None; from here on it counts as said."""
        word, self.pending = self.pending, None
        if word is not None:
            self._said = word
        return word

    def completed(self, word: int) -> None:
        """A post of a control message with this word has completed."""
        if word in (_SHUTDOWN, _DISCONNECT):
            self._completed = word
            self._settle()

    def heard(self, value: int) -> None:
        """The peer said so in a word of the kind CTRL.

        KEEPALIVE means nothing, and so does a number that a later version may give a meaning.
        """
        if value == Control.DISCONNECT:
            self.peer_left = True
            self.finish()
        elif value == Control.SHUTDOWN:
            self.eof = True
            self.wants_credit = False
            if self._said == _SHUTDOWN:
                self.pending = None  # the word that we said before ends it for the peer
            elif self.pending == _SHUTDOWN:
                self.pending = _DISCONNECT
            self._settle()

    def finish(self) -> None:
        """It is over: the last word has been heard or has arrived, or the connection is gone."""
        self.disconnected = self.eof = True
        self.writable = self.wants_credit = False
        self.pending = None

    def _settle(self) -> None:
        if self._completed == _DISCONNECT or (self._completed == _SHUTDOWN and self.eof):
            self.finish()
