"""An error in one line, for the user of a command."""

from __future__ import annotations

import re

from aiordma.errors import ConnectionRejectedError
from aiordma.link.refusal import RefusalReason, library_words, names_the_kind, refusal

__all__ = ["MESSAGES", "STREAMS", "is_full", "serves_streams", "words_of"]

# Instead of the library's words, which are for a program's author.
STREAMS = "a server of streams listens there, such as `aiordma serve`, not an `aiordma echo`"
MESSAGES = "a listener for messages is there, such as `aiordma echo`, not an `aiordma serve`"
_REFUSED_BY_STREAMS = library_words(refusal(RefusalReason.STREAMS))
_FULL = library_words(refusal(RefusalReason.FULL))


def serves_streams(exc: BaseException) -> bool:
    """Whether a client of messages was refused by a server of streams."""
    return isinstance(exc, ConnectionRejectedError) and exc.hint == _REFUSED_BY_STREAMS


def is_full(exc: BaseException) -> bool:
    """Whether a working listener has refused because it has all the connections that it takes."""
    return isinstance(exc, ConnectionRejectedError) and exc.hint == _FULL


def words_of(exc: BaseException) -> str:
    """The error in one line, with a hint if there is any."""
    if serves_streams(exc):
        return STREAMS
    if isinstance(exc, ConnectionRejectedError) and names_the_kind(exc.private_data):
        return MESSAGES
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}"
    return re.sub(r"^\[Errno -?\d+\] ", "", str(exc)) or type(exc).__name__
