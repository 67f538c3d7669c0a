"""The frames of requests, byte by byte; docs/requests.md has the same in tables.

A frame is a message without an immediate.  It consists of a header, and usually the body behind it.
A body that does not fit into a slot behind the header is sent as a message of its own, so that it
need not be copied; this message has the number of the request as its immediate.  If it is the body
of a request, a REQUEST frame with the time limit comes first; the body of an answer needs no frame.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from aiordma._core import Message, MessageState
from aiordma.arguments import bytes_of
from aiordma.error_words import CASE_HINTS
from aiordma.errors import (
    RequestDeadlineError,
    RequestError,
    RequestRefusedError,
    RequestUnknownError,
)
from aiordma.memory.governor import Lease

__all__ = [
    "ANSWER_BODY", "BODY_FOLLOWS", "GIVEN_UP", "HEADER_SIZE", "INITIAL_BYTES",
    "INITIAL_REQUESTS", "MAX_TEXT", "Carrier", "ErrorCode", "Frame", "Kind", "ViolationError",
    "ANSWER_HEAD", "STOPPED", "STOPPING", "STOPPING_NAME", "again", "body_of", "code_of",
    "error_frame", "error_of", "frame", "pack", "parse", "stopping_error",
]  # fmt: skip

MAGIC = 0xA5
VERSION = 1
#: Magic, version, kind, flags, number, argument.
_HEADER = struct.Struct("!BBBBIQ")
HEADER_SIZE = _HEADER.size
#: The same with the first four fields as one number, which is faster.
_SHORT = struct.Struct("!IIQ")
pack: Callable[[int, int, int], bytes] = _SHORT.pack
_unpack = _SHORT.unpack_from
#: Flag of REQUEST: the body follows, as a message with this number as its immediate.
BODY_FOLLOWS = 1
#: Flag of ERROR: the answer was abandoned while it was being sent.  If all of it has arrived
#: nevertheless, the answer counts, and the ERROR is ignored.
GIVEN_UP = 2
#: Bit of the immediate that says that a body belongs to an answer.
ANSWER_BODY = 1 << 31
#: How many requests, and bytes of requests, a side may have in progress before the first GRANT.
INITIAL_REQUESTS, INITIAL_BYTES = 16, 4 << 20
#: The largest size of the name and the text of an error, in bytes.
MAX_TEXT = 1024
#: The text for a request whose handler the server has canceled, because it is stopping.
STOPPED = "the server stopped while it served the request"
#: The name in an OVERLOADED frame that refuses a request because the server is stopping; no class
#: has it.  A peer that does not know it reads a refusal with `try_again`.
STOPPING_NAME = "stopping"
#: The text of such a refusal.
STOPPING = "the server is stopping"
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
    """The argument of an ERROR frame."""

    RAISED = 1
    REFUSED = 2
    OVERLOADED = 3
    DEADLINE = 4
    CANCELED = 5
    UNKNOWN = 6


def _head(kind: Kind, flags: int = 0) -> int:
    return MAGIC << 24 | VERSION << 16 | kind << 8 | flags


#: The first four fields, for `pack`; without flags.
ANSWER_HEAD = _head(Kind.ANSWER)
#: All valid combinations of the first four fields, each with its kind, its flags, and the size of
#: the largest message that may have it.
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
    ErrorCode.OVERLOADED: RequestRefusedError,
    ErrorCode.DEADLINE: RequestDeadlineError,
    ErrorCode.UNKNOWN: RequestUnknownError,
}
_CODES = {kind: code for code, kind in _CLASSES.items() if code != ErrorCode.OVERLOADED}


class ViolationError(Exception):
    """The peer has broken the format.

    Args:
        text: Says how.
        foreign: Whether it is no frame at all, as if the peer's program sends plain messages.
    """

    def __init__(self, text: str, *, foreign: bool = False) -> None:
        super().__init__(text)
        self.foreign = foreign


#: A header: its kind, flags, number and argument.
Frame = tuple[int, int, int, int]


class Carrier(Protocol):
    """What the requests need of their connection."""

    def _connection(self) -> Any:
        """The `Connection` of the program; None if it was garbage collected."""

    def _send_frame(self, data: Any, imm: int | None) -> Any:
        """Send a message, and wait in line for room; to be awaited.

        A frame that fits into a slot is sent completely or, after an exception, not at all.
        """

    @property
    def _frame_sender(self) -> Callable[[bytes, None], int]:
        """A function that sends a frame if there is room for it now.

        It returns 0 if the frame was sent, an errno if it could not be posted, and -1 if there is
        no room.
        """

    @property
    def _message_state(self) -> MessageState | None:
        """The connection in C, which makes calls and resumes them; None: Python does."""

    def _next_frame(self) -> Message | None:
        """The next message of the peer; None if `Exchange.read` is called when one has arrived.

        Raises:
            ConnectionEndedError, ConnectionLostError, ResourceClosedError: None will arrive.
        """

    def _require_size(self, size: int) -> None:
        """Raise MessageTooLargeError if the peer does not accept a message of this size."""

    def _break_requests(self, cause: BaseException) -> None:
        """End the connection for this cause."""

    def _frame_failed(self, code: int) -> None:
        """End the connection, because a frame could not be posted, with this errno."""

    @property
    def _frame_room(self) -> int:
        """The size in bytes of the largest message that fits into a slot."""

    @property
    def _request_timeout_s(self) -> float | None:
        """The time limit of a call for which the program sets none, in seconds; None for none."""

    @property
    def _request_lease(self) -> Lease | None:
        """An empty lease of the listener's budget for requests; None without a listener."""

    def is_closing(self) -> bool:
        """Whether the connection is being closed, or is closed or lost."""

    def _note_stopping(self) -> None:
        """Note that the peer serves no further request."""


def frame(kind: Kind, number: int, argument: int = 0, flags: int = 0) -> bytes:
    """The header of a frame."""
    return _HEADER.pack(MAGIC, VERSION, kind, flags, number, argument)


def body_of(name: str, buf: Any, room: int) -> tuple[Any, int]:
    """Return a body and its size.

    A body of at most `room` bytes is copied, because its frame may have to wait for room.

    Raises:
        TypeError, ValueError: As `bytes_of`.
    """
    if type(buf) is bytes:
        return buf, len(buf)
    with bytes_of(name, buf) as view:
        size = view.nbytes
        return (bytes(view) if size <= room else buf), size


def parse(message: Message) -> Frame:
    """Parse the header of a message.

    Raises:
        ViolationError: It is no valid header.
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
    """The code of the ERROR frame for an exception of a handler."""
    if isinstance(exc, RequestRefusedError) and exc.try_again:
        return ErrorCode.OVERLOADED
    for kind in type(exc).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return ErrorCode.RAISED


def error_frame(number: int, code: int, name: str, text: str, flags: int = 0) -> bytes:
    """An ERROR frame; the text is truncated if it is too long."""
    words = f"{name}\0{text}".encode(errors="replace")[:MAX_TEXT]
    return frame(Kind.ERROR, number, code, flags) + words


def error_of(code: int, words: bytes) -> RequestError:
    """The exception for an ERROR frame; RequestError itself for a code that is not known here."""
    name, _, text = words.decode(errors="replace").partition("\0")
    if code == ErrorCode.OVERLOADED and name == STOPPING_NAME:
        return stopping_error(text)
    kind = _CLASSES.get(code, RequestError)
    told: dict[str, str] = {"remote_type": name, "remote_text": text}
    if not text or (name and kind is RequestError):
        text = f"{name}: {text}" if name and text else name or text or f"error {code}"
    if kind is RequestDeadlineError:
        return kind(errno.ETIMEDOUT, text, **told)
    error = kind(text, **told)
    if code == ErrorCode.OVERLOADED and isinstance(error, RequestRefusedError):
        error.try_again, error.hint = True, CASE_HINTS["overloaded"]
    return error


def stopping_error(text: str) -> RequestRefusedError:
    """The exception for a request that no handler has begun with, as the peer is stopping."""
    error = RequestRefusedError(text, remote_text=text, try_again=True)
    error.hint, error._stopping = CASE_HINTS["stopping"], True
    return error


def again(exc: BaseException) -> Callable[[], BaseException]:
    """Return a function that makes copies of `exc`, one for each task that raises it."""
    # Not `exc` itself, whose traceback refers to the frames of tasks of the library.
    kind, args, hint, cause = type(exc), exc.args, vars(exc).get("hint"), exc.__cause__

    def make() -> BaseException:
        copy = kind(*args)
        if hint:
            copy.hint = hint  # type: ignore[attr-defined]
        copy.__cause__ = cause
        return copy

    return make
