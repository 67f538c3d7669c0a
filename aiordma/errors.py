"""The exceptions of aiordma, made from C's numbers; `error_words` has their words and hints.

Theory of operation
    Four sources report failure: `errno` of a C call, the status of a work completion, the status
    of a connection-management event, and an asynchronous event of the device.  Each has a function
    here that builds the exception (`os_error`, `completion_error`, `cm_error`, `queue_error`);
    no other file writes such texts.

    Classes inherit from `RdmaError` and from the builtin that existing `except` clauses name:
    a refused connection is a `ConnectionRefusedError`, a lost one a `ConnectionResetError`, a
    missed deadline a `TimeoutError`; all of them are `OSError`.  A connection that is over raises a
    `ConnectionError`, whatever the reason.  So do most failed connects, but not if no route, no
    device or no name was found.  So a loop that tries again catches `OSError`.

    An unknown number never crashes: it becomes the general class with the number shown.

    Every class has a hint in `CLASS_HINTS`, for errors without a better one.  It is not part of the
    text, which only has a hint that fits the number.
    Exceptions hold copies of values, never handles, so that a traceback keeps no adapter alive.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, TypeVar

from aiordma.device_nodes import NO_PERMISSION, unopened
from aiordma.error_words import (
    CASE_HINTS,
    CAUSE_HINT,
    CLASS_HINTS,
    CM_HINTS,
    DISCONNECTED_HINT,
    ERRNO_HINTS,
    ERRNO_HINTS_ANY,
    EVENT_HINTS,
    REJECT_REASONS,
    SERVICE_REASONS,
    WC_HINTS,
    WC_STATUS,
)

__all__ = [
    "AuthenticationError",
    "BatchError",
    "BatchLostError",
    "CompletionError",
    "ConnectTimeoutError",
    "ConnectionEndedError",
    "ConnectionFailedError",
    "ConnectionLostError",
    "ConnectionRejectedError",
    "DeviceNotFoundError",
    "DeviceRemovedError",
    "FlushedError",
    "ForkedError",
    "LibraryMissingError",
    "MessageTooLargeError",
    "NotSupportedError",
    "PeerGoneError",
    "ProtocolError",
    "RdmaError",
    "RdmaOSError",
    "RemoteAccessError",
    "RequestDeadlineError",
    "RequestError",
    "RequestRefusedError",
    "RequestUnknownError",
    "ResourceClosedError",
    "ResultLostError",
    "StaleRegionError",
    "busy_error",
    "cm_error",
    "completion_error",
    "damaged_error",
    "device_error",
    "device_memory_error",
    "lost_error",
    "os_error",
    "errno_error",
    "queue_error",
    "read_incomplete_error",
    "result_lost_error",
    "silent_error",
    "prefix_subject",
    "prefix_address",
]


class RdmaError(Exception):
    """Base class of the exceptions that aiordma raises on its own account.

    Attributes:
        hint: The usual cause, and where to look; never empty.
    """

    hint: str = CLASS_HINTS["RdmaError"]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if hint := CLASS_HINTS.get(cls.__name__):
            cls.hint = hint


class LibraryMissingError(RdmaError, ImportError):
    """rdma-core's libraries, or the compiled module that binds them, cannot be loaded."""


class ForkedError(RdmaError, RuntimeError):
    """The object was made before `fork()`, and its handles belong to the parent process.

    Also raised for a new connection or listener, if a parent of this process used RDMA before
    `fork()`.
    """


class RdmaOSError(RdmaError, OSError):
    """A call of the system or of the C libraries failed; `errno` says how.

    The exception is also the builtin that fits `errno`, such as `PermissionError` or
    `TimeoutError`.  EBUSY means that an object is in use, or that its events are not acknowledged.

    Attributes:
        event: Name of the event by which the device reported that a queue failed, such as `CQ_ERR`;
            otherwise empty.
    """

    event: str = ""

    _unpinned = False  # memory could not be registered: a peer that waits for it can be told


class RdmaPermissionError(RdmaOSError, PermissionError):
    """There is no permission to open a device node, to pin memory, or to access peer memory."""


class RdmaTimeoutError(RdmaOSError, TimeoutError):
    """A deadline has passed."""


def _name_of(builtin: type[OSError]) -> str:
    return f"Rdma{builtin.__name__}"


# The classes of the errno that Python has builtins for; pickle finds them here by name.
_OS_CLASSES: dict[type[OSError], type[RdmaOSError]] = {
    OSError: RdmaOSError,
    PermissionError: RdmaPermissionError,
    TimeoutError: RdmaTimeoutError,
}
for _builtin in {type(OSError(_code, "")) for _code in errno.errorcode} - _OS_CLASSES.keys():
    _OS_CLASSES[_builtin] = globals()[_name_of(_builtin)] = type(
        _name_of(_builtin),
        (RdmaOSError, _builtin),
        {"__doc__": f"A `{_builtin.__name__}` of this library.", "__module__": __name__},
    )


class ResourceClosedError(RdmaError, ConnectionAbortedError):
    """This program closed the object, and then used it or was still waiting on it."""

    errno: int | None

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if self.errno is None:
            self.errno = errno.ECONNABORTED  # for which its class stands


class DeviceNotFoundError(RdmaOSError):
    """No RDMA device serves the address, or the machine has none."""


class NotSupportedError(RdmaOSError):
    """The device, its driver or the transport cannot do this."""


class ResultLostError(RdmaOSError):
    """The adapter completed a READ or an atomic without all of its result (errno EBADMSG).

    After a READ, at least the end of the local memory is not the peer's data.  The connection
    breaks soon after: read again over another one.  An atomic took place at most once, the value
    before it is unknown, and the connection stays open.  Soft-RoCE does this on a network that
    loses or reorders packets.

    Attributes:
        index: From `QueuePair.submit`, the place in the list, from 0, of the first request without
            a result; None if there was no list.
    """

    index: int | None = None


class MessageTooLargeError(RdmaError, ValueError):
    """The message is larger than the peer said it would take, or than the buffer to receive into.

    Attributes:
        size: From `recv_into`, bytes of the message, which is still the next one.  From
            `request(into=)`, bytes of the answer; 0 if the request was too large.
        answer: From `request(into=)`, the `Message` that the buffer had no room for.
    """

    size: int = 0
    answer: Any = None


class ConnectionFailedError(RdmaError, ConnectionError):
    """A connection could not be made.

    Attributes:
        event: Name of the connection-management event that reported it, or an empty string.
        status: The event's status: 0, a negative errno or a positive reject reason.
    """

    def __init__(self, *args: object, event: str = "", status: int = 0) -> None:
        super().__init__(*args)
        self.event = event
        self.status = status


class HostNotFoundError(RdmaError, socket.gaierror):
    """The name of a host does not resolve; `errno` is a number of `getaddrinfo(3)`."""


class ConnectionRejectedError(ConnectionFailedError, ConnectionRefusedError):
    """The peer, or its kernel, refused the connection.

    Attributes:
        private_data: Data that the peer sent with its refusal.  InfiniBand and RoCE deliver a field
            of fixed size, so bytes of a foreign peer are padded with zeros; those of an aiordma
            listener are exact.
        try_again: Whether an aiordma listener refused because too many clients were waiting.  Then
            `connect` has already tried again, as long as its time limit allowed.
    """

    try_again = False

    def __init__(
        self, *args: object, event: str = "", status: int = 0, private_data: bytes = b""
    ) -> None:
        super().__init__(*args, event=event, status=status)
        self.private_data = private_data


class AuthenticationError(ConnectionRejectedError, RdmaPermissionError):
    """The two sides have not proved to each other that they have the same key (errno EACCES).

    See `ConnectionConfig.keys`.  This is both a PermissionError and a ConnectionRefusedError.  It
    does not say whether the other side has no such key, or another one.
    """


class ConnectTimeoutError(RdmaTimeoutError, ConnectionFailedError):
    """The peer did not answer within the deadline.

    Attributes:
        event: Name of the event that reported it; empty if the local deadline passed first.
        status: The event's status, 0 for the local deadline.
    """


class PeerGoneError(RdmaError, ConnectionError):
    """The peer is gone: it ended the connection in good order, or the connection broke."""


class ConnectionLostError(PeerGoneError, ConnectionResetError):
    """An established connection ended without the in-band end of stream.

    `errno` is ETIMEDOUT if the peer was silent for too long, or accepted nothing for too long while
    a stream closed.  Even this is no `TimeoutError`, which ends one wait, after which a program can
    go on with the connection; here the connection is over.  `errno` is EBADMSG if a large message
    did not match its checksum, and was not delivered: the adapter completes a read before its data
    have arrived, or the peer's program changed the buffer of a message that was still being sent.

    The first cause (a failed work request, a removed device) is in `__cause__` if it is known.

    Attributes:
        request_sent: From `Connection.request`, whether the peer may have received the request.
    """

    request_sent: bool = False


class BatchError(RdmaOSError):
    """Some operations of a batch were not done; the first cause is in `__cause__`.

    `errno` is that of the cause.  Each list has places in the batch, from 0, in ascending order.

    Attributes:
        done: The operations that were done.
        failed: Those that failed by themselves.
        unknown: Those that were posted, but whose result the adapter did not report, because the
            connection ended: a WRITE may have taken place, or a part of it.
        unposted: Those that were not posted.
        results: As `Batch.results`; None for each operation that is not in `done`.
    """

    done: list[int]
    failed: list[int]
    unknown: list[int]
    unposted: list[int]
    results: list[bytes | int | None]


class BatchLostError(BatchError, ConnectionLostError):
    """Some operations of a batch were not done, because the connection was lost."""


class ConnectionEndedError(PeerGoneError, EOFError):
    """The peer ended the stream in good order; everything that it sent was delivered."""

    _answered = False  # requests that have no answer were not served


class DeviceRemovedError(ConnectionLostError):
    """The RDMA device was removed, or its driver unloaded (errno ENODEV)."""


class ProtocolError(ConnectionLostError):
    """The peer broke the wire protocol; only this connection is affected."""

    _foreign = False  # its program sends messages where this side has requests
    _unserved = False  # and the reverse


class RequestError(RdmaError):
    """The peer answered a request with an error.

    Attributes:
        remote_type: Name of the class of the exception that the peer's handler raised; empty if
            the peer's library refused by itself.
        remote_text: The text of that exception, without the name of the class.
    """

    def __init__(self, *args: object, remote_type: str = "", remote_text: str = "") -> None:
        super().__init__(*args)
        self.remote_type = remote_type
        self.remote_text = remote_text


class RequestRefusedError(RequestError):
    """The peer did not serve the request; a handler may raise this, too.

    Attributes:
        try_again: Whether another attempt makes sense, because no handler has begun with the
            request: the peer has as many requests as it accepts, and may serve it later; or it is
            stopping, and another server may serve it.
    """

    _stopping = False  # the connection takes no further request

    def __init__(
        self,
        *args: object,
        remote_type: str = "",
        remote_text: str = "",
        try_again: bool = False,
    ) -> None:
        super().__init__(*args, remote_type=remote_type, remote_text=remote_text)
        self.try_again: bool = try_again


class RequestUnknownError(RequestRefusedError):
    """The peer's handler knows no such request."""


class RequestDeadlineError(RequestError, TimeoutError):
    """A request was not answered in time; the peer is notified, unless nothing was sent."""


class CompletionError(RdmaError, OSError):
    """A work request failed.

    Attributes:
        status: Number of the completion status (`ibv_wc_status`).
        status_name: The name of the status, such as `RETRY_EXC_ERR`.
        operation: The request, such as `send`.
        qp_num: Number of the local queue pair.
        vendor_err: The adapter's own code, for its maker's support.
        index: Place of the request, from 0, in the list that was awaited; None if there was none.
    """

    index: int | None = None
    hint: str

    def __init__(
        self, text: str, *, status: int, operation: str = "", qp_num: int = 0, vendor_err: int = 0
    ) -> None:
        super().__init__(errno.EIO, text)
        self.status = status
        self.status_name: str = wc_status_name(status)
        self.operation = operation
        self.qp_num = qp_num
        self.vendor_err = vendor_err
        self.index = None
        self.hint = WC_HINTS.get(self.status_name) or type(self).hint

    def __reduce__(self) -> tuple[object, ...]:
        # OSError's own `__reduce__` would have the class called with (errno, text) only.
        details = (self.status, self.operation, self.qp_num, self.vendor_err)
        return _rebuild, (type(self), self.args[1], *details), {"index": self.index}


def _rebuild(
    kind: type[CompletionError], text: str, status: int, operation: str, qp_num: int, vendor: int
) -> CompletionError:
    return kind(text, status=status, operation=operation, qp_num=qp_num, vendor_err=vendor)


class FlushedError(CompletionError):
    """The request was still queued when the queue pair failed, for another reason, or closed."""


class RemoteAccessError(CompletionError):
    """The peer's adapter refused the request: wrong key, range, right or size, or a lease's end."""


class StaleRegionError(RemoteAccessError):
    """A `RemoteRegion` names memory that is not, or no longer, the peer's; nothing was posted.

    Its owner has restarted since, or it belongs to another connection, or the peer has said that
    the exposure has ended.  The connection stays open: ask the peer for the region again.  `status`
    is the one with which the peer's adapter would have refused the request.
    """

    def __init__(
        self,
        text: str,
        *,
        status: int = WC_STATUS.index("REM_ACCESS_ERR"),
        operation: str = "",
        qp_num: int = 0,
        vendor_err: int = 0,
    ) -> None:
        super().__init__(
            text, status=status, operation=operation, qp_num=qp_num, vendor_err=vendor_err
        )
        self.hint: str = type(self).hint  # not that of the status: there was no request


E = TypeVar("E", bound=RdmaError)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_WC_CLASSES: dict[str, type[CompletionError]] = {
    "WR_FLUSH_ERR": FlushedError,
    "REM_INV_REQ_ERR": RemoteAccessError,
    "REM_ACCESS_ERR": RemoteAccessError,
    "REM_OP_ERR": RemoteAccessError,
}


def wc_status_name(status: int) -> str:
    """Name of an `ibv_wc_status` number, `UNKNOWN_<n>` for a number that is not known."""
    return WC_STATUS[status] if 0 <= status < len(WC_STATUS) else f"UNKNOWN_{status}"


def reject_reason(status: int) -> str:
    """Words for the status of a REJECTED event."""
    if status < 0:
        return os.strerror(-status)
    return REJECT_REASONS.get(status, (f"reason {status}", ""))[0]


def _with_hint(text: str, hint: str) -> str:
    return f"{text} ({hint})" if hint else text


def _hinted(error: E, hint: str) -> E:
    """Return the error, with this hint instead of that of its class."""
    if hint:
        error.hint = hint
    return error


def os_error(code: int, verb: str, *, detail: str = "") -> RdmaOSError:
    """Build the exception for a C call that failed.

    Args:
        code: errno; or -errno, as the posts of software iWARP return it.
        verb: The C function, such as `ibv_reg_mr`.
        detail: What was asked for, such as a size, for the text.

    Returns:
        An `RdmaOSError` that is also the builtin subclass that fits the errno;
        `NotSupportedError` and `DeviceNotFoundError` for EOPNOTSUPP and ENODEV.  The text has the
        verb, the symbol, words and, if there is one, a hint.
    """
    code = abs(code)
    symbol = errno.errorcode.get(code, str(code))
    text = f"{verb}: {symbol}: {os.strerror(code)}{detail and ' ' + detail}"
    if code == errno.ENODEV or (verb, code) == ("rdma_create_event_channel", errno.ENOENT):
        code, text, hint = _with_nodes(code, text)
        if hint:
            return errno_error(code, text, hint)
    hint = ERRNO_HINTS.get((verb, code), ERRNO_HINTS_ANY.get(code, ""))
    return errno_error(code, text, hint)


def errno_error(code: int, text: str, hint: str = "") -> RdmaOSError:
    """Build the exception for something that fails with an errno, but is no C call.

    Args:
        code: errno.
        text: The operation that has failed.
        hint: A remedy, which is in the text as well.
    """
    kind: type[RdmaOSError]
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        kind = NotSupportedError
    elif code == errno.ENODEV:
        kind = DeviceNotFoundError
    else:
        kind = _OS_CLASSES[type(OSError(code, ""))]
    return _hinted(kind(code, _with_hint(text, hint)), hint)


def prefix_address(error: OSError, host: str, port: int) -> None:
    """Put `host` and `port` of a peer or of a listener in front of the text of an `error`."""
    prefix_subject(error, f"{host} port {port}")


def prefix_subject(error: OSError, what: str) -> None:
    """Put `what`, the subject of an `error`, in front of its text; the class stays the same."""
    text = f"{what}: {error.strerror or error}"
    error.args = (error.errno, text, *error.args[2:])
    error.strerror = text


def _with_nodes(code: int, text: str) -> tuple[int, str, str]:
    """Errno, text and hint for a device that C reports as missing: can its node be opened?

    If other devices can be opened, the errno stays ENODEV, so that the caller tries the next
    address.  The hint is empty if all nodes can be opened.
    """
    found = unopened()
    if found is None:
        return code, text, ""
    why, node, altogether = found
    words = f"{node} cannot be opened: {errno.errorcode[why]}: {os.strerror(why)}"
    hint = ERRNO_HINTS_ANY[errno.EMFILE] if why in _NO_DESCRIPTOR else NO_PERMISSION
    return (why if altogether else code), f"{text}: {words}", hint


def completion_error(
    status: int, *, operation: str = "", qp_num: int = 0, vendor_err: int = 0
) -> CompletionError:
    """Build the exception for a completion whose `status` is not success.

    `operation` is the name of the request, `qp_num` the local queue pair, `vendor_err` the code of
    the adapter's vendor.
    """
    name = wc_status_name(status)
    what = operation or "work request"
    text = _with_hint(f"{what} failed: {name} (status {status})", WC_HINTS.get(name, ""))
    return _WC_CLASSES.get(name, CompletionError)(
        text, status=status, operation=operation, qp_num=qp_num, vendor_err=vendor_err
    )


def result_lost_error(operation: str, index: int | None = None) -> ResultLostError:
    """Build the exception for an atomic `operation` whose 8 bytes are as before its post.

    Args:
        operation: Such as `fetch_add`.
        index: Its place in a list.
    """
    text = (
        f"{operation} completed without its result: it took place at most once, and the value "
        "before it is unknown"
    )
    error = _hinted(ResultLostError(errno.EBADMSG, text), CASE_HINTS["atomic"])
    error.index = index
    return error


def read_incomplete_error() -> ResultLostError:
    """Build the exception for a READ whose last bytes are as before its post."""
    text = "the read completed before its last bytes had arrived"
    return ResultLostError(errno.EBADMSG, text)


def busy_error(text: str, code: int = errno.EBUSY) -> RdmaOSError:
    """Build the exception for an object that is in use: its `text`, and the errno `code`."""
    return _hinted(errno_error(code, text), CASE_HINTS["busy"])


def device_memory_error(text: str) -> NotSupportedError:
    """Build the exception for memory of a GPU; the `text` names the part that is missing."""
    return _hinted(NotSupportedError(errno.EOPNOTSUPP, text), CASE_HINTS["device memory"])


def silent_error(text: str) -> ConnectionLostError:
    """Build the exception for a connection whose peer is silent, or takes nothing: its `text`."""
    return _hinted(ConnectionLostError(errno.ETIMEDOUT, text), CASE_HINTS["silent"])


def damaged_error(text: str) -> ConnectionLostError:
    """Build the exception for a message that does not match its checksum: its `text`."""
    return _hinted(ConnectionLostError(errno.EBADMSG, text), CASE_HINTS["damaged"])


def lost_error(cause: BaseException) -> ConnectionLostError:
    """Build the exception for a connection that `cause` has ended, and not its peer."""
    error = ConnectionLostError(errno.ECONNRESET, f"the connection is lost: {cause}")
    error.hint = getattr(cause, "hint", "") or CAUSE_HINT
    error.__cause__ = cause
    return error


def device_error() -> DeviceRemovedError:
    """Build the exception for the event DEVICE_FATAL."""
    return DeviceRemovedError(errno.ENODEV, "the RDMA device failed, or was removed (DEVICE_FATAL)")


def queue_error(event: str, queue: str) -> RdmaOSError:
    """Build the exception for an event that ends a queue.

    Args:
        event: Its name, such as `QP_FATAL`.
        queue: The queue that has failed, such as `queue pair 17`.
    """
    hint = EVENT_HINTS.get(event, "")
    error = RdmaOSError(errno.EIO, _with_hint(f"the {queue} failed: {event}", hint))
    error.event = event
    return _hinted(error, hint or CASE_HINTS["queue"])


def cm_error(event: str, status: int, private_data: bytes = b"") -> OSError:
    """Build the exception for a connection-management event that ends a wait.

    Args:
        event: The event's name, such as `REJECTED`.
        status: Its status: negative errno, or a positive reject reason.
        private_data: Bytes that came with a REJECTED event.
    """
    # A datagram service that says no is reported as UNREACHABLE, with its reason as the status.
    service = event == "UNREACHABLE" and status > 0
    if event == "REJECTED" or service:
        reasons = SERVICE_REASONS if service else REJECT_REASONS
        reason, hint = reasons.get(status, (reject_reason(status), ""))
        if status == -errno.ECONNREFUSED:
            hint = REJECT_REASONS[8][1]
        text = _with_hint(f"connection rejected: {reason} (status {status})", hint)
        rejected = ConnectionRejectedError(
            errno.ECONNREFUSED, text, event=event, status=status, private_data=private_data
        )
        return _hinted(rejected, hint)
    if event == "DEVICE_REMOVAL":
        return DeviceRemovedError(errno.ENODEV, "the RDMA device was removed")
    if event in ("DISCONNECTED", "TIMEWAIT_EXIT"):
        lost = ConnectionLostError(errno.ECONNRESET, "the connection was closed by the peer")
        return _hinted(lost, DISCONNECTED_HINT)
    code = -status if status < 0 else errno.EIO
    if status == -1:
        # Not EPERM, but librdmacm's own -1, whose errno is lost.  For an address it means that
        # librdmacm did not find the device that the kernel had chosen.
        code = errno.ENODEV if event == "ADDR_ERROR" else errno.EIO
    text = f"{event}: {errno.errorcode.get(code, code)}: {os.strerror(code)}"
    if code == errno.ENODEV:
        code, text, hint = _with_nodes(code, text)
        return errno_error(code, text, hint or ERRNO_HINTS_ANY[errno.ENODEV])
    if code == errno.ETIMEDOUT or event == "UNREACHABLE":
        text = _with_hint(f"{event}: no answer", ConnectTimeoutError.hint)
        return ConnectTimeoutError(errno.ETIMEDOUT, text, event=event, status=status)
    hint = ERRNO_HINTS_ANY.get(code, "")
    failed = ConnectionFailedError(code, _with_hint(text, hint), event=event, status=status)
    return _hinted(failed, hint or CM_HINTS.get(event, ""))
