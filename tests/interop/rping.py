"""What rping says: the words of its protocol, the bytes of its pings, its command lines."""

from __future__ import annotations

import struct

from tests.interop.program import Program, assert_bytes

#: Address, key and size of the memory to read or to write; in the server's messages nothing.
INFO = struct.Struct("!QII")
#: The usual one, and the largest.
SIZES = [64, 65_535]
COUNT = 5


def ping(number: int, size: int) -> bytes:
    """The text that rping makes for its ping `number`: every byte but the last is a letter."""
    text = bytearray(f"rdma-ping-{number}: ".encode())
    letters = bytes(range(ord("A"), ord("z") + 1))
    first = number % len(letters)
    text += ((letters[first:] + letters[:first]) * (size // len(letters) + 1))[: size - len(text)]
    text[-1] = 0
    return bytes(text)


def assert_shown(rping: Program, prefix: str, size: int) -> None:
    """`rping -v` shows each ping."""
    shown = rping.said(prefix)
    assert len(shown) == COUNT
    for number, text in enumerate(shown):
        assert_bytes(text.encode() + b"\0", ping(number, size))


async def ended_well(rping: Program) -> None:
    """Wait for the end of an rping that has nothing to complain of.

    At its end it closes its event channel while a thread of its own reads from it; now and then
    that thread sees it, and ends the program with 255.
    """
    raced = "rdma_get_cm_event: Bad file descriptor"
    if await rping.over() != 0:
        assert await rping.over() == 255
        assert raced in rping.lines


def rping_client(address: str, port: int, size: int, *options: str) -> tuple[str, ...]:
    """The command of a client that shows what it gets back, and compares it."""
    where = ("-a", address, "-p", str(port))
    return ("rping", "-c", "-v", "-V", "-C", str(COUNT), "-S", str(size), *where, *options)


def rping_server(address: str, port: int, size: int, *options: str) -> tuple[str, ...]:
    """The command of a server."""
    return ("rping", "-s", "-S", str(size), "-a", address, "-p", str(port), *options)
