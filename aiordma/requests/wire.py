"""The frames of requests, byte by byte; docs/requests.md has the same in tables.

A frame is a message without an immediate: a header, and mostly the body behind it.  A body that
does not fit into a slot beside the header is a message of its own, which is not copied for that,
and has the number as its immediate.  A request has its frame before it, with its time limit; an
answer needs none.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from aiordma._core import Message
from aiordma.arguments import bytes_of
from aiordma.errors import (
    RequestDeadlineError,
    RequestError,
    RequestOverloadedError,
    RequestRefusedError,
    RequestUnknownError,
)
from aiordma.requests.budget import Share

__all__ = [
    "ANSWER_BODY", "BODY_FOLLOWS", "GIVEN_UP", "HEADER_SIZE", "INITIAL_BYTES", "INITIAL_REQUESTS",
    "MAX_TEXT", "Carrier", "ErrorCode", "Frame", "Kind", "ViolationError", "body_of", "error_frame",
    "ANSWER_HEAD", "REQUEST_HEAD", "again", "code_of", "error_of", "frame", "microseconds", "pack",
    "parse",
]  # fmt: skip

MAGIC = 0xA5
VERSION = 1
#: Magic, version, kind, flags, number, argument.
_HEADER = struct.Struct("!BBBBIQ")
HEADER_SIZE = _HEADER.size
#: The same, with the first four fields as one: three numbers take less time than six.
_SHORT = struct.Struct("!IIQ")
pack: Callable[[int, int, int], bytes] = _SHORT.pack
_unpack = _SHORT.unpack_from
#: Flag of REQUEST: the body is the next message with this number as its immediate.
BODY_FOLLOWS = 1
#: Flag of ERROR: it may come behind the whole answer, which then holds.
GIVEN_UP = 2
#: Bit of the immediate of a body that is an answer.
ANSWER_BODY = 1 << 31
#: Requests, and bytes of them, that a side may have under way before the other has granted more.
INITIAL_REQUESTS, INITIAL_BYTES = 16, 4 << 20
#: Bytes of the name and the text of an error.
MAX_TEXT = 1024
_MOST_US = 1 << 62
_NO_REQUEST = (
    "a message that is no request: the peer's program sends messages to a connection that this "
    "side uses for requests"
)


class Kind(IntEnum):
    """Kinds of frames."""

    REQUEST = 1
    ANSWER = 2
    ERROR = 3
    CANCEL = 4
    GRANT = 5


class ErrorCode(IntEnum):
    """Argument of an ERROR frame."""

    RAISED = 1
    REFUSED = 2
    OVERLOADED = 3
    DEADLINE = 4
    CANCELED = 5
    UNKNOWN = 6


def _head(kind: Kind, flags: int = 0) -> int:
    return MAGIC << 24 | VERSION << 16 | kind << 8 | flags


#: For `pack`; without flags.
REQUEST_HEAD, ANSWER_HEAD = _head(Kind.REQUEST), _head(Kind.ANSWER)
#: Kind, flags, and bytes of the largest message, by the first four fields of each frame there is.
_FRAMES = {
    _head(kind, flags): (int(kind), flags, most)
    for kind, flags, most in (
        (Kind.REQUEST, 0, sys.maxsize),
        (Kind.REQUEST, BODY_FOLLOWS, HEADER_SIZE),
        (Kind.ANSWER, 0, sys.maxsize),
        (Kind.ERROR, 0, HEADER_SIZE + MAX_TEXT),
        (Kind.ERROR, GIVEN_UP, HEADER_SIZE + MAX_TEXT),
        (Kind.CANCEL, 0, HEADER_SIZE),
        (Kind.GRANT, 0, HEADER_SIZE),
    )
}
_KINDS = {int(kind) for kind in Kind}
_NONE = (0, 0, 0)
_CLASSES: dict[int, type[RequestError]] = {
    ErrorCode.REFUSED: RequestRefusedError,
    ErrorCode.OVERLOADED: RequestOverloadedError,
    ErrorCode.DEADLINE: RequestDeadlineError,
    ErrorCode.UNKNOWN: RequestUnknownError,
}
_CODES = {kind: code for code, kind in _CLASSES.items()}


class ViolationError(Exception):
    """The peer broke the format; the text says how.

    Args:
        text: How.
        foreign: Whether it is no frame at all: the peer's program sends messages.
    """

    def __init__(self, text: str, *, foreign: bool = False) -> None:
        super().__init__(text)
        self.foreign = foreign


#: A header: its kind, flags, number and argument.
Frame = tuple[int, int, int, int]


class Carrier(Protocol):
    """A connection, as its requests see it."""

    def _connection(self) -> Any:
        """The connection, as the program has it; None if it is gone."""

    def _send_frame(self, data: Any, imm: int | None) -> Any:
        """Send a message, in turn; awaited.  A frame that fits into a slot is sent, or not."""

    @property
    def _frame_sender(self) -> Callable[[bytes, None], int]:
        """A function that sends a frame if there is room at once: 0, an errno, or -1."""

    @property
    def _frame_reader(self) -> Callable[[], Any]:
        """A function whose result is awaited, for the next message of the peer."""

    def _require_size(self, size: int) -> None:
        """Raise MessageTooLargeError if the peer takes no message of this size."""

    def _break_requests(self, cause: BaseException) -> None:
        """End the connection for this cause."""

    def _frame_failed(self, code: int) -> None:
        """End the connection: a frame could not be posted, for this errno."""

    @property
    def _frame_room(self) -> int:
        """Bytes of a message that fits into a slot."""

    @property
    def _request_timeout_s(self) -> float | None:
        """Seconds that a call waits, if the program does not say; None for no limit."""

    @property
    def _request_share(self) -> Share | None:
        """The share of the budget of requests; None of a connection that no listener has."""

    def is_closing(self) -> bool:
        """Whether the connection is closed, closing or lost."""


def frame(kind: Kind, number: int, argument: int = 0, flags: int = 0) -> bytes:
    """The header of a frame."""
    return _HEADER.pack(MAGIC, VERSION, kind, flags, number, argument)


def body_of(name: str, buf: Any, room: int) -> tuple[Any, int]:
    """A body and its bytes; as it is now, if it fits into a slot: it may wait for room.

    Raises:
        TypeError, ValueError: As `bytes_of`.
    """
    if type(buf) is bytes:
        return buf, len(buf)
    with bytes_of(name, buf) as view:
        size = view.nbytes
        return (bytes(view) if size <= room else buf), size


def microseconds(seconds: float) -> int:
    """The argument of a REQUEST with so much time left; at least 1, as 0 is no limit."""
    return min(_MOST_US, max(1, int(min(seconds, 1e12) * 1e6)))


def parse(message: Message) -> Frame:
    """The header of a message.

    Raises:
        ViolationError: It is none.
    """
    size = len(message)
    if size < HEADER_SIZE:
        raise ViolationError(_NO_REQUEST, foreign=True)
    head, number, argument = _unpack(message)
    kind, flags, most = _FRAMES.get(head, _NONE)
    if size > most or number >= ANSWER_BODY:
        raise _violation(message)
    return kind, flags, number, argument


def _violation(message: Message) -> ViolationError:
    magic, version, kind, flags, number, _ = _HEADER.unpack_from(message)
    if magic != MAGIC:
        return ViolationError(_NO_REQUEST, foreign=True)
    if version != VERSION:
        return ViolationError(f"version {version} of requests, this side has {VERSION}")
    if kind not in _KINDS:
        return ViolationError(f"a frame of kind {kind}")
    name = Kind(kind).name
    if number >= ANSWER_BODY or _head(Kind(kind), flags) not in _FRAMES:
        return ViolationError(f"flags {flags:#x} and number {number} of a frame of kind {name}")
    return ViolationError(f"{len(message) - HEADER_SIZE} bytes behind a frame of kind {name}")


def code_of(exc: BaseException) -> int:
    """The code for an exception of a handler."""
    for kind in type(exc).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return ErrorCode.RAISED


def error_frame(number: int, code: int, name: str, text: str, flags: int = 0) -> bytes:
    """An ERROR; its text is cut to the bytes that there are."""
    words = f"{name}\0{text}".encode(errors="replace")[:MAX_TEXT]
    return frame(Kind.ERROR, number, code, flags) + words


def error_of(code: int, words: bytes) -> RequestError:
    """The exception for an ERROR; a code that is not known here becomes the general class."""
    name, _, text = words.decode(errors="replace").partition("\0")
    kind = _CLASSES.get(code, RequestError)
    told: dict[str, str] = {"remote_type": name, "remote_text": text}
    if not text or (name and kind is RequestError):
        text = f"{name}: {text}" if name and text else name or text or f"error {code}"
    if kind is RequestDeadlineError:
        return kind(errno.ETIMEDOUT, text, **told)
    return kind(text, **told)


def again(exc: BaseException) -> Callable[[], BaseException]:
    """A function that makes exceptions as `exc`: each task that waits needs its own."""
    # Not `exc` itself, whose traceback has the frames of the connection's own tasks.
    kind, args, hint, cause = type(exc), exc.args, vars(exc).get("hint"), exc.__cause__

    def make() -> BaseException:
        copy = kind(*args)
        if hint:
            copy.hint = hint  # type: ignore[attr-defined]
        copy.__cause__ = cause
        return copy

    return make
