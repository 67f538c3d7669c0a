"""The exchange of the pingpong programs of rdma-core, and their command lines.

A line of hexadecimal numbers and a NUL: LID, number of the queue pair, first PSN, GID.  The client
speaks first; the server answers when its queue pair is connected, and the client says "done".
"""

from __future__ import annotations

import asyncio

from aiordma.verbs import MTU, QPAddress

SIZE = 4096
DATAGRAM = 512  # within every MTU
ROUNDS = 20
#: What is in the memory of the programs before they have received anything.
FRESH = b"\x7b"
PATH_MTU = MTU.MTU_1024
QKEY = 0x11111111
DONE = b"done\0"
_LINE = len("0000:000000:000000:00000000000000000000000000000000") + 1


def command(kind: str, device: str, gid_index: str, port: int, *options: str) -> tuple[str, ...]:
    """The command; with a host as the last option it is the client."""
    size = DATAGRAM if kind == "ud" else SIZE
    return (
        f"ibv_{kind}_pingpong", "-d", device, "-g", gid_index, "-p", str(port), "-s", str(size),
        "-n", str(ROUNDS), *options,
    )  # fmt: skip


def line(address: QPAddress) -> bytes:
    """The address as it travels."""
    numbers = f"{address.lid:04x}:{address.qp_num:06x}:{address.psn:06x}"
    return f"{numbers}:{address.gid.hex()}\0".encode()


async def read_line(reader: asyncio.StreamReader) -> QPAddress:
    """The address that the other end sends."""
    text = (await reader.readexactly(_LINE)).rstrip(b"\0").decode()
    lid, number, psn, gid = text.split(":")
    return QPAddress(
        lid=int(lid, 16), qp_num=int(number, 16), psn=int(psn, 16), gid=bytes.fromhex(gid)
    )
