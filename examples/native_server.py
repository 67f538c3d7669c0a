"""Server at the native level, for one client: `python native_server.py [HOST] [PORT]`.

It lends the client a piece of memory, and waits for its message. Completions are fetched by hand.
"""

import asyncio
import contextlib
import struct
import sys

from aiordma.cm import (
    ConnectionEvent,
    ConnectionId,
    ConnectionParameter,
    EventChannel,
    EventType,
)
from aiordma.verbs import (
    SGE,
    Access,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    RecvWR,
    SendWR,
    WCStatus,
)

LOAN = struct.Struct("!QII")  # address, key and length of the memory
LENT = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


async def next_event(events: EventChannel, kind: EventType) -> ConnectionEvent:
    """Wait for an event, check it and acknowledge it."""
    event = await events.get_event()
    assert event is not None
    event.ack()
    assert event.type == kind, event
    return event


async def main(host: str = "0.0.0.0", port: str = "18516") -> None:
    """The steps, in order; leaving the block removes everything, last made first."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context

        # An event channel, an id on it, and listen.
        events = own(EventChannel())
        listener = own(ConnectionId(events))
        listener.bind_addr((host, int(port)))
        listener.listen()
        print("listening on", listener.source_address, listener.source_port, flush=True)

        # A client arrives, and with it the id of its connection.
        request = await next_event(events, EventType.CONNECT_REQUEST)
        cm_id = request.connection_id
        assert cm_id is not None
        own(cm_id)
        name = request.private_data.rstrip(b"\0").decode()

        # The resources of the connection, before there is a connection.
        context = cm_id.context
        assert context is not None  # a request comes from a device
        pd = own(ProtectionDomain(context))
        channel = own(CompletionChannel(context))
        cq = own(CompletionQueue(context, 16, channel))
        cq.req_notify()
        qp = own(cm_id.create_qp(pd, QPInitAttr(send_cq=cq, max_send_wr=8, max_recv_wr=8)))
        mr = own(MemoryRegion(pd, 4096, LENT))
        mr.view[:16] = b"left by a server"

        # Receives first, then accept: the client may send at once.
        qp.post_recv(RecvWR(wr_id=1, sg_list=[SGE(mr, 1024, 256)]))
        loan = LOAN.pack(mr.addr, mr.rkey, 1024)
        await cm_id.accept(ConnectionParameter(4, 4, 6, 6), private_data=loan)

        # Completions: wait for the event, acknowledge it, ask for the next one, then poll.
        done = 0
        while done < 2:
            await channel.get_cq_event()
            cq.ack_events(1)
            cq.req_notify()
            for completion in cq.poll():
                # The client hangs up when it has its echo. That can overtake the acknowledgement,
                # and the send is flushed then: it has arrived all the same.
                hung_up = completion.wr_id == 2 and completion.status == WCStatus.WR_FLUSH_ERR
                if not completion.ok and not hung_up:
                    raise completion.error()
                done += 1
                if completion.wr_id == 1:
                    message = SGE(mr, 1024, completion.byte_len)
                    print(name, "says:", bytes(mr.view[1024:][: len(message)]).decode())
                    print("in memory:", bytes(mr.view[:16]).decode())
                    print("counter:", int.from_bytes(mr.view[512:520], sys.byteorder))
                    qp.post_send(SendWR(wr_id=2, sg_list=[message]))

        # The client ends the connection; this side need not.
        await next_event(events, EventType.DISCONNECTED)


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it for Ctrl-C
