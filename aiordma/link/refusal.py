"""The private data of a refusal, and the bytes with which a request of messages begins.

A client of messages can meet a server of streams, and a client of streams a listener of messages:
both servers read these bytes.  docs/wire.md is the specification; this file and that page change
together.  Parsing is total: it returns a value, whatever the peer has sent.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "DENIALS",
    "HELLO_MAGIC",
    "VERSION",
    "RefusalReason",
    "asks_again",
    "begins_hello",
    "concerns_keys",
    "library_words",
    "names_the_kind",
    "parse_refusal",
    "refusal",
    "seal_refusal",
]

#: The newest version of the message protocol; a refusal names it, too.
VERSION = 1
#: The first bytes of the private data that a client of messages sends.
HELLO_MAGIC = b"aiRD"
REFUSAL_MAGIC = b"aiRJ"
_MAX_REFUSAL = 148
_END_MARK = b"\x80"


class RefusalReason(IntEnum):
    """Reasons for which a listener refuses by itself, without asking its program."""

    NOT_AIORDMA = 1
    VERSION = 2
    BUSY = 3
    TIMEOUT = 4
    RESOURCES = 5
    FULL = 6
    STREAMS = 7
    KEY_MISSING = 8
    KEY_UNKNOWN = 9
    NO_KEYS = 10
    DENIED = 11


#: Refusals of clients that may not connect; the others are for lack of room or time.
DENIALS = frozenset(
    (
        RefusalReason.KEY_MISSING,
        RefusalReason.KEY_UNKNOWN,
        RefusalReason.NO_KEYS,
        RefusalReason.DENIED,
    )
)

_REFUSAL_WORDS: dict[int, str] = {
    RefusalReason.NOT_AIORDMA: "the listener speaks aiordma's message protocol; "
    "for foreign peers use ConnectionConfig(raw=True) there",
    RefusalReason.VERSION: "no common version of the message protocol",
    RefusalReason.BUSY: "too many connections wait to be accepted; try again",
    RefusalReason.TIMEOUT: "the request was not answered in time",
    RefusalReason.RESOURCES: "the listener ran out of resources",
    RefusalReason.FULL: "the listener has as many connections as it allows, in total or from this "
    "address",
    RefusalReason.STREAMS: "it is a server of streams, and this is a client of messages: connect "
    "with aiordma.open_connection or create_connection, or serve with aiordma.listen there",
    RefusalReason.KEY_MISSING: "it accepts only clients that prove they have its key: connect with "
    "ConnectionConfig(keys=...)",
    RefusalReason.KEY_UNKNOWN: "it has no such key, or another one",
    RefusalReason.NO_KEYS: "it has no keys, and this client wants it to prove that it has one",
    RefusalReason.DENIED: "it does not let this client connect",
}


def begins_hello(data: bytes) -> bool:
    """Whether private data come from a client of messages."""
    return data[:4] == HELLO_MAGIC


def seal_refusal(user_data: bytes) -> bytes:
    """Return the private data that carry the program's bytes of a refusal to an aiordma peer.

    The field arrives padded with zeros and without its length.  So a mark, one byte 0x80, ends the
    data if there is room for it; 148 bytes fill the field by themselves.

    Raises:
        ValueError: More than 148 bytes, or 148 that look like a mark and padding.
    """
    if len(user_data) > _MAX_REFUSAL:
        msg = f"a refusal carries at most {_MAX_REFUSAL} bytes of private data"
        raise ValueError(msg)
    if len(user_data) < _MAX_REFUSAL:
        return user_data + _END_MARK
    if user_data.rstrip(b"\0").endswith(_END_MARK) or not user_data.rstrip(b"\0"):
        msg = "148 bytes that end in 0x80 and zeros, or are all zeros, cannot be told from padding"
        raise ValueError(msg)
    return user_data


def refusal(reason: RefusalReason) -> bytes:
    """Return the private data of a refusal by the library itself."""
    return REFUSAL_MAGIC + bytes((reason, VERSION))


def parse_refusal(data: bytes) -> tuple[bytes, str]:
    """Return the program's bytes and the library's words out of a refusal's private data."""
    stripped = data.rstrip(b"\0")
    if not stripped:
        return b"", ""
    if stripped.endswith(_END_MARK):
        return stripped[:-1], ""
    # The program's bytes end in the mark or fill the field, so these cannot be taken for them.
    words = library_words(stripped)
    return (b"", words) if words else (data, "")


def library_words(data: bytes) -> str:
    """Return the words for a refusal by the peer's library; empty if its program refused."""
    stripped = data.rstrip(b"\0")
    if stripped[:4] != REFUSAL_MAGIC or len(stripped) != len(REFUSAL_MAGIC) + 2:
        return ""
    return _REFUSAL_WORDS.get(stripped[4], f"refused for reason {stripped[4]}")


def names_the_kind(data: bytes) -> bool:
    """Whether a refusal's private data say that the client is no client of messages."""
    return data.rstrip(b"\0") == refusal(RefusalReason.NOT_AIORDMA)


def concerns_keys(data: bytes) -> bool:
    """Whether a refusal's private data say that the two sides do not have the same key."""
    reasons = RefusalReason.KEY_MISSING, RefusalReason.KEY_UNKNOWN, RefusalReason.NO_KEYS
    return data.rstrip(b"\0") in map(refusal, reasons)


def asks_again(data: bytes) -> bool:
    """Whether a refusal's private data ask the client to try again."""
    return data.rstrip(b"\0") == refusal(RefusalReason.BUSY)
