"""Frames: 8 bytes of header, then a message in JSON or a piece of a file.

    2 bytes   b"cp"
    1 byte    version, 1
    1 byte    kind: 1 message, 2 data
    4 bytes   length of the rest, big-endian

A frame of the peer is checked before it is used: its kind, its length, and the fields of a message
and their types.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any

from aiordma.cli.foreign import parsed

__all__ = [
    "HEADER_SIZE",
    "MOST_DATA",
    "MOST_MESSAGE",
    "Done",
    "Failed",
    "FrameError",
    "FrameKind",
    "Get",
    "Message",
    "Put",
    "Ready",
    "Reason",
    "data_header",
    "pack",
    "parse",
    "parse_header",
]

_HEADER = struct.Struct(">2sBBI")
_MAGIC = b"cp"
_VERSION = 1
HEADER_SIZE = _HEADER.size
#: Bytes of a piece: as much as is read from the disk, or written to it, at a time.
MOST_DATA = 1 << 20
MOST_MESSAGE = 64 << 10
_DIGITS = frozenset("0123456789abcdef")
_SHA256_LENGTH = 64


class FrameError(ValueError):
    """The peer does not speak this protocol, or breaks it."""


class FrameKind(IntEnum):
    """The kind of a frame."""

    MESSAGE = 1
    DATA = 2


class Reason:
    """The reason of a failed transfer, for programs."""

    NAME = "name"
    NOT_FOUND = "not-found"
    READ_ONLY = "read-only"
    SYSTEM = "system"
    CHECKSUM = "checksum"
    PROTOCOL = "protocol"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Put:
    """The client wants to send a file of `size` bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Get:
    """A client's request for a file."""

    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The server's consent: `size` bytes follow, from the server or the client."""

    size: int


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a file: all pieces were sent, or have arrived and have the file's name."""

    sha256: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The reason why this side breaks off."""

    reason: str
    text: str


Message = Put | Get | Ready | Done | Failed
_MESSAGES: dict[str, type[Message]] = {
    "put": Put,
    "get": Get,
    "ready": Ready,
    "done": Done,
    "failed": Failed,
}
_WORDS = {kind: word for word, kind in _MESSAGES.items()}


def pack(message: Message) -> bytes:
    """The whole frame of a message.

    Raises:
        ValueError: It is longer than `MOST_MESSAGE` bytes.
    """
    body = json.dumps({"message": _WORDS[type(message)], **asdict(message)}).encode()
    if len(body) > MOST_MESSAGE:
        msg = f"a message of {len(body)} bytes is too long (at most {MOST_MESSAGE})"
        raise ValueError(msg)
    return _HEADER.pack(_MAGIC, _VERSION, FrameKind.MESSAGE, len(body)) + body


def data_header(length: int) -> bytes:
    """The header of a piece of `length` bytes."""
    return _HEADER.pack(_MAGIC, _VERSION, FrameKind.DATA, length)


def parse_header(header: bytes) -> tuple[FrameKind, int]:
    """The kind of a frame and the length of its rest.

    Raises:
        FrameError: It is not a frame, or is longer than agreed.
    """
    magic, version, kind, length = _HEADER.unpack(header)
    if magic != _MAGIC:
        msg = f"the peer does not speak the protocol of `aiordma cp`: {header!r}"
        raise FrameError(msg)
    if version != _VERSION:
        msg = f"the peer speaks version {version} of the protocol, this program version {_VERSION}"
        raise FrameError(msg)
    if kind == FrameKind.MESSAGE and length <= MOST_MESSAGE:
        return FrameKind.MESSAGE, length
    if kind == FrameKind.DATA and 0 < length <= MOST_DATA:
        return FrameKind.DATA, length
    msg = f"the peer sent a frame of kind {kind} with {length} bytes"
    raise FrameError(msg)


def parse(body: bytes) -> Message:
    """The message in a frame.

    Raises:
        FrameError: It is not a message of the protocol.
    """
    try:
        found = parsed(body)
    except ValueError:
        msg = f"the peer sent a message that is no JSON: {body[:80]!r}"
        raise FrameError(msg) from None
    word = found.pop("message", None) if isinstance(found, dict) else None
    kind = _MESSAGES.get(word) if isinstance(word, str) else None
    if kind is None or set(found) != {field.name for field in fields(kind)}:
        msg = f"the peer sent an unknown message: {body[:80]!r}"
        raise FrameError(msg)
    if not all(_is_right(name, value) for name, value in found.items()):
        msg = f"the peer sent a message with a wrong value: {body[:80]!r}"
        raise FrameError(msg)
    return kind(**found)


def _is_right(name: str, value: Any) -> bool:
    if name == "size":
        # bool is an int for isinstance.
        return type(value) is int and 0 <= value < 1 << 63
    if not isinstance(value, str):
        return False
    return name != "sha256" or (len(value) == _SHA256_LENGTH and _DIGITS.issuperset(value))
