"""rping in Python: `python rping.py client|server HOST [PORT]`, with rdma-core's rping as the peer.

    rping -s -v -a HOST             python rping.py client HOST
    python rping.py server HOST     rping -c -v -V -C 3 -a HOST

For a peer that is not aiordma, `raw=True` leaves messages as they are, a `RemoteRegion` is made
from the peer's numbers, and `expose` gives the numbers that the peer needs.
"""

import asyncio
import contextlib
import struct
import sys

import aiordma
from aiordma.verbs import Access

RAW = aiordma.ConnectionConfig(raw=True)
INFO = struct.Struct("!QII")  # address, key, bytes
RIGHTS = Access.REMOTE_READ | Access.REMOTE_WRITE


async def ping(conn: aiordma.Connection, text: bytes) -> bytes:
    """Show the peer a text to read, and a place to write it to."""
    source, sink = bytearray(text), bytearray(len(text))
    async with conn.expose(source, read=True) as there, conn.expose(sink, write=True) as back:
        for region in (there, back):
            await conn.send(INFO.pack(region.addr, region.rkey, region.length))
            (await conn.recv()).release()  # the peer is done with it
    return bytes(sink)


async def pong(conn: aiordma.Connection) -> None:
    """Read what the peer shows, and write it to where the peer wants it."""
    there = await shown(conn)
    text = bytearray(there.length)
    await conn.read(there, text)
    print("ping data:", text.rstrip(b"\0").decode())
    await conn.send(bytes(INFO.size))
    await conn.write(await shown(conn), text)
    await conn.send(bytes(INFO.size))


async def shown(conn: aiordma.Connection) -> aiordma.RemoteRegion:
    """The memory that the peer's next message names."""
    with await conn.recv() as message:
        addr, rkey, length = INFO.unpack(message)
    return aiordma.RemoteRegion(addr, length, rkey, RIGHTS)


async def main(role: str, host: str, port: str = "7174") -> None:
    """Three pings, or whatever one client wants."""
    if role == "client":
        async with aiordma.connect(host, int(port), config=RAW) as conn:
            for number in range(3):
                text = f"aiordma-ping-{number}".encode().ljust(64, b"\0")
                assert await ping(conn, text) == text
    else:
        async with aiordma.listen(host, int(port), config=RAW) as listener:
            print("listening on", *listener.sockname, flush=True)
            # rping hangs up without a word.
            async with await listener.accept() as conn:
                with contextlib.suppress(aiordma.ConnectionLostError):
                    while True:
                        await pong(conn)


if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("client", "server"):
    print("usage: rping.py (client | server) HOST [PORT]", file=sys.stderr)
    sys.exit(2)

try:
    asyncio.run(main(*sys.argv[1:]))
except KeyboardInterrupt:
    sys.exit(130)  # as shells have it for Ctrl-C
