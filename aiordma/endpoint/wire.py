"""The message protocol's bytes: the private data of the handshake, and the header of a frame.

This file does no input or output: it turns bytes into values and back.  docs/wire.md is the
specification, and the two have to be changed together.

The peer chooses everything that arrives here.  So any bytes result either in a value or in
`ProtocolError`, and a number of the peer never decides about an allocation before it was compared
with a limit of this side.
"""

from __future__ import annotations

import errno
import functools
import struct
from dataclasses import dataclass
from enum import IntEnum

from aiordma._core import FRAME_SIZE
from aiordma.errors import ProtocolError
from aiordma.link.refusal import HELLO_MAGIC, VERSION, begins_hello

__all__ = [
    "ASKS_CHECKSUMS", "CHECKSUM", "FRAME", "FRAME_SIZE", "HELLO_SIZE", "OWN_FLAGS",
    "KNOWS_CHECKSUMS", "KNOWS_LANDINGS", "MORE_FLAGS", "MOST_PIECES", "NOTE", "NUMBERS_MESSAGES",
    "PIECE", "RENDEZVOUS", "TAKES_BARE", "TAKES_FRAGMENTS", "TAKES_PIECES", "VERSION", "FrameKind",
    "Hello", "protocol_error",
]  # fmt: skip

MIN_VERSION = 1

# Magic, version, lowest version understood, flags, length of the program's private data, credits at
# the beginning, rendezvous window, slot size in bytes, largest message in KiB.
_HELLO = struct.Struct("!4sBBBBHHII")
HELLO_SIZE = _HELLO.size

# The flags of a hello: what its sender can do and wants.
#: It sends checksums of large messages to a peer that asks for them.
KNOWS_CHECKSUMS = 0x01
#: It asks for checksums of its peer's messages.
ASKS_CHECKSUMS = 0x02
#: It accepts messages that are sent through several slots.
TAKES_FRAGMENTS = 0x04
#: It accepts messages whose header is the adapter's immediate.
TAKES_BARE = 0x08
#: It offers landings, and writes messages to landings of its peer.
KNOWS_LANDINGS = 0x10
#: A byte of further flags lies behind the data; endpoint/keys.py has the only one.
MORE_FLAGS = 0x20
#: It accepts announcements of messages in several pieces of memory.
TAKES_PIECES = 0x40
#: It numbers its frames, if its peer does so, too.
NUMBERS_MESSAGES = 0x80
#: Those that this side always has; the others depend on its adapter and its settings.
OWN_FLAGS = KNOWS_CHECKSUMS | TAKES_FRAGMENTS | TAKES_PIECES | NUMBERS_MESSAGES
# Those that have a meaning; of a peer's, others are ignored.
_MEANT = OWN_FLAGS | ASKS_CHECKSUMS | TAKES_BARE | KNOWS_LANDINGS

# Kind and number, flags, credits, immediate, argument.  _core/connection.c reads and writes them.
FRAME = struct.Struct("!BBHIQ")
# The body of a RENDEZVOUS frame: address, key, number of the exchange.
RENDEZVOUS = struct.Struct("!QII")
# Then, if the receiver has asked for it, the CRC32C of the message.
CHECKSUM = struct.Struct("!I")
# Then, for each further piece of memory that the message is in, its address, size and key.
PIECE = struct.Struct("!QQI")
# The body of a NOTE frame: key of the memory that was written to, number of bytes.
NOTE = struct.Struct("!IQ")
#: The largest number of pieces of a message, including the first.
MOST_PIECES = 16


class FrameKind(IntEnum):
    """The kind of a frame; `FRAME_KINDS` in C has the same names."""

    CREDIT = 0
    DATA = 1
    RENDEZVOUS = 2
    DONE = 3
    PING = 4
    PONG = 5
    END = 6
    ABORT = 7
    NOTE = 8


class AbortReason(IntEnum):
    """Why a side aborts a connection: the argument of an ABORT frame."""

    PROGRAM = 0
    PROTOCOL = 1
    TIMEOUT = 2
    MEMORY = 3
    DAMAGED = 4
    MESSAGE = 5  # a plain message on a connection for requests
    REQUEST = 6  # a request on a connection for plain messages


def protocol_error(text: str) -> ProtocolError:
    """The error if bytes of the peer break the protocol."""
    return ProtocolError(errno.EPROTO, text)


@dataclass(frozen=True, slots=True)
class Hello:
    """What one side tells the other in the handshake; immutable.

    Attributes:
        recv_depth: The credits that its peer has at the beginning.
        rendezvous_window: How many large messages its peer may have in progress.
        slot_size: The size of its receive slots in bytes, header included.
        max_message_kib: The largest message that its peer may send, in KiB.
        user_data: The private data of its program.
        version: The version of the protocol, 1.
        min_version: The lowest version that it understands.
        flags: What it can do and wants, for example `TAKES_FRAGMENTS`.
    """

    recv_depth: int
    rendezvous_window: int
    slot_size: int
    max_message_kib: int
    user_data: bytes = b""
    version: int = VERSION
    min_version: int = MIN_VERSION
    flags: int = KNOWS_CHECKSUMS | TAKES_FRAGMENTS

    def pack(self, room: int) -> bytes:
        """Return it as private data of at most `room` bytes.

        Raises:
            ValueError: `user_data` does not fit.
        """
        space = room - HELLO_SIZE
        if len(self.user_data) > space:
            size = len(self.user_data)
            msg = f"private data of {size} bytes does not fit: there is room for {space}"
            raise ValueError(msg)
        header = _HELLO.pack(
            HELLO_MAGIC, self.version, self.min_version, self.flags, len(self.user_data),
            self.recv_depth, self.rendezvous_window, self.slot_size, self.max_message_kib,
        )  # fmt: skip
        return header + self.user_data

    @classmethod
    @functools.lru_cache(64)  # a Hello is immutable, and most peers of a program send the same
    def parse(cls, data: bytes) -> Hello | None:
        """Parse private data; None if they do not begin with the magic number.

        Raises:
            ProtocolError: They begin with the magic number, but are invalid, or there is no common
                version of the protocol.
        """
        if not begins_hello(data):
            return None
        if len(data) < HELLO_SIZE:
            raise protocol_error(f"handshake of {len(data)} bytes is too short")
        _, version, lowest, flags, length, depth, window, slot, kib = _HELLO.unpack_from(data)
        if lowest > VERSION or version < MIN_VERSION:
            raise protocol_error(
                f"the peer speaks versions {lowest} to {version} of the message protocol, "
                f"this side {MIN_VERSION} to {VERSION}"
            )
        user_data = data[HELLO_SIZE : HELLO_SIZE + length]
        if len(user_data) != length:
            raise protocol_error(f"handshake announces {length} bytes, has {len(user_data)}")
        if depth < 1 or window < 1 or slot < 2 * (FRAME_SIZE + RENDEZVOUS.size):
            raise protocol_error(f"handshake with depth {depth}, window {window}, slot {slot}")
        if kib < 1:
            raise protocol_error("handshake of a peer that takes no messages")
        return cls(
            depth, window, slot, kib, user_data, min(version, VERSION), lowest, flags & _MEANT
        )  # fmt: skip
