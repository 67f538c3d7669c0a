"""What a hostile peer of the rsockets protocol sends: chosen by a seed, mostly almost right.

Pure noise is refused at the first check.  What gets further is nearly right: one field beside its
bound, a word that was right a moment ago, a descriptor in the wrong place.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from aiordma.rsocket import HELLO_SIZE, Descriptor, Hello

DISCONNECT, KEEPALIVE, SHUTDOWN = 0xE0000000, 0xE0000001, 0xE0000002
_EDGES = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, (1 << 29) - 1)
_FIELDS = {
    "credits": 16, "table_addr": 64, "table_key": 32, "table_length": 32, "buffer_addr": 64,
    "buffer_key": 32, "buffer_length": 32, "iomap_slots": 15,
}  # fmt: skip


def number(rng: Random, bits: int) -> int:
    """A number of at most so many bits, often at an edge."""
    value = rng.choice((
        rng.choice(_EDGES),
        (1 << bits) - 1 - rng.choice(_EDGES),
        rng.getrandbits(bits),
        rng.getrandbits(rng.randint(1, bits)),
    ))  # fmt: skip
    return max(0, value) & ((1 << bits) - 1)


def private_data(rng: Random, good: Hello) -> bytes:
    """A handshake: as it should be, one field changed, one bit, cut off, or noise."""
    what = rng.randrange(10)
    if what < 3:
        return good.pack() + bytes(rng.choice((0, 16, 156)))
    if what < 6:
        name = rng.choice(list(_FIELDS))
        return replace(good, **{name: number(rng, _FIELDS[name])}).pack()  # type: ignore[arg-type]
    data = bytearray(good.pack())
    if what < 8:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif what == 8:
        del data[rng.randrange(len(data)) :]
    else:
        data[:] = rng.randbytes(rng.choice((0, 1, HELLO_SIZE, 56, 196)))
    return bytes(data)


def right_word(rng: Random, *, limit: int, left: int) -> int:
    """A word that keeps the rules, if `left` bytes may be sent and `limit` may be said."""
    if left and rng.randrange(4):
        return rng.choice((left, rng.randint(1, left)))
    return rng.choice((0x80000000 | limit & 0x1FFFFFFF, KEEPALIVE, 0xE0000003))


def word(rng: Random, *, limit: int, left: int) -> int:
    """A word, given the limit of messages and the bytes of buffer that would be right."""
    what = rng.randrange(8)
    if what < 2:
        return max(0, left + rng.randint(-1, 2))
    if what == 2:
        return number(rng, 29)
    if what == 3:
        return 0x80000000 | max(0, limit + rng.choice((1, 2, -1, 0x10000))) & 0x1FFFFFFF
    if what == 4:
        return 0x80000000 | number(rng, 29)
    if what == 5:
        return 0xC0000000 | rng.choice((0, 1, 2, number(rng, 16)))
    if what == 6:
        return rng.choice((SHUTDOWN, DISCONNECT, 0xFFFFFFFF))
    return rng.getrandbits(32)


def descriptor(rng: Random, good: Descriptor) -> bytes:
    """16 bytes for a table: a buffer, one that makes no sense, or noise."""
    what = rng.randrange(6)
    if what < 3:
        return good.pack(False)
    if what == 3:
        changed = good._replace(addr=number(rng, 64), length=number(rng, 32))
        return changed.pack(bool(rng.randrange(2)))
    if what == 4:
        return good._replace(length=0).pack(False)
    return rng.randbytes(16)
