"""The bytes of the message layer: as docs/wire.md has them, and total parsing."""

from __future__ import annotations

import errno

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiordma._core import FRAME_HAS_IMM, FRAME_KINDS, VIOLATIONS
from aiordma.endpoint import wire
from aiordma.endpoint.outcome import abort_reason, aborted_error, violation
from aiordma.endpoint.wire import (
    FRAME,
    FRAME_SIZE,
    HELLO_SIZE,
    RENDEZVOUS,
    VERSION,
    AbortReason,
    FrameKind,
    Hello,
)
from aiordma.errors import (
    ConnectionLostError,
    ProtocolError,
    RdmaTimeoutError,
    completion_error,
)
from aiordma.link.refusal import RefusalReason, parse_refusal, refusal, seal_refusal

REQUEST_ROOM, REPLY_ROOM, REFUSAL_ROOM = 56, 196, 148


def hellos(max_user: int) -> st.SearchStrategy[Hello]:
    return st.builds(
        Hello,
        recv_depth=st.integers(1, 0xFFFF),
        rendezvous_window=st.integers(1, 0xFFFF),
        slot_size=st.integers(64, 0xFFFFFFFF),
        max_message_kib=st.integers(1, 0xFFFFFFFF),
        user_data=st.binary(max_size=max_user),
    )


# ---- handshake -----------------------------------------------------------------------------


def test_hello_has_the_documented_bytes() -> None:
    hello = Hello(0x0102, 0x0304, 0x05060708, 0x090A0B0C, b"user")
    assert hello.pack(REQUEST_ROOM) == bytes.fromhex(
        "61695244"  # magic "aiRD"
        "01010504"  # version, lowest version, flags, length of the program's bytes
        "01020304"  # data receives, rendezvous window
        "05060708"  # slot size
        "090a0b0c"  # largest message, KiB
        "75736572"
    )
    assert HELLO_SIZE == 20


@given(hellos(REQUEST_ROOM - HELLO_SIZE), st.integers(0, 140))
def test_hello_survives_the_padding_of_the_field(hello: Hello, padding: int) -> None:
    assert Hello.parse(hello.pack(REQUEST_ROOM) + bytes(padding)) == hello


@pytest.mark.parametrize(("room", "most"), [(REQUEST_ROOM, 36), (REPLY_ROOM, 176)])
def test_user_data_fits_to_the_last_byte_and_not_one_more(room: int, most: int) -> None:
    assert len(Hello(1, 1, 64, 1, b"x" * most).pack(room)) == room
    with pytest.raises(ValueError, match=f"{most + 1} bytes does not fit: .* room for {most}"):
        Hello(1, 1, 64, 1, b"x" * (most + 1)).pack(room)


@given(st.binary(max_size=256))
@example(b"")
@example(b"aiRD")
@example(b"aiRD" + bytes(15))
@example(b"aiRD" + bytes(16))
def test_parsing_a_hello_is_total(data: bytes) -> None:
    try:
        hello = Hello.parse(data)
    except ProtocolError:
        assert data.startswith(b"aiRD")
        return
    if hello is None:
        assert not data.startswith(b"aiRD")
        return
    assert len(data) >= HELLO_SIZE + len(hello.user_data)
    assert hello.recv_depth >= 1
    assert hello.rendezvous_window >= 1
    assert hello.slot_size >= 64
    assert hello.version == VERSION


@given(hellos(36), st.data())
def test_damage_to_a_hello_is_an_error_or_another_valid_hello(
    hello: Hello, data: st.DataObject
) -> None:
    packed = bytearray(hello.pack(REQUEST_ROOM))
    at = data.draw(st.integers(4, len(packed) - 1))
    packed[at] = data.draw(st.integers(0, 255))
    try:
        other = Hello.parse(bytes(packed))
    except ProtocolError:
        return
    assert other is not None
    assert other.slot_size >= 64
    assert len(other.user_data) <= len(packed) - HELLO_SIZE


@pytest.mark.parametrize("length", range(4, HELLO_SIZE))
def test_a_hello_that_is_cut_off_is_an_error(length: int) -> None:
    with pytest.raises(ProtocolError, match="too short") as caught:
        Hello.parse(Hello(1, 1, 64, 1).pack(REQUEST_ROOM)[:length])
    assert caught.value.errno == errno.EPROTO


def test_a_length_beyond_the_field_is_an_error() -> None:
    packed = bytearray(Hello(1, 1, 64, 1, b"abc").pack(REQUEST_ROOM))
    packed[7] = 4
    with pytest.raises(ProtocolError, match="announces 4 bytes, has 3"):
        Hello.parse(bytes(packed))


def test_g03_a_hello_of_a_peer_that_takes_no_messages_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="takes no messages"):
        Hello.parse(Hello(1, 1, 64, 0).pack(REQUEST_ROOM))


@pytest.mark.parametrize("hello", [Hello(0, 1, 64, 1), Hello(1, 0, 64, 1), Hello(1, 1, 63, 1)])
def test_numbers_that_make_no_sense_are_an_error(hello: Hello) -> None:
    with pytest.raises(ProtocolError, match="handshake with depth"):
        Hello.parse(hello.pack(REQUEST_ROOM))


@pytest.mark.parametrize(
    ("version", "lowest", "spoken"), [(1, 1, 1), (2, 1, 1), (255, 1, 1), (1, 0, 1), (9, 0, 1)]
)
def test_a_newer_peer_that_understands_us_is_spoken_to(
    version: int, lowest: int, spoken: int
) -> None:
    packed = Hello(1, 1, 64, 1, version=version, min_version=lowest).pack(REQUEST_ROOM)
    hello = Hello.parse(packed)
    assert hello is not None
    assert hello.version == spoken


@pytest.mark.parametrize(("version", "lowest"), [(2, 2), (255, 2), (0, 0)])
def test_no_common_version_is_an_error_that_names_both(version: int, lowest: int) -> None:
    packed = Hello(1, 1, 64, 1, version=version, min_version=lowest).pack(REQUEST_ROOM)
    with pytest.raises(ProtocolError, match=f"versions {lowest} to {version} .* this side 1 to 1"):
        Hello.parse(packed)


@pytest.mark.parametrize("flags", range(256))
def test_flags_that_have_no_meaning_are_ignored(flags: int) -> None:
    hello = Hello(1, 1, 64, 1, flags=flags & ~0x20)  # which is reserved
    packed = hello.pack(REQUEST_ROOM)
    assert packed[6] == flags & ~0x20
    assert Hello.parse(packed) == hello
    told = packed[:6] + bytes([flags]) + packed[7:]
    assert Hello.parse(told + bytes(8)) == hello, "a peer that means more is understood"


# ---- frames --------------------------------------------------------------------------------


def test_frame_has_the_documented_bytes() -> None:
    header = FRAME.pack(FrameKind.DATA, FRAME_HAS_IMM, 0x0203, 0x04050607, 0x08090A0B0C0D0E0F)
    assert header == bytes.fromhex("0101 0203 04050607 08090a0b0c0d0e0f")
    assert len(header) == FRAME_SIZE == 16


def test_rendezvous_body_has_the_documented_bytes() -> None:
    body = RENDEZVOUS.pack(0x0102030405060708, 0x090A0B0C, 0x0D0E0F10)
    assert body == bytes(range(1, 17))
    assert RENDEZVOUS.size == 16
    assert wire.CHECKSUM.pack(0x01020304) == bytes(range(1, 5))
    assert wire.NOTE.pack(0x01020304, 0x05060708090A0B0C) == bytes(range(1, 13))


def test_frame_kinds_and_flags_never_change() -> None:
    assert [(kind.name, kind.value) for kind in FrameKind] == [
        ("CREDIT", 0), ("DATA", 1), ("RENDEZVOUS", 2), ("DONE", 3), ("PING", 4), ("PONG", 5),
        ("END", 6), ("ABORT", 7), ("NOTE", 8),
    ]  # fmt: skip
    assert FRAME_HAS_IMM == 1


# ---- refusals ------------------------------------------------------------------------------


def delivered(sealed: bytes) -> bytes:
    """What arrives on InfiniBand and RoCE: the whole field."""
    assert len(sealed) <= REFUSAL_ROOM
    return sealed.ljust(REFUSAL_ROOM, b"\0")


@given(st.binary(max_size=REFUSAL_ROOM))
@example(b"aiRJ")
@example(b"aiRJ\x01\x01")
@example(b"aiRJ\x01 of the program's own")
@example(b"x" * 147 + b"\x80")
@example(b"x" * 148)
@example(bytes(148))
def test_a_refusal_arrives_exactly_or_is_refused_at_once(data: bytes) -> None:
    try:
        sealed = seal_refusal(data)
    except ValueError:
        # Only what cannot be told from padding, or from the library's own words.
        assert len(data) == REFUSAL_ROOM or data.startswith(b"aiRJ")
        return
    assert parse_refusal(delivered(sealed)) == (data, "")


@pytest.mark.parametrize("tail", [b"\x80", b"\x80\0", b"\x80\0\0\0"])
def test_148_bytes_that_look_like_padding_are_refused(tail: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be told from padding"):
        seal_refusal(b"x" * (REFUSAL_ROOM - len(tail)) + tail)
    with pytest.raises(ValueError, match="cannot be told from padding"):
        seal_refusal(bytes(REFUSAL_ROOM))


def test_149_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 148"):
        seal_refusal(b"x" * 149)


@given(st.binary(max_size=256))
@example(b"aiRJ")
@example(b"aiRJ\0")
@example(b"aiRJ\xff")
def test_parsing_a_refusal_is_total(data: bytes) -> None:
    user_data, words = parse_refusal(data)
    assert isinstance(user_data, bytes)
    assert isinstance(words, str)
    assert user_data == b"" or words == ""


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_each_reason_of_the_library_has_words(reason: RefusalReason) -> None:
    sealed = refusal(reason)
    assert sealed == b"aiRJ" + bytes([reason, VERSION])
    user_data, words = parse_refusal(delivered(sealed))
    assert user_data == b""
    assert words
    assert "reason" not in words


def test_a_reason_of_a_newer_library_is_shown_as_a_number() -> None:
    assert parse_refusal(delivered(b"aiRJ\xc8\x02")) == (b"", "refused for reason 200")


def test_a_refusal_without_bytes_is_empty() -> None:
    assert parse_refusal(b"") == (b"", "")
    assert parse_refusal(bytes(148)) == (b"", "")


def test_bytes_of_a_foreign_peer_come_as_they_are() -> None:
    assert parse_refusal(delivered(b"no thanks")) == (delivered(b"no thanks"), "")


def test_b04_an_abort_says_why() -> None:
    causes: dict[AbortReason | None, BaseException] = {
        AbortReason.PROTOCOL: ProtocolError(errno.EPROTO, "x"),
        AbortReason.TIMEOUT: RdmaTimeoutError(errno.ETIMEDOUT, "x"),
        AbortReason.MEMORY: MemoryError(),
        AbortReason.DAMAGED: ConnectionLostError(errno.EBADMSG, "x"),
        None: completion_error(12, operation="send"),
    }
    for reason, cause in causes.items():
        assert abort_reason(cause) is reason
    texts = {str(aborted_error(reason)) for reason in AbortReason}
    assert len(texts) == len(AbortReason)
    assert isinstance(aborted_error(AbortReason.PROTOCOL), ProtocolError)
    assert "this side broke the protocol" in str(aborted_error(1))
    assert "reason 4711" in str(aborted_error(4711))
    assert all(aborted_error(reason).hint for reason in (*AbortReason, 1 << 63))


def test_the_kinds_of_frames_are_those_of_c() -> None:
    assert tuple(kind.name for kind in sorted(FrameKind)) == FRAME_KINDS
    assert sorted(FrameKind) == list(range(len(FRAME_KINDS)))


@pytest.mark.parametrize("name", VIOLATIONS)
def test_there_are_words_for_each_violation(name: str) -> None:
    error = violation(name, 1, 2)
    assert str(error)
    assert isinstance(error, ProtocolError) == (name != "TURN"), "of the peer, or of the adapter"
