"""Client at the native level: `python native_client.py [HOST] [PORT]`.

It reads and writes the server's memory, counts there, and sends a message. Work is awaited.
"""

import asyncio
import contextlib
import struct
import sys

from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel
from aiordma.verbs import (
    SGE,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    RecvWR,
)

LOAN = struct.Struct("!QII")  # address, key and length of the server's memory


async def main(host: str = "10.80.0.1", port: str = "18516") -> None:
    """The steps, in order; leaving the block removes everything, last made first."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context

        # An event channel, an id on it; each step awaits its event and acknowledges it.
        events = own(EventChannel())
        cm_id = own(ConnectionId(events))
        await cm_id.resolve_addr((host, int(port)))
        await cm_id.resolve_route()

        # The resources of the connection, before there is a connection.
        context = cm_id.context
        assert context is not None  # it has been bound since the address was resolved
        pd = own(ProtectionDomain(context))
        channel = own(CompletionChannel(context))
        cq = own(CompletionQueue(context, 16, channel))
        qp = own(cm_id.create_qp(pd, QPInitAttr(send_cq=cq, max_send_wr=8, max_recv_wr=8)))
        mr = own(MemoryRegion(pd, 4096))

        # A receive first, then connect: the server may send at once.
        qp.post_recv(RecvWR(wr_id=1, sg_list=[SGE(mr, 1024, 256)]))
        param = ConnectionParameter(4, 4, 6, 6)
        established = await cm_id.connect(param, private_data=b"a client")
        address, rkey, length = LOAN.unpack_from(established.private_data)
        print("lent by the server:", length, "bytes")

        # Read, write and count in the server's memory.
        await qp.read(SGE(mr, 0, 16), address, rkey)
        print("read:", bytes(mr.view[:16]).decode())
        mr.view[:16] = b"left by a client"
        await qp.write(SGE(mr, 0, 16), address, rkey)
        if context.attributes.atomic_cap:  # iWARP has none, and some adapters
            await qp.fetch_add(SGE(mr, 0, 8), address + 512, rkey, 1)

        # A message, and its echo out of the receive that was posted above.
        text = b"hello, verbs"
        mr.view[: len(text)] = text
        await qp.send(SGE(mr, 0, len(text)))
        echo = await anext(cq)
        print("echo:", bytes(mr.view[1024:][: echo.byte_len]).decode())

        await cm_id.disconnect()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
