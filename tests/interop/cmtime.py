"""cmtime, which changed from version to version, and the words by which its sides keep in step.

The program of rdma-core 44 speaks RDMA alone.  Those of 56 and 65 have a TCP connection beside it:
a side sends the number of the step that it has done, and goes on when the same number comes back.
They do everything three times: with one connection, with `-c` of them, and with as many that have
no queue pair behind their number.  Then both sides end.
"""

from __future__ import annotations

import asyncio
import enum
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.interop.program import Program, running

# Numbers of steps.
RESET, INIT_QP, CONNECT, DISCONNECT = 0, 7, 12, 14
_EARLIER = (
    "create id",
    "resolve addr",
    "resolve route",
    "create qp",
    "connect",
    "disconnect",
    "destroy",
)
_LATER = (
    "full connect", "create id", "bind addr", "resolve addr", "resolve route", "create qp",
    "init qp attr", "init qp", "rtr qp attr", "rtr qp", "rts qp attr", "rts qp", "cm connect",
    "establish", "disconnect", "destroy id", "destroy qp",
)  # fmt: skip
#: The name of a step and its figures, as the tables have them.
_ROW = re.compile(r"([a-z ]+?)[ :]+[\d.]+ [\d. ]+$")

#: What the sides of version 65 tell each other at first: an address (sockaddr_storage: family,
#: port, IPv4), and whether they listen there.
_SIDE = struct.Struct("=H2s4s120xI4x")
_CALLS, _LISTENS = 0, 1


class Kind(enum.Enum):
    """How the sides come together; each is seen in the version that is named."""

    ALONE = "44"
    #: TCP to the address and the port that RDMA has, too.
    PAIR = "56"
    #: TCP to an address and a port of their own; whoever binds them first is the root.
    MESH = "65"


@dataclass(frozen=True, slots=True)
class Cmtime:
    """The program that is installed."""

    kind: Kind
    most: int

    @property
    def rounds(self) -> tuple[int, ...]:
        """The numbers of connections at a time that it makes or takes."""
        return (self.most,) if self.kind is Kind.ALONE else (1, self.most, self.most)

    @property
    def table(self) -> list[str]:
        """The first column of all that it prints."""
        return list(_EARLIER if self.kind is Kind.ALONE else _LATER * 2)

    @asynccontextmanager
    async def client(self, address: str, port: int) -> AsyncIterator[Program]:
        """Have it call a listener of ours; its steps are answered as soon as they come."""
        command = ["cmtime", "-c", str(self.most)]
        if self.kind is Kind.ALONE:
            async with running(*command, "-s", address, "-p", str(port)) as client:
                yield client
            return

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self.kind is Kind.MESH:
                theirs = await reader.readexactly(_SIDE.size)
                writer.write(_side(address, port, _LISTENS) + theirs)
            while step := await reader.read(1):
                writer.write(step)
            writer.close()

        tcp = port if self.kind is Kind.PAIR else 0
        async with await asyncio.start_server(answer, address, tcp) as server:
            if self.kind is Kind.PAIR:
                command += ["-s", address, "-p", str(port)]
            else:
                root = server.sockets[0].getsockname()[1]
                command += ["-b", address, "-C", address, "-p", str(root)]
            async with running(*command) as client:
                yield client


class Steps:
    """The TCP connection to a server: where it listens, and how to say that a step is done."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def where(self, address: str) -> int:
        """Tell that we call; the port of its listener."""
        self._writer.write(_side(address, 0, _CALLS))
        family, port, _, role = _SIDE.unpack(await self._reader.readexactly(_SIDE.size))
        assert (family, role) == (socket.AF_INET, _LISTENS)
        await self._reader.readexactly(_SIDE.size)  # ours
        return int.from_bytes(port, "big")

    async def done(self, step: int) -> None:
        """Say that a step is done here, and wait until it is there."""
        self._writer.write(bytes([step]))
        assert await self._reader.readexactly(1) == bytes([step])


async def installed(most: int) -> Cmtime:
    """The program, for `most` connections at a time."""
    async with running("cmtime", "-h") as asked:
        await asked.over()
    said = "\n".join(asked.lines)
    assert "usage: cmtime" in said
    if "-C controller" in said:
        return Cmtime(Kind.MESH, most)
    return Cmtime(Kind.PAIR if "num_threads" in said else Kind.ALONE, most)


@asynccontextmanager
async def dialed(server: Program, address: str, port: int) -> AsyncIterator[Steps]:
    """A TCP connection to a server, as soon as it listens."""
    reader, writer = await _reached(server, address, port)
    try:
        yield Steps(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


async def _reached(
    server: Program, address: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(address, port)
        except ConnectionRefusedError:
            if server.ended:
                raise


def steps_of(lines: list[str]) -> list[str]:
    """The first column of the tables that it has printed."""
    return [row[1] for line in lines if (row := _ROW.match(line))]


def _side(address: str, port: int, role: int) -> bytes:
    return _SIDE.pack(socket.AF_INET, port.to_bytes(2, "big"), socket.inet_aton(address), role)
