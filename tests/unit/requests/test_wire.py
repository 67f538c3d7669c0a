"""The header of requests: its bytes, its bounds, and errors as bytes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import (
    Message,
    RequestDeadlineError,
    RequestError,
    RequestRefusedError,
    RequestUnknownError,
)
from aiordma._core import CallTable
from aiordma.error_words import CASE_HINTS
from aiordma.requests.wire import (
    BODY_FOLLOWS,
    GIVEN_UP,
    HEADER_SIZE,
    MAX_TEXT,
    STOPPING,
    STOPPING_NAME,
    ErrorCode,
    Kind,
    ViolationError,
    code_of,
    error_frame,
    error_of,
    frame,
    parse,
)


def message(data: bytes) -> Message:
    return Message(memoryview(data))


def test_the_bytes_of_a_header() -> None:
    data = frame(Kind.REQUEST, 0x01020304, 0x05060708090A0B0C, BODY_FOLLOWS)
    assert data == bytes.fromhex("a5 01 01 01 01020304 05060708090a0b0c")
    assert parse(message(data)) == (Kind.REQUEST, BODY_FOLLOWS, 0x01020304, 0x05060708090A0B0C)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no request"),
        (frame(Kind.REQUEST, 1)[:-1], "is no request"),
        (b"\xa6" + frame(Kind.REQUEST, 1)[1:], "no request"),
        (b"GET / HTTP/1.1\r\n\r\n", "no request"),
        (b"\xa5\x02" + frame(Kind.REQUEST, 1)[2:], "version 2"),
        (b"\xa5\x01\x00" + frame(Kind.REQUEST, 1)[3:], "kind 0"),
        (b"\xa5\x01\x06" + frame(Kind.REQUEST, 1)[3:], "kind 6"),
        (frame(Kind.REQUEST, 1, flags=GIVEN_UP), "flags 0x2"),
        (frame(Kind.CANCEL, 1, flags=1), "flags 0x1"),
        (frame(Kind.ANSWER, 1, flags=BODY_FOLLOWS), "flags 0x1"),
        (frame(Kind.REQUEST, 1 << 31), "number 2147483648"),
        (frame(Kind.REQUEST, 1, flags=BODY_FOLLOWS) + b"x", "1 bytes behind"),
        (frame(Kind.CANCEL, 1) + b"x", "1 bytes behind"),
        (frame(Kind.GRANT, 1) + b"x", "1 bytes behind"),
        (frame(Kind.ERROR, 1) + bytes(MAX_TEXT + 1), "1025 bytes behind"),
    ],
)
def test_each_bad_frame_is_a_violation(data: bytes, words: str) -> None:
    with pytest.raises(ViolationError, match=words):
        parse(message(data))


@given(st.binary(max_size=64) | st.binary(max_size=14).map(lambda rest: b"\xa5\x01" + rest))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        kind, _, number, _ = parse(message(data))
    except ViolationError:
        return
    assert kind in set(Kind)
    assert number < 1 << 31


@pytest.mark.parametrize(
    ("seconds", "number"), [(1.5, 1_500_000), (1e-9, 1), (-3, 1), (0, 1), (1e300, 10**18)]
)
async def test_the_time_that_is_left(seconds: float, number: int) -> None:
    table = CallTable(None, None, 1, 1, 1)
    call = table.enter(asyncio.get_running_loop(), 0, 1.0, 1.0)
    assert parse(message(call.header(seconds, 0))) == (Kind.REQUEST, 0, call.number, number)
    assert parse(message(call.header(None, BODY_FOLLOWS)))[1:] == (BODY_FOLLOWS, call.number, 0)


@pytest.mark.parametrize(
    ("exc", "code", "kind"),
    [
        (ZeroDivisionError("by 0"), ErrorCode.RAISED, RequestError),
        (TimeoutError("late"), ErrorCode.RAISED, RequestError),
        (RequestError("no"), ErrorCode.RAISED, RequestError),
        (RequestRefusedError("no"), ErrorCode.REFUSED, RequestRefusedError),
        (RequestRefusedError("no", try_again=True), ErrorCode.OVERLOADED, RequestRefusedError),
        (RequestUnknownError("no"), ErrorCode.UNKNOWN, RequestUnknownError),
        (RequestDeadlineError("no"), ErrorCode.DEADLINE, RequestDeadlineError),
        (type("Own", (RequestUnknownError,), {})("no"), ErrorCode.UNKNOWN, RequestUnknownError),
    ],
)
def test_errors_arrive_as_their_class(exc: Exception, code: int, kind: type[Exception]) -> None:
    assert code_of(exc) == code
    error = error_of(code, f"{type(exc).__name__}\0{exc}".encode())
    assert type(error) is kind
    again = code == ErrorCode.OVERLOADED
    assert getattr(error, "try_again", False) is again
    assert (error.hint == CASE_HINTS["overloaded"]) is again
    assert error.remote_type == type(exc).__name__
    assert str(exc) in str(error)
    if kind is RequestError:
        assert str(error) == f"{type(exc).__name__}: {exc}"


def test_a_peer_that_is_stopping_is_told_from_one_that_has_no_room() -> None:
    error = error_of(ErrorCode.OVERLOADED, f"{STOPPING_NAME}\0{STOPPING}".encode())
    assert isinstance(error, RequestRefusedError)
    assert (error.try_again, error._stopping, error.remote_type) == (True, True, "")
    assert error.hint == CASE_HINTS["stopping"]
    assert (str(error), error.remote_text) == (STOPPING, STOPPING)
    # Passed on by a handler of another server, it says nothing of that server.
    assert code_of(error) == ErrorCode.OVERLOADED
    passed_on = error_of(ErrorCode.OVERLOADED, f"RequestRefusedError\0{error}".encode())
    assert isinstance(passed_on, RequestRefusedError)
    assert (passed_on.try_again, passed_on._stopping) == (True, False)


def test_an_error_of_an_unknown_code_or_without_words() -> None:
    assert str(error_of(99, b"")) == "error 99"
    assert str(error_of(99, b"Name\0")) == "Name"
    assert type(error_of(99, b"\xff\0\xff")) is RequestError


@given(st.text(max_size=2000), st.text(max_size=40))
def test_the_words_of_an_error_are_cut(text: str, name: str) -> None:
    data = error_frame(7, ErrorCode.RAISED, name, text)
    assert len(data) <= HEADER_SIZE + MAX_TEXT
    kind, _, number, code = parse(message(data))
    assert (kind, number, code) == (Kind.ERROR, 7, ErrorCode.RAISED)
    assert isinstance(error_of(code, data[HEADER_SIZE:]), RequestError)
