"""Frames and names of `aiordma cp`: what is sent is understood, and nothing else is."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.cli.ports import DEFAULT_PORT
from aiordma.cli.transfer.frames import (
    HEADER_SIZE,
    MOST_DATA,
    MOST_MESSAGE,
    Done,
    Failed,
    FrameError,
    FrameKind,
    Get,
    Message,
    Put,
    Ready,
    data_header,
    pack,
    parse,
    parse_header,
)
from aiordma.cli.transfer.names import Remote, parse_remote, split_name

SHA = "0123456789abcdef" * 4
TEXT = st.text(max_size=200)
SIZE = st.integers(0, (1 << 63) - 1)
MESSAGES = st.one_of(
    st.builds(Put, TEXT, SIZE),
    st.builds(Get, TEXT),
    st.builds(Ready, SIZE),
    st.builds(Failed, TEXT, TEXT),
    st.just(Done(SHA)),
)


@given(MESSAGES)
def test_what_is_packed_is_parsed(message: Message) -> None:
    frame = pack(message)
    kind, length = parse_header(frame[:HEADER_SIZE])
    assert (kind, length) == (FrameKind.MESSAGE, len(frame) - HEADER_SIZE)
    assert parse(frame[HEADER_SIZE:]) == message


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        parse(body)


@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_no_header_announces_more_than_was_agreed(header: bytes) -> None:
    try:
        kind, length = parse_header(header)
    except FrameError:
        return
    assert length <= (MOST_DATA if kind is FrameKind.DATA else MOST_MESSAGE)


def test_the_header_of_data() -> None:
    assert parse_header(data_header(MOST_DATA)) == (FrameKind.DATA, MOST_DATA)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"GET / HT", "does not speak"),
        (struct.pack(">2sBBI", b"cp", 2, 1, 10), "version 2"),
        (struct.pack(">2sBBI", b"cp", 1, 3, 10), "kind 3"),
        (struct.pack(">2sBBI", b"cp", 1, 2, 0), "0 bytes"),
        (struct.pack(">2sBBI", b"cp", 1, 2, MOST_DATA + 1), f"{MOST_DATA + 1} bytes"),
        (struct.pack(">2sBBI", b"cp", 1, 1, MOST_MESSAGE + 1), f"{MOST_MESSAGE + 1} bytes"),
    ],
)
def test_wrong_headers(header: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        parse_header(header)


@pytest.mark.parametrize(
    "message",
    [
        [],
        1,
        {"message": "put", "name": "x"},
        {"message": "put", "name": "x", "size": 1, "more": 1},
        {"message": "put", "name": 1, "size": 1},
        {"message": "put", "name": "x", "size": "1"},
        {"message": "put", "name": "x", "size": True},
        {"message": "put", "name": "x", "size": 1.0},
        {"message": "ready", "size": -1},
        {"message": "ready", "size": 1 << 63},
        {"message": "done", "sha256": SHA[1:]},
        {"message": "done", "sha256": SHA.upper()},
        {"message": ["put"], "name": "x", "size": 1},
        {"message": "delete", "name": "x"},
    ],
)
def test_wrong_messages(message: object) -> None:
    with pytest.raises(FrameError):
        parse(json.dumps(message).encode())


def test_deep_nesting_is_no_crash() -> None:
    with pytest.raises(FrameError):
        parse(b"[" * MOST_MESSAGE)


def test_a_message_may_not_be_endless() -> None:
    with pytest.raises(ValueError, match="too long"):
        pack(Get("x" * MOST_MESSAGE))


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ("host:1/x", Remote("host", 1, "x")),
        ("10.0.0.1:65535/a/b c", Remote("10.0.0.1", 65535, "a/b c")),
        ("[fe80::1%eth0]:7/x", Remote("fe80::1%eth0", 7, "x")),
        ("host:1/", Remote("host", 1, "")),
        ("host:1/a:2/b", Remote("host", 1, "a:2/b")),
        ("host:1/a\nb", Remote("host", 1, "a\nb")),
    ],
)
def test_names_on_a_server(text: str, remote: Remote) -> None:
    assert parse_remote(text) == remote
    assert str(remote) == text


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "./host:1/x",
        "./host:/x",
        "/host:1/x",
        "host:1",
        "host:",
        "host:x/1",
        "a/b:1/x",
        "::1:2/x",
    ],
)
def test_local_names(text: str) -> None:
    assert parse_remote(text) is None


def test_the_default_port() -> None:
    assert parse_remote("host:/a/b") == Remote("host", DEFAULT_PORT, "a/b")
    assert parse_remote("[fd80::1]:/") == Remote("fd80::1", DEFAULT_PORT, "")


@pytest.mark.parametrize("text", ["host:0/x", "host:65536/x"])
def test_ports_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"1\.\.65535"):
        parse_remote(text)


@pytest.mark.parametrize(
    ("name", "parts"), [("x", ["x"]), ("a/b/c.d", ["a", "b", "c.d"]), ("..a/b..", ["..a", "b.."])]
)
def test_parts_of_a_name(name: str, parts: list[str]) -> None:
    assert split_name(name) == parts


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("..", "part"),
        ("../x", "part"),
        ("a/../../x", "part"),
        ("a/./x", "part"),
        ("a//x", "part"),
        ("a/", "part"),
        ("a\0b", "NUL"),
        ("x" * 256, "too long"),
        ("é" * 128, "too long"),
        ("/".join("x" * 3000), "too long"),
        ("\udcff", "Unicode"),
    ],
)
def test_names_that_are_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_name(name)


@given(st.text(alphabet="a./\0", max_size=12))
def test_no_name_leads_out(name: str) -> None:
    try:
        parts = split_name(name)
    except ValueError:
        return
    assert "/".join(parts) == name
    assert not {"", ".", ".."}.intersection(parts)
