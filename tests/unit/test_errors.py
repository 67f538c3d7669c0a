"""errors: every number becomes words, the right class, and a hint where one is known."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiordma
from aiordma import error_words, errors
from aiordma.cm.enums import EventType
from aiordma.error_words import SERVICE_REASONS
from aiordma.errors import (
    CompletionError,
    RdmaError,
    cm_error,
    completion_error,
    os_error,
    reject_reason,
    wc_status_name,
)
from aiordma.verbs.enums import WCStatus

#: Of a connection that was not made, and is no ConnectionError: docs/timeouts.md.
NOT_MADE = (
    os_error(errno.ENETUNREACH, "rdma_resolve_addr"),
    os_error(errno.ENODEV, "rdma_resolve_addr"),
    errors.HostNotFoundError(socket.EAI_NONAME, "no such name"),
)

BASES: dict[str, tuple[type[BaseException], ...]] = {
    "LibraryMissingError": (ImportError,),
    "HostNotFoundError": (socket.gaierror,),
    "RdmaOSError": (OSError,),
    "RdmaPermissionError": (errors.RdmaOSError, PermissionError),
    "RdmaTimeoutError": (errors.RdmaOSError, TimeoutError),
    "ForkedError": (RuntimeError,),
    "ResourceClosedError": (ConnectionAbortedError, ConnectionError, OSError),
    "DeviceNotFoundError": (OSError,),
    "NotSupportedError": (OSError,),
    "ResultLostError": (errors.RdmaOSError,),
    "BatchError": (errors.RdmaOSError,),
    "BatchLostError": (errors.BatchError, errors.ConnectionLostError),
    "MessageTooLargeError": (ValueError,),
    "ConnectionFailedError": (ConnectionError, OSError),
    "ConnectionRejectedError": (errors.ConnectionFailedError, ConnectionRefusedError),
    "ConnectTimeoutError": (TimeoutError, ConnectionError, errors.ConnectionFailedError),
    "ConnectionLostError": (ConnectionResetError, ConnectionError),
    "ConnectionEndedError": (EOFError, ConnectionError, errors.PeerGoneError),
    "PeerGoneError": (ConnectionError,),
    "ProtocolError": (errors.ConnectionLostError,),
    "AuthenticationError": (errors.ConnectionRejectedError, PermissionError),
    "RequestError": (Exception,),
    "RequestRefusedError": (errors.RequestError,),
    "RequestUnknownError": (errors.RequestRefusedError,),
    "RequestDeadlineError": (errors.RequestError, TimeoutError),
    "CompletionError": (OSError,),
    "FlushedError": (CompletionError,),
    "RemoteAccessError": (CompletionError,),
    "StaleRegionError": (errors.RemoteAccessError,),
    "DeviceRemovedError": (errors.ConnectionLostError,),
}


@pytest.mark.parametrize("name", BASES)
def test_existing_except_clauses_catch_it(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, RdmaError)
    for base in BASES[name]:
        assert issubclass(kind, base)
    assert kind.__doc__


#: Programs catch these by the builtin, and know no other name.
BUILTINS = {"HostNotFoundError", "RdmaPermissionError", "RdmaTimeoutError"}


def test_no_class_is_missing_here_or_at_the_top() -> None:
    classes = {n for n in errors.__all__ if isinstance(getattr(errors, n), type)} - {"RdmaError"}
    assert classes == set(BASES) - BUILTINS
    for name in classes:
        assert getattr(aiordma, name) is getattr(errors, name)


def test_a_loop_that_tries_again_needs_one_clause() -> None:
    for kind in (
        errors.ConnectTimeoutError, errors.ConnectionRejectedError,
        errors.ConnectionEndedError, errors.DeviceRemovedError, errors.ProtocolError,
    ):  # fmt: skip
        assert issubclass(kind, ConnectionError)
    assert issubclass(errors.ConnectionLostError, errors.PeerGoneError)


def test_a_loop_that_goes_on_after_a_time_out_does_not_go_on_with_a_dead_connection() -> None:
    error = errors.silent_error("nothing heard from the peer")
    assert (type(error), error.errno) == (errors.ConnectionLostError, errno.ETIMEDOUT)
    assert not isinstance(error, TimeoutError)
    assert error.hint == error_words.CASE_HINTS["silent"]


# ---- completions ---------------------------------------------------------------------------

CLASSES: dict[str, type[CompletionError]] = {
    "WR_FLUSH_ERR": errors.FlushedError,
    "REM_INV_REQ_ERR": errors.RemoteAccessError,
    "REM_ACCESS_ERR": errors.RemoteAccessError,
    "REM_OP_ERR": errors.RemoteAccessError,
}


@pytest.mark.parametrize("status", list(WCStatus))
def test_every_completion_status(status: WCStatus) -> None:
    assert wc_status_name(status) == status.name
    error = completion_error(status, operation="send", qp_num=17, vendor_err=0x81)
    assert type(error) is CLASSES.get(status.name, CompletionError)
    assert error.errno == errno.EIO
    assert (error.status, error.status_name) == (status, status.name)
    assert (error.operation, error.qp_num, error.vendor_err) == ("send", 17, 0x81)
    assert str(error).startswith(f"[Errno 5] send failed: {status.name} (status {int(status)})")
    assert error.hint
    assert (error.hint in str(error)) == bool(status)


@given(st.integers(len(WCStatus), 1 << 32) | st.integers(-(1 << 31), -1))
def test_an_unknown_completion_status_is_shown(status: int) -> None:
    error = completion_error(status)
    assert type(error) is CompletionError
    assert error.status_name == f"UNKNOWN_{status}"
    assert f"work request failed: UNKNOWN_{status} (status {status})" in str(error)


# ---- errno ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "code"), list(error_words.ERRNO_HINTS))
def test_every_hint_of_a_call(verb: str, code: int) -> None:
    hint = error_words.ERRNO_HINTS[verb, code]
    error = os_error(code, verb)
    assert error.errno == code
    assert f"{verb}: {errno.errorcode[code]}: {os.strerror(code)}" in str(error)
    assert str(error).endswith(f"({hint})" if hint else os.strerror(code))


@pytest.mark.parametrize("code", list(error_words.ERRNO_HINTS_ANY))
def test_every_hint_of_an_errno(code: int) -> None:
    assert str(os_error(code, "some_call")).endswith(f"({error_words.ERRNO_HINTS_ANY[code]})")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, PermissionError),
        (errno.EPERM, PermissionError),
        (errno.EAGAIN, BlockingIOError),
        (errno.ECONNREFUSED, ConnectionRefusedError),
        (errno.ECONNRESET, ConnectionResetError),
        (errno.ECONNABORTED, ConnectionAbortedError),
        (errno.ETIMEDOUT, TimeoutError),
        (errno.ENODEV, errors.DeviceNotFoundError),
        (errno.EOPNOTSUPP, errors.NotSupportedError),
        (errno.ENOSYS, errors.NotSupportedError),
        (errno.EINVAL, OSError),
    ],
)
def test_the_class_fits_the_errno(code: int, kind: type[OSError]) -> None:
    error = os_error(code, "some_call", detail="(4096 bytes)")
    assert isinstance(error, kind)
    assert error.errno == code
    assert "(4096 bytes)" in str(error)
    assert error.hint == error_words.ERRNO_HINTS_ANY.get(code, type(error).hint)


@given(st.integers(1, (1 << 31) - 1))
def test_any_errno_makes_an_error(code: int) -> None:
    error = os_error(code, "some_call")
    assert error.errno == code
    assert errno.errorcode.get(code, str(code)) in str(error)


# ---- connection events ---------------------------------------------------------------------

ENDS = ("DISCONNECTED", "DEVICE_REMOVAL", "TIMEWAIT_EXIT")


@pytest.mark.parametrize("status", list(error_words.REJECT_REASONS))
def test_every_reason_to_reject(status: int) -> None:
    words, hint = error_words.REJECT_REASONS[status]
    error = cm_error("REJECTED", status, b"data")
    assert isinstance(error, errors.ConnectionRejectedError)
    assert isinstance(error, ConnectionRefusedError)
    assert (error.event, error.status, error.private_data) == ("REJECTED", status, b"data")
    assert (error.errno, error.hint) == (errno.ECONNREFUSED, hint or type(error).hint)
    assert f"connection rejected: {words} (status {status})" in str(error)
    assert hint in str(error)


@pytest.mark.parametrize("status", list(SERVICE_REASONS))
def test_every_reason_of_a_datagram_service(status: int) -> None:
    words, hint = SERVICE_REASONS[status]
    error = cm_error("UNREACHABLE", status, b"data")
    assert isinstance(error, errors.ConnectionRejectedError)
    assert (error.event, error.status, error.private_data) == ("UNREACHABLE", status, b"data")
    assert (error.errno, error.hint) == (errno.ECONNREFUSED, hint or type(error).hint)
    assert f"connection rejected: {words} (status {status})" in str(error)
    assert isinstance(cm_error("UNREACHABLE", -errno.ETIMEDOUT), errors.ConnectTimeoutError)


def test_a_reject_reason_may_be_unknown_or_an_errno() -> None:
    assert reject_reason(77) == "reason 77"
    assert reject_reason(-errno.ECONNREFUSED) == os.strerror(errno.ECONNREFUSED)
    assert "reason 77 (status 77)" in str(cm_error("REJECTED", 77))
    assert os.strerror(errno.ECONNRESET) in str(cm_error("REJECTED", -errno.ECONNRESET))


@pytest.mark.parametrize("event", ENDS)
def test_an_end_is_a_lost_connection(event: str) -> None:
    error = cm_error(event, 0)
    removed = event == "DEVICE_REMOVAL"
    kind = errors.DeviceRemovedError if removed else errors.ConnectionLostError
    assert type(error) is kind
    assert error.errno == (errno.ENODEV if removed else errno.ECONNRESET)
    assert ("removed" in str(error)) == removed


@pytest.mark.parametrize(
    ("event", "status", "kind"),
    [
        ("ADDR_ERROR", -errno.EHOSTUNREACH, errors.ConnectionFailedError),
        ("ADDR_ERROR", -errno.ENETUNREACH, errors.ConnectionFailedError),
        ("ADDR_ERROR", -errno.ETIMEDOUT, errors.ConnectTimeoutError),
        ("ADDR_ERROR", -errno.ENODEV, errors.DeviceNotFoundError),
        ("ADDR_ERROR", 0, errors.ConnectionFailedError),
        ("ROUTE_ERROR", -errno.EINVAL, errors.ConnectionFailedError),
        ("MULTICAST_ERROR", -errno.EINVAL, errors.ConnectionFailedError),
        ("UNREACHABLE", -errno.ETIMEDOUT, errors.ConnectTimeoutError),
        ("UNREACHABLE", 0, errors.ConnectTimeoutError),
        ("CONNECT_ERROR", -errno.EINVAL, errors.ConnectionFailedError),
        ("UNKNOWN_99", 0, errors.ConnectionFailedError),
    ],
)
def test_events_that_fail_a_step(event: str, status: int, kind: type[OSError]) -> None:
    error = cm_error(event, status)
    assert type(error) is kind
    assert event in str(error)
    assert error.errno
    if isinstance(error, (errors.ConnectionFailedError, errors.ConnectTimeoutError)):
        assert (error.event, error.status) == (event, status)


@given(
    st.sampled_from([event.name for event in EventType]) | st.text(max_size=20),
    st.integers(-5000, 5000),
    st.binary(max_size=20),
)
def test_any_event_makes_an_error(event: str, status: int, data: bytes) -> None:
    error = cm_error(event, status, data)
    assert isinstance(error, OSError)
    assert isinstance(error, RdmaError)
    assert error.errno
    assert str(error)


# ---- as values -----------------------------------------------------------------------------

SAMPLES: list[Any] = [
    completion_error(12, operation="send", qp_num=17, vendor_err=1),
    completion_error(5),
    completion_error(99),
    cm_error("REJECTED", 28, b"why"),
    cm_error("UNREACHABLE", -errno.ETIMEDOUT),
    cm_error("ADDR_ERROR", -errno.EHOSTUNREACH),
    cm_error("ADDR_ERROR", -errno.ENODEV),
    cm_error("DISCONNECTED", 0),
    os_error(errno.ENOMEM, "ibv_reg_mr"),
    os_error(errno.EOPNOTSUPP, "ibv_alloc_mw"),
    errors.ProtocolError(errno.EPROTO, "broken"),
    errors.MessageTooLargeError("too large"),
    errors.LibraryMissingError("missing"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "how", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"]
)
def test_errors_survive_a_copy(error: Any, how: Any) -> None:
    other = how(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert other.args == error.args
    assert vars(other) == vars(error)


@pytest.mark.parametrize("error", NOT_MADE, ids=lambda error: type(error).__name__)
def test_a_loop_that_connects_again_catches_os_errors(error: OSError) -> None:
    assert isinstance(error, OSError)
    assert not isinstance(error, ConnectionError)
    page = (Path(__file__).parents[2] / "docs/timeouts.md").read_text()
    name = "socket.gaierror" if isinstance(error, socket.gaierror) else type(error).__name__
    (row,) = (line for line in page.splitlines() if f"| `{name}`" in line)
    assert row.endswith("| no |")
    assert "except OSError as error:" in page


def test_the_first_error_of_a_newcomer_names_the_software_device() -> None:
    error = os_error(errno.ENODEV, "rdma_create_event_channel")
    assert "python -m aiordma_softroce -- COMMAND" in error.hint
    assert "pip install aiordma-softroce" in error.hint
    assert error.hint in str(error)
