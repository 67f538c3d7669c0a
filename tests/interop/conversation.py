"""What aiordma and pyverbs say to one another: the words of test_pyverbs.py and pyverbs_peer.py.

Each side shows the other a region and then, the client first, acts on the other's: it reads,
writes, writes with an immediate, adds, compares and swaps, and says that it is done.  What a region
must hold afterwards is known to the last byte.  The standard library alone is used here: one of
the two sides runs under the system's Python.
"""

from __future__ import annotations

import struct

ROLES = ("client", "server")
#: Private data of a request, of an acceptance, of a refusal.
CALL = b"who is there?"
ANSWER = b"come in; " + bytes(range(1, 100))
REFUSAL = b"not you; " + bytes(range(1, 100))

#: Address, key and size of the region that a side shows.
SHOWN = struct.Struct("!QII")
#: Immediates: a region is shown, something was written into it, all is done.
IMM_SHOWN, IMM_WRITTEN, IMM_DONE = 0x00C0FFEE, 0xDEADBEEF, 0xFFFFFFFF

#: A region, and in it: a counter, what is read, what is written, the same with an immediate.
SIZE = 4096
POISON = b"\xa5"
COUNTER, COUNTER_SIZE = 0, 8
READ, READ_SIZE = 256, 512
WRITE, WRITE_SIZE = 1024, 700
WRITE_IMM, WRITE_IMM_SIZE = 2048, 300

#: The counter of each role before, what is added, and what is swapped in.
START = {"client": 1000, "server": (1 << 64) - 3}
ADD = 7
SWAPPED = 0x0123456789ABCDEF

#: Sizes of the messages of the echo, each with this number more than its size as immediate.
ECHOES = (1, 64, 999, 4096)
IMM_ECHO, IMM_BACK = 0x10000000, 0x20000000


def text(role: str, what: str, size: int) -> bytes:
    """Bytes that the other role, or another purpose, does not have."""
    return (f"{what} of the {role}, ".encode() * size)[:size]


def other(role: str) -> str:
    """The other role."""
    return ROLES[1 - ROLES.index(role)]


def added(role: str) -> int:
    """The counter of `role` after the other has added to it; it wraps around."""
    return (START[role] + ADD) % (1 << 64)


def fresh(role: str) -> bytes:
    """The region of `role` before the other acts on it."""
    region = bytearray(POISON * SIZE)
    struct.pack_into("=Q", region, COUNTER, START[role])
    region[READ : READ + READ_SIZE] = text(role, "source", READ_SIZE)
    return bytes(region)


def acted_on(role: str, *, atomics: bool) -> bytes:
    """The region of `role` after the other has acted on it, with atomics or without."""
    region = bytearray(fresh(role))
    if atomics:
        struct.pack_into("=Q", region, COUNTER, SWAPPED)
    actor = other(role)
    region[WRITE : WRITE + WRITE_SIZE] = text(actor, "write", WRITE_SIZE)
    region[WRITE_IMM : WRITE_IMM + WRITE_IMM_SIZE] = text(actor, "immediate", WRITE_IMM_SIZE)
    return bytes(region)
