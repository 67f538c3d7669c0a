"""A server for queue pairs that are brought up over TCP, such as those of by_hand_pyverbs.py.

Usage: by_hand.py HOST [PORT]

Each side sends a line of JSON: the number of the queue pair, the first packet number and the GID.
The client's messages come back in capitals, until the client closes its TCP connection.
"""

import asyncio
import contextlib
import json
import sys

import aiordma
from aiordma.verbs import (
    MTU,
    SGE,
    BringUp,
    BringUpConfig,
    CompletionChannel,
    CompletionQueue,
    Context,
    MemoryRegion,
    ProtectionDomain,
    QPAddress,
    QPInitAttr,
    QueuePair,
)

SIZE = 4096
PATH_MTU = MTU.MTU_1024  # both sides need the same


async def answer(qp: QueuePair, into: MemoryRegion, out: MemoryRegion) -> None:
    """Answer messages until the queue pair is moved to the error state."""
    while True:
        length = (await qp.recv(into)).byte_len or 0
        out.view[:length] = bytes(into.view[:length]).upper()
        await qp.send(SGE(out, 0, length))


async def serve(
    context: Context, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Bring up a queue pair with a client, and answer."""
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        pd = stack.enter_context(ProtectionDomain(context))
        channel = stack.enter_context(CompletionChannel(context))
        cq = stack.enter_context(CompletionQueue(context, 32, channel))
        qp = stack.enter_context(QueuePair(pd, QPInitAttr(send_cq=cq)))
        into, out = (stack.enter_context(MemoryRegion(pd, SIZE)) for _ in range(2))

        theirs = json.loads(await reader.readline())
        peer = QPAddress(
            qp_num=theirs["qp_num"], psn=theirs["psn"], gid=bytes.fromhex(theirs["gid"])
        )
        up = BringUp(qp, BringUpConfig(path_mtu=PATH_MTU))
        answering = asyncio.create_task(answer(qp, into, out))
        try:
            await asyncio.sleep(0)  # its receive is posted before the client may send
            await up.connect(peer)
            mine = up.address
            words = {"qp_num": mine.qp_num, "psn": mine.psn, "gid": mine.gid.hex()}
            writer.write(json.dumps(words).encode() + b"\n")
            await reader.read()  # until the client closes, which the queue pair would not report
        finally:
            qp.to_error()
            with contextlib.suppress(aiordma.CompletionError):
                await answering
    print("a client has left", flush=True)


async def main(host: str, port: str = "18525") -> None:
    """Serve until Ctrl-C."""
    with aiordma.devices()[0].open() as context:
        accepted = await asyncio.start_server(
            lambda reader, writer: serve(context, reader, writer), host, int(port)
        )
        async with accepted as server:
            print("listening on", *server.sockets[0].getsockname()[:2], flush=True)
            await server.serve_forever()


if __name__ == "__main__":
    if not 1 <= len(sys.argv) - 1 <= 2:
        print("usage: by_hand.py HOST [PORT]", file=sys.stderr)
        sys.exit(2)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
