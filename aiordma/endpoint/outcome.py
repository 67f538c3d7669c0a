"""Outcome: whether a connection is over, why, and which exceptions its calls then raise.

The parts of a connection ask the Outcome and not the connection, because they can outlive it, and a
reference to the connection would keep it alive.
"""

from __future__ import annotations

import errno

from aiordma.endpoint.wire import AbortReason, protocol_error
from aiordma.errors import (
    ConnectionEndedError,
    ConnectionLostError,
    ProtocolError,
    RdmaTimeoutError,
    ResourceClosedError,
    lost_error,
)

__all__ = [
    "Outcome",
    "abort_reason",
    "aborted_error",
    "closed_error",
    "ended_error",
    "eof_error",
    "left_error",
    "reserved_error",
    "unserved_error",
    "vanished_error",
    "violation",
]

_SAID = "the peer ended the connection"
_TURN_HINT = "the adapter or its driver is broken, or a child of `fork()` used its queue"
_LEFT_HINT = (
    "the peer closed in good order: nothing more can be sent to it; recv() still returns what it "
    "had sent"
)
# For each reason of an ABORT of the peer, the text of the error, and a hint.
_ABORTS = {
    AbortReason.PROGRAM: (
        "the peer aborted the connection",
        "its program called abort(), or left `async with` with an exception: see its log",
    ),
    AbortReason.PROTOCOL: (
        f"{_SAID}: it says that this side broke the protocol",
        "the peer's log has what it found; do both sides run compatible versions of aiordma?",
    ),
    AbortReason.TIMEOUT: (
        f"{_SAID}: it waited too long for this side",
        "is this side's event loop blocked? See the peer's idle_timeout_s",
    ),
    AbortReason.MEMORY: (f"{_SAID}: it ran out of memory", "see the peer's log"),
    AbortReason.DAMAGED: (
        f"{_SAID}: a large message of this side arrived damaged",
        "does the network reorder packets (docs/surprises.md), or does this program change the "
        "buffer of a message before `send()` has returned?",
    ),
    AbortReason.MESSAGE: (
        f"{_SAID}: it takes requests there, and this side sent a message",
        "use `Connection.request()` (docs/requests.md), or connect to another port",
    ),
    AbortReason.REQUEST: (
        f"{_SAID}: it receives messages there, and this side uses requests",
        "have the peer's program serve requests, by `serve_requests` instead of `serve` or by "
        "`Connection.requests()` (docs/requests.md); or use `send()` and `recv()`",
    ),
}


#: Reasons for which both sides raise a ProtocolError.
_BROKEN = (AbortReason.PROTOCOL, AbortReason.MESSAGE, AbortReason.REQUEST)


def closed_error() -> ResourceClosedError:
    """The error of a connection that this side has closed; a new exception each time."""
    return ResourceClosedError(errno.ECONNABORTED, "the connection is closed")


def reserved_error(call: str) -> RuntimeError:
    """The error of `call`, which is for messages, on a connection that carries requests."""
    return RuntimeError(
        f"the connection carries requests since its first request() or requests(): {call} would "
        "take or send messages among them; use a second connection for messages"
    )


def unserved_error() -> ProtocolError:
    """The error if the peer's program sends requests and this side's receives messages."""
    text = "the peer uses requests on the connection, and this side's program receives messages"
    error = protocol_error(text)
    error.hint = (
        "serve requests by `serve_requests` instead of `serve`, or by `Connection.requests()`; "
        "or ask by `Connection.request()` (docs/requests.md)"
    )
    error._unserved = True
    return error


def eof_error() -> ResourceClosedError:
    """The error of a send after `send_eof()`; a new exception each time."""
    error = ResourceClosedError(errno.ESHUTDOWN, "send_eof() was called: nothing more can be sent")
    error.hint = "send everything before send_eof(); messages of the peer are still received"
    return error


def ended_error(answered: int = 0) -> ConnectionEndedError:
    """The error of `recv` when the peer has closed in good order; a new exception each time.

    Args:
        answered: The argument of its END.
    """
    error = ConnectionEndedError("the peer closed the connection")
    error._answered = bool(answered & 1)
    return error


def _lost(text: str, hint: str, *, protocol: bool = False) -> ConnectionLostError:
    kind, code = ConnectionLostError, errno.ECONNRESET
    if protocol:
        kind, code = ProtocolError, errno.EPROTO
    error = kind(code, text)
    error.hint = hint
    return error


def left_error() -> ConnectionLostError:
    """The error of all calls but `recv` when the peer has closed in good order.

    It is a ConnectionLostError, because the peer's close is not expected by a program that sends.
    """
    return _lost("the peer closed the connection", _LEFT_HINT)


def abort_reason(cause: BaseException) -> AbortReason | None:
    """The reason to send with ABORT; None if the cause neither needs nor allows an ABORT."""
    if isinstance(cause, ProtocolError):
        if cause._unserved:
            return AbortReason.REQUEST
        return AbortReason.MESSAGE if cause._foreign else AbortReason.PROTOCOL
    lost = cause.errno if isinstance(cause, ConnectionLostError) else None
    if lost == errno.EBADMSG:
        return AbortReason.DAMAGED
    if isinstance(cause, MemoryError) or getattr(cause, "_unpinned", False):
        return AbortReason.MEMORY
    if lost == errno.ETIMEDOUT or isinstance(cause, TimeoutError):
        return AbortReason.TIMEOUT
    return None


def _raised(words: bytes) -> str:
    """How the peer's program ended, if these bytes name the class of its exception."""
    name = words.decode(errors="ignore")
    if not name.isidentifier():  # the peer can send anything
        return ""
    return (
        ": its program was canceled" if name == "CancelledError" else f": its program raised {name}"
    )


def aborted_error(reason: int = AbortReason.PROGRAM, words: bytes = b"") -> ConnectionLostError:
    """The error of a connection that the peer has aborted.

    Args:
        reason: An `AbortReason`, or the number of a reason that is not known here.
        words: What the peer has sent behind it.
    """
    text, hint = _ABORTS.get(
        reason,  # type: ignore[call-overload]
        (f"{_SAID} for reason {reason}, which this version does not know", "see the peer's log"),
    )
    if reason == AbortReason.PROGRAM and (raised := _raised(words)):
        text, hint = text + raised, "its log, or its standard error, has the traceback"
    return _lost(text, hint, protocol=reason in _BROKEN)


def stalled_error(seconds: float) -> RdmaTimeoutError:
    """The error of a send to a peer that is alive, but has accepted nothing for so long."""
    return RdmaTimeoutError(errno.ETIMEDOUT, f"the peer took nothing for {seconds} s")


def vanished_error() -> ConnectionLostError:
    """The error if the peer has disconnected without sending END or ABORT."""
    text = "the peer disconnected without a word: its process ended, or its adapter failed"
    hint = (
        "did the peer's process end, perhaps by a signal, or without closing the connection? Was "
        "one of its accesses refused, as after the end of a lease? See its log and its exit status"
    )
    return _lost(text, hint)


def violation(kind: str, first: int, second: int) -> ConnectionLostError:
    """The error if the peer has broken the message protocol, or the adapter its guarantees.

    The arguments are those of `MessageState.failure`: one of `VIOLATIONS`, and two numbers whose
    meaning depends on it.
    """
    if kind == "TURN":
        what = "receive" if first else "send"
        text = f"the adapter completed a {what} twice, or out of order (slot {second})"
        return _lost(text, _TURN_HINT)
    texts = {
        "SHORT": f"a message of {first} bytes is shorter than its header",
        "LENGTH": f"length {first} announced, {second} bytes came",
        "CREDIT": "a message came without credit",
        "KIND": f"message kind {first}",
        "BARE": f"an immediate that announces kind {first} with flags {second:#x}",
        "WRITE": "a write with an immediate",
        "DONE": f"it answered exchange {first}: more answers than exchanges",
        "SIZE": f"a message of {first} bytes, of at most {second}",
        "ORDER": f"another message came instead of {first} bytes that are missing",
        "NUMBER": f"message number {first} came instead of {second}: one came twice, or is missing",
        "PROOF": f"its first message, of {first} bytes, does not prove that it has the key",
        "NOTE": f"a note of a write with flags {first:#x} and {second} bytes",
    }
    return protocol_error(f"the peer broke the protocol: {texts[kind]}")


class Outcome:
    """Whether, and why, one connection is over.

    Attributes:
        closing: Whether the program has closed it.  Sent messages may still be in flight.
        stopping: Whether the peer serves no further request, and is about to close.
        cause: The first cause of the end; None while messages are sent and received.
    """

    __slots__ = ("cause", "closing", "stopping")

    def __init__(self) -> None:
        self.closing: bool = False
        self.stopping: bool = False
        self.cause: BaseException | None = None

    @property
    def decided(self) -> bool:
        """Whether the connection is being closed, or is closed or lost."""
        return self.closing or self.cause is not None

    @property
    def left(self) -> bool:
        """Whether the connection is over because the peer has closed it in good order."""
        return getattr(self.cause, "hint", None) is _LEFT_HINT

    def failure(self) -> BaseException:
        """A new exception for a call of the program, which names the first cause."""
        cause = self.cause
        if cause is None or isinstance(cause, ResourceClosedError):
            return closed_error()
        if isinstance(cause, ConnectionLostError):
            again = type(cause)(*cause.args)
            again.hint = cause.hint
            again.__cause__ = cause.__cause__
            return again
        return lost_error(cause)

    def explaining(self) -> _Explaining:
        """A context manager for code that uses objects of the adapter.

        When a connection is lost, these are closed.  The block then raises the cause instead.

        Raises:
            ConnectionLostError: The connection is lost; instead of a ResourceClosedError.
        """
        return _Explaining(self)

    def require_open(self) -> None:
        """Raise `failure()` unless the connection is open."""
        if self.decided:
            raise self.failure()


class _Explaining:
    """The context manager of `Outcome.explaining`.

    It is a class, because in CPython 3.12 and 3.13 a generator under `contextlib.contextmanager`
    that replaces an exception leaves the replaced one in a reference cycle, which would keep the
    connection alive until the garbage collector runs.
    """

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if isinstance(error, ResourceClosedError) and self._outcome.cause is not None:
            raise self._outcome.failure() from None
