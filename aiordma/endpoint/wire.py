"""The message layer's bytes: private data of the handshake, and the header of every message.

Sans-IO: bytes in, values out, no loop and no adapter.  docs/wire.md is the specification; this
file and that page change together.

Everything that arrives here was chosen by the peer.  Parsing is total: it returns a value or
raises `ProtocolError`, and no number from the peer decides an allocation before it was compared
with a limit of our own.
"""

from __future__ import annotations

import errno
import functools
import struct
from dataclasses import dataclass
from enum import IntEnum

from aiordma._core import (
    FRAME_ABORT,
    FRAME_CREDIT,
    FRAME_DATA,
    FRAME_DONE,
    FRAME_END,
    FRAME_PING,
    FRAME_PONG,
    FRAME_RENDEZVOUS,
    FRAME_SIZE,
)
from aiordma.errors import ProtocolError
from aiordma.link.refusal import HELLO_MAGIC, VERSION, begins_hello

__all__ = [
    "CHECKSUM",
    "FRAME",
    "FRAME_SIZE",
    "HELLO_SIZE",
    "LOOP_ID_SIZE",
    "MOST_PIECES",
    "PIECE",
    "RENDEZVOUS",
    "VERSION",
    "FrameKind",
    "Hello",
    "protocol_error",
]

MIN_VERSION = 1

# magic, version, lowest version understood, flags, length of the user's bytes, data receives
# posted, rendezvous window, slot size in bytes, largest message in KiB.
_HELLO = struct.Struct("!4sBBBBHHII")
HELLO_SIZE = _HELLO.size
_KNOWS_CHECKSUMS = 0x01
_ASKS_CHECKSUMS = 0x02
_TAKES_FRAGMENTS = 0x04
_TAKES_BARE = 0x08
_KNOWS_LANDINGS = 0x10
_NAMES_LOOP = 0x20
_TAKES_PIECES = 0x40
_NUMBERS_MESSAGES = 0x80
#: Bytes of the number of a loop, behind the user's bytes.
LOOP_ID_SIZE = 8

# kind and number, flags, credits returned, immediate, argument: _core/message.c does the work.
FRAME = struct.Struct("!BBHIQ")
# The body of a RENDEZVOUS frame: address, key, exchange number.
RENDEZVOUS = struct.Struct("!QII")
# And then, if the receiver has asked for it: CRC32C of the message.
CHECKSUM = struct.Struct("!I")
# And then, for each further piece of memory that the message is in: address, bytes, key.
PIECE = struct.Struct("!QQI")
#: Pieces of a message, the first included.
MOST_PIECES = 16


class FrameKind(IntEnum):
    """The kind of a message."""

    CREDIT = FRAME_CREDIT
    DATA = FRAME_DATA
    RENDEZVOUS = FRAME_RENDEZVOUS
    DONE = FRAME_DONE
    PING = FRAME_PING
    PONG = FRAME_PONG
    END = FRAME_END
    ABORT = FRAME_ABORT


class AbortReason(IntEnum):
    """The reason for which a side aborts a connection: the argument of ABORT."""

    PROGRAM = 0
    PROTOCOL = 1
    TIMEOUT = 2
    MEMORY = 3
    DAMAGED = 4
    MESSAGE = 5  # among requests
    REQUEST = 6  # among messages


def protocol_error(text: str) -> ProtocolError:
    """The error for bytes of the peer that break the protocol."""
    return ProtocolError(errno.EPROTO, text)


@dataclass(slots=True)
class Hello:
    """The numbers of one side, which its peer gets when they connect; not changed.

    Attributes:
        recv_depth: Data messages that the peer may send before it gets credits back.
        rendezvous_window: Large messages that it may have under way.
        slot_size: Bytes of a receive slot, header included.
        max_message_kib: Largest message it will be allowed to send, KiB.
        user_data: The program's own bytes.
        version: Version to speak: 1.
        knows_checksums: Whether it sends checksums of large messages to a peer that asks for them.
        asks_checksums: Whether it asks for checksums of the peer's messages.
        takes_fragments: Whether it takes messages that go through several slots.
        takes_bare: Whether it takes messages whose header is the adapter's immediate.
        knows_landings: Whether it offers landings, and writes messages to landings of the peer.
        loop_id: The random number of its event loop, 8 bytes; empty: it names none.
        takes_pieces: Whether it takes announcements of messages in several pieces of memory.
        numbers_messages: Whether it numbers its messages, to a peer that does so, too.
    """

    recv_depth: int
    rendezvous_window: int
    slot_size: int
    max_message_kib: int
    user_data: bytes = b""
    version: int = VERSION
    min_version: int = MIN_VERSION
    knows_checksums: bool = True
    asks_checksums: bool = False
    takes_fragments: bool = True
    takes_bare: bool = False
    knows_landings: bool = False
    loop_id: bytes = b""
    takes_pieces: bool = False
    numbers_messages: bool = False

    def pack(self, room: int) -> bytes:
        """As private data of at most `room` bytes.

        The number of the loop is left out if the user's bytes leave no room for it.

        Raises:
            ValueError: The user's bytes do not fit.
        """
        space = room - HELLO_SIZE
        if len(self.user_data) > space:
            msg = f"private data of {len(self.user_data)} bytes does not fit: {space} are left"
            raise ValueError(msg)
        loop_id = self.loop_id if len(self.user_data) + LOOP_ID_SIZE <= space else b""
        flags = (
            _KNOWS_CHECKSUMS * self.knows_checksums
            | _ASKS_CHECKSUMS * self.asks_checksums
            | _TAKES_FRAGMENTS * self.takes_fragments
            | _TAKES_BARE * self.takes_bare
            | _KNOWS_LANDINGS * self.knows_landings
            | _NAMES_LOOP * bool(loop_id)
            | _TAKES_PIECES * self.takes_pieces
            | _NUMBERS_MESSAGES * self.numbers_messages
        )
        header = _HELLO.pack(
            HELLO_MAGIC, self.version, self.min_version, flags, len(self.user_data),
            self.recv_depth, self.rendezvous_window, self.slot_size, self.max_message_kib,
        )  # fmt: skip
        return header + self.user_data + loop_id

    @classmethod
    @functools.lru_cache(64)  # a Hello never changes, and the peers of a program are mostly alike
    def parse(cls, data: bytes) -> Hello | None:
        """From private data; None if it does not begin with our magic number.

        Raises:
            ProtocolError: The magic is ours but the rest makes no sense or no common version.
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
        end = HELLO_SIZE + length
        user_data, loop_id = data[HELLO_SIZE:end], b""
        if flags & _NAMES_LOOP:
            loop_id = data[end : end + LOOP_ID_SIZE]
            length += LOOP_ID_SIZE
        if (had := len(user_data) + len(loop_id)) != length:
            raise protocol_error(f"handshake announces {length} bytes, has {had}")
        if depth < 1 or window < 1 or slot < 2 * (FRAME_SIZE + RENDEZVOUS.size):
            raise protocol_error(f"handshake with depth {depth}, window {window}, slot {slot}")
        if kib < 1:
            raise protocol_error("handshake of a peer that takes no messages")
        return cls(
            depth, window, slot, kib, user_data, min(version, VERSION), lowest,
            bool(flags & _KNOWS_CHECKSUMS), bool(flags & _ASKS_CHECKSUMS),
            bool(flags & _TAKES_FRAGMENTS), bool(flags & _TAKES_BARE),
            bool(flags & _KNOWS_LANDINGS), loop_id, bool(flags & _TAKES_PIECES),
            bool(flags & _NUMBERS_MESSAGES),
        )  # fmt: skip
