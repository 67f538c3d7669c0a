"""Keys: what is made of a secret, and the proofs, with fixed vectors."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import hmac
import pickle
import struct
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import AuthenticationError, ConnectionConfig, Keys
from aiordma.endpoint.keys import (
    ANSWER_SIZE,
    REQUEST_SIZE,
    Claim,
    Ends,
    Pledge,
    claims_key,
    plain_hello,
)
from aiordma.endpoint.wire import Hello

SECRET = bytes(range(32))
HELLO = Hello(3, 8, 5888, 65536, b"data").pack(56)
ANSWER_HELLO = Hello(3, 4, 4096, 1024, b"").pack(196)
NONCE, OTHER = b"c" * 16, b"l" * 16
CLIENT, LISTENER = ("192.0.2.1", 40_000), ("192.0.2.2", 18_515)
GID = bytes(range(100, 116))
ENDS = Ends(CLIENT, LISTENER, GID)


def sha(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def handshake(ours: Keys, theirs: Keys, ends: Ends = ENDS) -> tuple[Pledge, Claim, bytes, bytes]:
    """The client's side, the listener's, the answer, and the proof that the listener expects."""
    pledge = Pledge(ours, HELLO, NONCE)
    claim = Claim.of(theirs, pledge.request + bytes(7))
    assert claim is not None
    answer, expected = claim.answer(ANSWER_HELLO, ends, OTHER)
    return pledge, claim, answer, expected


def test_the_bytes_are_as_docs_wire_says() -> None:
    """Each byte made here again, by the words of the page."""
    pledge, claim, answer, expected = handshake(
        Keys({"2026-11": SECRET}), Keys({"2026-11": SECRET})
    )
    extracted = sha(b"aiordma keys 1", SECRET)
    tag_key, listener_key, client_key = (
        sha(extracted, label + b"\x01") for label in (b"tag", b"listener", b"client")
    )
    flagged = HELLO[:6] + bytes([HELLO[6] | 0x20]) + HELLO[7:]
    request = flagged + b"\x01" + sha(tag_key, b"2026-11")[:8] + NONCE
    assert pledge.request == request
    assert len(request) == len(HELLO) + REQUEST_SIZE == len(HELLO) + 25
    flagged = ANSWER_HELLO[:6] + bytes([ANSWER_HELLO[6] | 0x20]) + ANSWER_HELLO[7:]
    said = flagged + b"\x01" + OTHER
    mapped = bytes(10) + b"\xff\xff"
    transcript = (
        struct.pack("!H", len(request)) + request + struct.pack("!H", len(said)) + said
        + mapped + bytes([192, 0, 2, 1]) + mapped + bytes([192, 0, 2, 2])
        + struct.pack("!H", 18_515) + GID
    )  # fmt: skip
    proof = sha(listener_key, transcript)
    assert answer == said + proof
    assert len(answer) == len(ANSWER_HELLO) + ANSWER_SIZE == len(ANSWER_HELLO) + 49
    assert expected == sha(client_key, transcript + proof)
    assert pledge.check(answer + bytes(100), ENDS) == expected
    assert pledge.key_id == claim.key_id == "2026-11"


def test_fixed_vectors() -> None:
    """They change only with the version of the handshake: an older library has these bytes."""
    pledge, _, answer, expected = handshake(Keys({"2026-11": SECRET}), Keys({"2026-11": SECRET}))
    assert pledge.request[-24:-16].hex() == VECTORS[0]
    assert answer[-32:].hex() == VECTORS[1]
    assert expected.hex() == VECTORS[2]


VECTORS = (
    "f85ed200a33b46c3",
    "4b3aa2d85ab5736f87ef672da92c00c72fafdd174ff11a197a2858d1d04fecda",
    "192ece64416a92d83c9e41a52da95273fe79069d72b5ef8bd7ecef665bb81787",
)


def test_what_is_sent_for_a_key_leaves_the_hello_as_it_was() -> None:
    pledge, _, answer, _ = handshake(Keys({"a": SECRET}), Keys({"a": SECRET}))
    for data, plain in ((pledge.request, HELLO), (answer, ANSWER_HELLO)):
        assert Hello.parse(data + bytes(10)) == Hello.parse(plain)
        assert Hello.parse(plain_hello(data)) == Hello.parse(plain)
    assert claims_key(pledge.request)
    assert not claims_key(HELLO)
    assert not claims_key(HELLO + bytes(20))


@pytest.mark.parametrize("padding", [0, 28])
@pytest.mark.parametrize("first", [1, 0xFF])
def test_the_number_of_a_loop_of_an_older_version_is_no_key(first: int, padding: int) -> None:
    old = HELLO[:6] + bytes([HELLO[6] | 0x20]) + HELLO[7:] + bytes([first] * 8) + bytes(padding)
    assert not claims_key(old)


def test_no_two_handshakes_are_the_same() -> None:
    keys = Keys({"a": SECRET})
    requests = {Pledge(keys, HELLO).request for _ in range(100)}
    assert len(requests) == 100
    claim = Claim.of(keys, requests.pop())
    assert claim is not None
    answers = {claim.answer(ANSWER_HELLO, ENDS) for _ in range(100)}
    assert len({proof for _, proof in answers}) == len(answers) == 100


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"a": SECRET}, {"a": SECRET[::-1]}), ({"a": SECRET}, {"b": SECRET})],
)
def test_another_secret_and_another_name_are_no_key(ours: Any, theirs: Any) -> None:
    assert Claim.of(Keys(theirs), Pledge(Keys(ours), HELLO).request) is None


def test_a_client_uses_its_first_key_and_a_listener_takes_all() -> None:
    both = Keys({"new": SECRET, "old": SECRET[::-1]})
    assert Pledge(both, HELLO).key_id == "new"
    for keys in ({"new": SECRET}, {"old": SECRET[::-1]}):
        pledge, claim, answer, expected = handshake(Keys(keys), both)
        assert pledge.check(answer, ENDS) == expected
        assert claim.key_id == pledge.key_id
    both.replace({"new": SECRET})
    assert both.ids == ("new",)
    assert Claim.of(both, Pledge(Keys({"old": SECRET[::-1]}), HELLO).request) is None


def test_a_handshake_under_way_ends_with_its_key() -> None:
    old = {"old": SECRET[::-1]}
    ours, theirs = Keys(old), Keys(old)
    pledge, claim, answer, expected = handshake(ours, theirs)
    for keys in (ours, theirs):
        keys.replace({"new": SECRET, **old})
    assert pledge.check(answer, ENDS) == expected
    assert claim.stands
    for keys in (ours, theirs):
        keys.replace({"old": SECRET})
    assert not claim.stands
    with pytest.raises(AuthenticationError, match="key 'old' was removed"):
        pledge.check(answer, ENDS)


@given(st.data())
def test_any_change_of_the_answer_is_noticed(data: st.DataObject) -> None:
    pledge, _, answer, _ = handshake(Keys({"a": SECRET}), Keys({"a": SECRET}))
    at, bit = data.draw(st.integers(0, len(answer) - 1)), data.draw(st.integers(0, 7))
    changed = answer[:at] + bytes([answer[at] ^ 1 << bit]) + answer[at + 1 :]
    with pytest.raises(AuthenticationError):
        pledge.check(changed, ENDS)


@given(st.data())
def test_any_change_of_the_request_is_noticed(data: st.DataObject) -> None:
    keys = Keys({"a": SECRET})
    pledge = Pledge(keys, HELLO, NONCE)
    at = data.draw(st.integers(0, len(pledge.request) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = pledge.request
    changed = changed[:at] + bytes([changed[at] ^ 1 << bit]) + changed[at + 1 :]
    if not claims_key(changed) or (claim := Claim.of(keys, changed)) is None:
        return
    answer, _ = claim.answer(ANSWER_HELLO, ENDS)
    with pytest.raises(AuthenticationError):
        pledge.check(answer, ENDS)


@pytest.mark.parametrize(
    "ends",
    [
        ENDS._replace(listener=("192.0.2.3", 18_515)),
        ENDS._replace(listener=("192.0.2.2", 18_516)),
        ENDS._replace(client=("192.0.2.9", 40_000)),
        Ends(LISTENER, CLIENT, GID),
        ENDS._replace(listener=None),
        ENDS._replace(gid=bytes(16)),
        ENDS._replace(gid=GID[:-1] + b"x"),
    ],
)
def test_a_handshake_is_of_its_ends_alone(ends: Ends) -> None:
    pledge, _, answer, _ = handshake(Keys({"a": SECRET}), Keys({"a": SECRET}))
    with pytest.raises(AuthenticationError):
        pledge.check(answer, ends)


def test_two_forms_of_an_address_are_the_same() -> None:
    for one, other in (("192.0.2.2", "::ffff:192.0.2.2"), ("fe80::1%eth0", "fe80::1%ib7")):
        keys, gid = Keys({"a": SECRET}), b""
        pledge, _, answer, expected = handshake(keys, keys, Ends(CLIENT, (one, 7), gid))
        assert pledge.check(answer, Ends((CLIENT[0], 1), (other, 7), bytes(16))) == expected


def test_a_proof_of_one_side_is_none_of_the_other() -> None:
    _, _, answer, expected = handshake(Keys({"a": SECRET}), Keys({"a": SECRET}))
    assert answer[-32:] != expected
    assert expected not in answer


@given(st.binary(max_size=256))
def test_any_private_data_are_a_claim_or_not(data: bytes) -> None:
    """The acceptor asks of data that begin with the magic."""
    data = b"aiRD" + data
    if claims_key(data):
        Claim.of(Keys({"a": SECRET}), data)
    with pytest.raises(AuthenticationError):
        Pledge(Keys({"a": SECRET}), HELLO).check(data, ENDS)
    plain_hello(data)


# ---- the class -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"a": b"x" * 15}, ValueError, "needs 16 to 65536"),
        ({"a": b""}, ValueError, "needs 16 to 65536"),
        ({"a": b"x" * 65_537}, ValueError, "needs 16 to 65536"),
        ({"a": "a text is no secret"}, TypeError, "encode"),
        ({"a": None}, TypeError, "key 'a'"),
        ({1: SECRET}, TypeError, "name of a key"),
        ({"": SECRET}, ValueError, "name of a key"),
        ({"x" * 256: SECRET}, ValueError, "name of a key"),
        ({"a\n": SECRET}, ValueError, "name of a key"),
        ({}, ValueError, "at least one key"),
        (SECRET, TypeError, "not bytes"),
        ([("a", SECRET)], TypeError, "not list"),
    ],
)
def test_bad_keys_are_refused_and_not_shown(keys: Any, error: type, words: str) -> None:
    good = Keys({"good": SECRET})
    for call in (Keys, good.replace):
        with pytest.raises(error, match=words) as caught:
            call(keys)
        text = "".join(traceback.format_exception(caught.value))
        assert "xxxxxxxxxxxxxxx" not in text.replace(repr("x" * 256), "")
        assert repr(SECRET) not in text
    assert good.ids == ("good",)


def test_a_secret_is_nowhere_to_be_seen() -> None:
    secret = b"an-ascii-secret-to-look-for"
    keys = Keys({"a": secret})
    config = ConnectionConfig(keys=keys)
    for each in (keys, config, Pledge(keys, HELLO), dataclasses.replace(config, recv_depth=4)):
        assert "ascii" not in repr(each)
    for each in (keys, config):
        for call in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot copy or pickle a Keys"):
                call(each)
    for wrong in ({"a": secret}, secret):
        with pytest.raises(TypeError, match="keys has to be a Keys") as caught:
            ConnectionConfig(keys=wrong)  # type: ignore[arg-type]
        assert "ascii" not in str(caught.value)


def test_a_secret_may_be_any_buffer_and_is_copied() -> None:
    secret = bytearray(SECRET)
    keys = Keys({"a": secret})
    secret[:] = bytes(32)
    assert Claim.of(keys, Pledge(Keys({"a": memoryview(SECRET)}), HELLO).request) is not None


def test_a_raw_connection_has_no_keys() -> None:
    with pytest.raises(ValueError, match="raw connection cannot have keys"):
        ConnectionConfig(raw=True, keys=Keys({"a": SECRET}))
