"""Outcome: whether a connection is over, why, and what its calls then raise.

Every wait of a connection asks this, and not the connection: what is made for the end is
held by all parts of it, and must not lead back to it.
"""

from __future__ import annotations

import errno

from aiordma.errors import ConnectionEndedError, ConnectionLostError, ResourceClosedError

__all__ = ["Outcome", "aborted_error", "closed_error", "ended_error", "vanished_error"]


def closed_error() -> ResourceClosedError:
    """This side has closed the connection; a new exception each time."""
    return ResourceClosedError(errno.ECONNABORTED, "the connection is closed")


def ended_error() -> ConnectionEndedError:
    """The peer has closed the connection in good order; a new exception each time."""
    return ConnectionEndedError("the peer closed the connection")


def aborted_error() -> ConnectionLostError:
    """The peer's program has aborted the connection, and its library said so."""
    error = ConnectionLostError(errno.ECONNRESET, "the peer aborted the connection")
    error.hint = "its program called abort(), or left `async with` with an exception: see its log"
    return error


def vanished_error() -> ConnectionLostError:
    """The peer has disconnected, and has said neither END nor why."""
    text = "the peer disconnected without a word: its process ended, or it found a fault"
    error = ConnectionLostError(errno.ECONNRESET, text)
    error.hint = "did the peer's process end, by a signal perhaps? see its log and its exit status"
    return error


class Outcome:
    """That of one connection.

    Attributes:
        closing: The program has closed it; what was sent may still be on its way.
        cause: Why no more messages come or go, or None while they do.  The first one counts.
    """

    __slots__ = ("cause", "closing")

    def __init__(self) -> None:
        self.closing = False
        self.cause: BaseException | None = None

    @property
    def decided(self) -> bool:
        """Whether the connection is closed, closing or lost."""
        return self.closing or self.cause is not None

    def failure(self) -> BaseException:
        """The exception for the next call; a new one each time, with the first cause."""
        cause = self.cause
        if cause is None or isinstance(cause, ResourceClosedError):
            return closed_error()
        if isinstance(cause, ConnectionLostError):
            again = type(cause)(*cause.args)
            again.hint = cause.hint
            again.__cause__ = cause.__cause__
            return again
        error = ConnectionLostError(errno.ECONNRESET, f"the connection is lost: {cause}")
        error.hint = getattr(cause, "hint", "") or error.hint
        error.__cause__ = cause
        return error

    def reason(self) -> BaseException | None:
        """The exception for the next call, or None while the connection is open."""
        return self.failure() if self.decided else None

    def require_open(self) -> None:
        """Raise it, unless the connection is open."""
        if self.decided:
            raise self.failure()
