"""Keys: secrets by which the two sides of a connection prove to each other that they belong there.

Theory of operation
    No secret is sent.  The client's request has the tag of a key and a nonce, the listener's answer
    has a nonce and a proof, and the client's first frame has a proof: these are the three steps
    that a handshake has anyway.  A proof is an HMAC-SHA256 of everything that both have said, and
    of their addresses.  The two sides derive different keys for their proofs, so that a proof is of
    no use against the side that has sent it.

    C refuses each frame of a peer that has proved nothing (`pass_gate` in _core/connection.c).
    docs/wire.md, "Keys", is the specification; this file and that page change together.

The peer chooses everything that arrives here, and this side's program chooses what is sent.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import struct
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from aiordma._core import PROOF_SIZE
from aiordma.arguments import Buffer, bytes_of
from aiordma.cm.address import Address
from aiordma.endpoint.wire import HELLO_SIZE, MORE_FLAGS
from aiordma.errors import AuthenticationError
from aiordma.loop.uncopied import Uncopied

__all__ = [
    "ANSWER_SIZE",
    "MOST_BYTES",
    "REQUEST_SIZE",
    "Claim",
    "Ends",
    "Keys",
    "Pledge",
    "claims_key",
    "plain_hello",
    "removed_error",
]

_SMALLEST = 16
MOST_BYTES = 1 << 16
_LONGEST_ID = 255
_TAG_SIZE = 8
_NONCE_SIZE = 16
#: The bit of the further flags of a hello that has a key.
_HAS_KEY = 0x01
_FLAGS = bytes((_HAS_KEY,))
#: The bytes that a key takes of the private data of a request, and of an answer.
REQUEST_SIZE = 1 + _TAG_SIZE + _NONCE_SIZE
ANSWER_SIZE = 1 + _NONCE_SIZE + PROOF_SIZE
# Offsets in a hello, which HELLO_SIZE bytes and the program's data are.
_AT_FLAGS = 6
_AT_LENGTH = 7

# The salt and the labels of HKDF-SHA256 (RFC 5869), which makes three keys of each secret.
_SALT = b"aiordma keys 1"
_LABELS = (b"tag", b"listener", b"client")

_ENDS = struct.Struct("!16s16sH16s")
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address as IPv6 follows


class Ends(NamedTuple):
    """Where the two sides are, as both see it.

    Attributes:
        client: The client's address; None where it is not known.
        listener: The listener's.
        gid: The listener's GID; empty on iWARP.
    """

    client: Address | None
    listener: Address | None
    gid: bytes


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


class _Key:
    """The keys that are derived from one secret."""

    __slots__ = ("client", "id", "listener", "tag")

    def __init__(self, name: str, secret: bytes) -> None:
        extracted = _hmac(_SALT, secret)
        tag, listener, client = (_hmac(extracted, label + b"\1") for label in _LABELS)
        self.listener: bytes = listener
        self.client: bytes = client
        self.id: str = name
        self.tag: bytes = _hmac(tag, name.encode())[:_TAG_SIZE]

    def __repr__(self) -> str:
        return f"<key {self.id!r}>"


class Keys(Uncopied):
    """Secrets by which a client and a listener prove to each other that they have the same one.

    Both sides get one as `ConnectionConfig(keys=...)`.  A client uses the first of its keys, and a
    listener accepts clients with any of its keys.  To replace a key without refusing a client, add
    the new key to the listeners, as the last; then have clients use it; then remove the old one
    from the listeners.

    A secret is never sent, and neither `repr`, nor an error, nor a log shows it; the object can
    be neither copied nor pickled.  The names of keys are no secrets.

    Args:
        keys: Secrets by their names, for instance `{"2026-11": secret}`.  A name has 1 to 255
            characters, and is the same on both sides.  A secret has at least 16 random bytes, as
            from `secrets.token_bytes(32)`: anybody who has seen a handshake can guess a password.

    Raises:
        TypeError: A name is no str, or a secret is no buffer; a str is none.
        ValueError: There is no key, a name is empty or too long, or a secret is too short.
    """

    __slots__ = ("_by_tag", "_first")

    _by_tag: dict[bytes, _Key]
    _first: _Key

    def __init__(self, keys: Mapping[str, Buffer]) -> None:
        self.replace(keys)

    def replace(self, keys: Mapping[str, Buffer]) -> None:
        """Use these keys, and no others, from now on.  May be called in any thread.

        A handshake in progress with a key that is removed fails.  Connections stay as they are:
        `Connection.get_extra_info("key_id")` says which of them to close if a key has leaked.

        Args:
            keys: As for the class.

        Raises:
            TypeError, ValueError: As for the class; the old keys stay.
        """
        if not isinstance(keys, Mapping):
            # Not its repr, which may be a secret.
            msg = f"keys has to be a mapping of names to secrets, not {type(keys).__name__}"
            raise TypeError(msg)
        made = [_Key(*_checked(name, secret)) for name, secret in keys.items()]
        if not made:
            msg = "there has to be at least one key; to use no keys, leave the setting out"
            raise ValueError(msg)
        by_tag = {key.tag: key for key in made}
        if len(by_tag) < len(made):
            msg = "two of the keys cannot be told apart: rename one"
            raise ValueError(msg)
        self._by_tag, self._first = by_tag, made[0]

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the keys, in their order."""
        return tuple(key.id for key in self._by_tag.values())

    def _have(self, key: _Key) -> bool:
        """Whether a key with which a handshake began was not removed meanwhile."""
        return key.tag in self._by_tag

    def __repr__(self) -> str:
        return f"<Keys {', '.join(map(repr, self.ids))}>"


def _checked(name: str, secret: Buffer) -> tuple[str, bytes]:
    """A name and its secret; no error shows the secret."""
    if not isinstance(name, str):
        msg = f"the name of a key has to be a str, not {type(name).__name__}"
        raise TypeError(msg)
    if not 0 < len(name) <= _LONGEST_ID or not name.isprintable():
        msg = f"the name of a key has 1 to {_LONGEST_ID} printable characters"
        raise ValueError(msg)
    data = bytes(bytes_of(f"key {name!r}", secret))
    if not _SMALLEST <= len(data) <= MOST_BYTES:
        msg = (
            f"key {name!r} has {len(data)} bytes, and needs {_SMALLEST} to {MOST_BYTES}: make one "
            "by secrets.token_bytes(32)"
        )
        raise ValueError(msg)
    return name, data


def _packed(address: Address | None) -> bytes:
    """An IP address as 16 bytes, an IPv4 address as IPv6 maps it; zeros where it is not known."""
    if address is None:
        return bytes(16)
    ip: IPv4Address | IPv6Address = ip_address(address[0])
    return _MAPPED + ip.packed if ip.version == 4 else ip.packed


def _transcript(request: bytes, answer: bytes, ends: Ends) -> bytes:
    """What both sides have said, and where.

    The GID is for InfiniBand, where any user may write addresses into a request; on RoCE it follows
    from the address.
    """
    client, at, gid = ends
    return b"".join(
        (
            len(request).to_bytes(2),
            request,
            len(answer).to_bytes(2),
            answer,
            _ENDS.pack(_packed(client), _packed(at), 0 if at is None else at[1], gid),
        )
    )


def _flagged(hello: bytes) -> bytes:
    """The hello of a side that has a key, with its byte of further flags."""
    flags = bytes((hello[_AT_FLAGS] | MORE_FLAGS,))
    return hello[:_AT_FLAGS] + flags + hello[_AT_FLAGS + 1 :] + _FLAGS


def _part_of(data: bytes, size: int) -> int:
    """Where a key's bytes begin in private data that begin with the magic; 0 if there is no key.

    Versions before 0.1.0 set the same flag, and have 8 random bytes there.  So bytes that are cut
    off, or whose nonce is zeros, which are padding, are no key.
    """
    if len(data) < HELLO_SIZE or not data[_AT_FLAGS] & MORE_FLAGS:
        return 0
    at = HELLO_SIZE + data[_AT_LENGTH]
    if len(data) < at + size or not data[at] & _HAS_KEY:
        return 0
    return at if any(data[at + size - _NONCE_SIZE : at + size]) else 0


class Pledge:
    """A client's side of one handshake.

    Args:
        keys: The keys, of which the first is used.
        hello: The client's hello, with the program's data.
        nonce: A nonce for tests; None for a random one.

    Attributes:
        request: The private data of the request.
        key_id: The name of the key.
    """

    __slots__ = ("_key", "_keys", "request")

    def __init__(self, keys: Keys, hello: bytes, nonce: bytes | None = None) -> None:
        self._keys = keys
        self._key = keys._first
        nonce = secrets.token_bytes(_NONCE_SIZE) if nonce is None else nonce
        self.request: bytes = _flagged(hello) + self._key.tag + nonce

    @property
    def key_id(self) -> str:
        """The name of the key."""
        return self._key.id

    def check(self, answer: bytes, ends: Ends) -> bytes:
        """Return the proof of this side, if the listener has proved itself.

        Args:
            answer: The private data of the answer.
            ends: Where the two sides are.

        Raises:
            AuthenticationError: It has not, or the key was removed meanwhile.
        """
        at = _part_of(answer, ANSWER_SIZE)
        if not at:
            text = f"the listener has not proved that it has key {self.key_id!r}: it knows no keys"
            raise AuthenticationError(errno.EACCES, text)
        end = at + ANSWER_SIZE
        said, proof = answer[: end - PROOF_SIZE], answer[end - PROOF_SIZE : end]
        transcript = _transcript(self.request, said, ends)
        if not hmac.compare_digest(proof, _hmac(self._key.listener, transcript)):
            text = (
                f"the listener has not proved that it has key {self.key_id!r}: it has no such key, "
                "or another one"
            )
            raise AuthenticationError(errno.EACCES, text)
        if not self._keys._have(self._key):
            raise removed_error(self.key_id)
        return _hmac(self._key.client, transcript + proof)


class Claim:
    """A listener's side of one handshake: a client claims to have a key, and has to prove it.

    Attributes:
        key_id: The name of the key.
    """

    __slots__ = ("_key", "_keys", "_request")

    def __init__(self, keys: Keys, key: _Key, request: bytes) -> None:
        self._keys = keys
        self._key = key
        self._request = request

    @classmethod
    def of(cls, keys: Keys, data: bytes) -> Claim | None:
        """The claim in a request for which `claims_key` is true; None if there is no such key."""
        end = _part_of(data, REQUEST_SIZE) + REQUEST_SIZE
        tag = data[end - _NONCE_SIZE - _TAG_SIZE : end - _NONCE_SIZE]
        key = keys._by_tag.get(tag)
        return None if key is None else cls(keys, key, data[:end])

    @property
    def key_id(self) -> str:
        """The name of the key."""
        return self._key.id

    @property
    def stands(self) -> bool:
        """Whether the listener still has the key."""
        return self._keys._have(self._key)

    def answer(self, hello: bytes, ends: Ends, nonce: bytes | None = None) -> tuple[bytes, bytes]:
        """Return the private data of the answer, and the proof that the client has to send.

        Args:
            hello: The hello of this side, with the program's data.
            ends: Where the two sides are.
            nonce: A nonce for tests; None for a random one.
        """
        said = _flagged(hello) + (secrets.token_bytes(_NONCE_SIZE) if nonce is None else nonce)
        transcript = _transcript(self._request, said, ends)
        proof = _hmac(self._key.listener, transcript)
        return said + proof, _hmac(self._key.client, transcript + proof)


def removed_error(key_id: str) -> AuthenticationError:
    """The error of a handshake whose key this side has removed meanwhile."""
    return AuthenticationError(errno.EACCES, f"key {key_id!r} was removed during the handshake")


def claims_key(data: bytes) -> bool:
    """Whether a client, whose private data begin with the magic, wants proofs."""
    return _part_of(data, REQUEST_SIZE) > 0


def plain_hello(data: bytes) -> bytes:
    """Private data without the nonces, which differ each time, so that `Hello.parse` caches them.

    Data that are cut off stay so.
    """
    return data[: HELLO_SIZE + data[_AT_LENGTH]] if len(data) >= HELLO_SIZE else data
