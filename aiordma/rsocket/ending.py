"""How a connection ends: which of the two directions are open, and the words that close them.

Theory of operation
    A side that will send no more sends SHUTDOWN.  It sends DISCONNECT instead if its peer has sent
    SHUTDOWN before, or if it wants to receive no more either.  DISCONNECT is not answered.  Two
    SHUTDOWN that cross end the connection as well, without another word.

    A word of this side ends the connection only when its post has *completed*: data may be under
    way in front of it, and the caller destroys the queue pair once `disconnected` is set.  A
    DISCONNECT of the peer ends the connection at once: the peer reads no more.
"""

from __future__ import annotations

from aiordma.rsocket.wire import Control, Kind, pack_word

__all__ = ["Ending"]

_DISCONNECT = pack_word(Kind.CTRL, Control.DISCONNECT)
_SHUTDOWN = pack_word(Kind.CTRL, Control.SHUTDOWN)


class Ending:
    """The end of one connection.

    Attributes:
        writable: This side's direction is open.
        eof: The peer has sent SHUTDOWN or DISCONNECT, or the connection is over.
        wants_credit: The peer may still send, and this side still wants to receive.
        disconnected: The connection is over.
        pending: This side's word that waits to be posted.
    """

    __slots__ = (
        "_completed", "_said", "disconnected", "eof", "pending", "wants_credit", "writable",
    )  # fmt: skip

    def __init__(self) -> None:
        self.writable: bool = True
        self.eof: bool = False
        self.wants_credit: bool = True
        self.disconnected: bool = False
        self.pending: int | None = None
        self._said: int | None = None  # the SHUTDOWN or DISCONNECT that was posted last
        self._completed: int | None = None  # the last of them whose post has completed

    def shutdown(self) -> None:
        """Close this side's direction.  Idempotent."""
        if not self.writable:
            return
        self.writable = False
        if self.eof:
            self.disconnect()
        else:
            self.pending = _SHUTDOWN

    def disconnect(self) -> None:
        """Close both directions.  Idempotent."""
        self.writable = self.wants_credit = False
        # After a SHUTDOWN of both sides no further word is needed.
        if not self.disconnected and self._said != _DISCONNECT and not (self._said and self.eof):
            self.pending = _DISCONNECT

    def said(self) -> None:
        """Note that the word that waited is posted."""
        self._said, self.pending = self.pending, None

    def completed(self, word: int) -> None:
        """Note that the post of this word has completed."""
        if word in (_SHUTDOWN, _DISCONNECT):
            self._completed = word
            self._settle()

    def heard(self, value: int) -> None:
        """Take the value of a CTRL word of the peer.

        KEEPALIVE is ignored, and so is a number that a later version may give a meaning.
        """
        if value == Control.DISCONNECT:
            self.finish()
        elif value == Control.SHUTDOWN:
            self.eof = True
            self.wants_credit = False
            if self._said == _SHUTDOWN:
                self.pending = None  # the SHUTDOWN that was posted ends it for the peer
            elif self.pending == _SHUTDOWN:
                self.pending = _DISCONNECT
            self._settle()

    def finish(self) -> None:
        """Note the end: DISCONNECT has arrived here or at the peer, or the connection is lost."""
        self.disconnected = self.eof = True
        self.writable = self.wants_credit = False
        self.pending = None

    def _settle(self) -> None:
        if self._completed == _DISCONNECT or (self._completed == _SHUTDOWN and self.eof):
            self.finish()
