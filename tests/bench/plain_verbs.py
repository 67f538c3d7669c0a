"""Messages of 64 bytes by a queue pair, as a user of `aiordma.verbs` writes them.

`main([ROLE, FORM, NUMBER, LOOP, OVER, ADDRESS, PORT])`, of which NUMBER and OVER are those of the
other ordinary programs.  Each end writes its message into registered memory and reads the one that
came; before it sends, the receive of the answer is posted.  The forms:

- `awaited`: `await qp.send` and, in a task, `await qp.recv`.
- `posted`: `qp.post_send` and `qp.post_recv`, whose completions `anext(cq)` returns.
- `prepared`: the same, posted by `execute` of what was prepared once.

The client prints one JSON object, with half a round trip in microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from aiordma.cm import ConnectionId, ConnectionParameter, EventChannel, EventType
from aiordma.verbs import (
    SGE,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    ProtectionDomain,
    QPInitAttr,
    RecvWR,
    SendFlags,
    SendWR,
)
from tests.bench.plain_peer import LOOPS, SMALL

__all__ = ["main"]

TRIPS, WARM_UP = 300, 100
PARAMETER = ConnectionParameter(4, 4, 6, 6)


class Awaited:
    """One end, which the stack closes; its receive is a task."""

    def __init__(self, cm_id: ConnectionId, stack: contextlib.ExitStack) -> None:
        own, context = stack.enter_context, cm_id.context
        assert context is not None
        pd = own(ProtectionDomain(context))
        self.cq = own(CompletionQueue(context, 16, own(CompletionChannel(context))))
        attr = QPInitAttr(send_cq=self.cq, max_send_wr=4, max_recv_wr=4)
        self.qp = own(cm_id.create_qp(pd, attr))
        self.mr = own(MemoryRegion(pd, 2 * SMALL))
        self.out, self.into = SGE(self.mr, 0, SMALL), SGE(self.mr, SMALL, SMALL)
        self._own = own
        self._receiving: asyncio.Task[Any] | None = None

    async def expect(self) -> None:
        """Post the receive of the next message."""
        self._receiving = asyncio.create_task(self.qp.recv(self.into))
        await asyncio.sleep(0)  # then the task has posted it

    async def recv(self) -> bytes:
        """The message."""
        assert self._receiving is not None
        await self._receiving
        return bytes(self.mr.view[SMALL:])

    async def send(self, data: bytes) -> None:
        """Send a message."""
        self.mr.view[:SMALL] = data
        await self.qp.send(self.out)


class Posted(Awaited):
    """The same with posts, and completions of the queue."""

    def __init__(self, cm_id: ConnectionId, stack: contextlib.ExitStack) -> None:
        super().__init__(cm_id, stack)
        self._sends = SendWR(sg_list=[self.out], send_flags=SendFlags.SIGNALED)
        self._receives = RecvWR(wr_id=1, sg_list=[self.into])
        self._received = 0

    async def expect(self) -> None:
        self.qp.post_recv(self._receives)

    async def recv(self) -> bytes:
        await self._until(1)
        return bytes(self.mr.view[SMALL:])

    async def send(self, data: bytes) -> None:
        self.mr.view[:SMALL] = data
        self.qp.post_send(self._sends)

    async def _until(self, wr_id: int) -> None:
        """Take completions until the one with this number."""
        found = None
        while found != wr_id:
            completion = await anext(self.cq)
            if not completion.ok:
                raise completion.error()
            found = completion.wr_id


class Prepared(Posted):
    """The same with prepared posts."""

    def __init__(self, cm_id: ConnectionId, stack: contextlib.ExitStack) -> None:
        super().__init__(cm_id, stack)
        self._send = self._own(self.qp.prepare_send(self._sends))
        self._receive = self._own(self.qp.prepare_recv(self._receives))

    async def expect(self) -> None:
        self._receive.execute()

    async def send(self, data: bytes) -> None:
        self.mr.view[:SMALL] = data
        self._send.execute()


FORMS: dict[str, type[Awaited]] = {"awaited": Awaited, "posted": Posted, "prepared": Prepared}


async def serve(form: type[Awaited], address: str, port: int) -> None:
    """Send the messages of one client back."""
    with contextlib.ExitStack() as stack:
        events = stack.enter_context(EventChannel())
        listener = stack.enter_context(ConnectionId(events))
        listener.bind_addr((address, port))
        listener.listen()
        request = await events.get_event()
        assert request is not None
        request.ack()
        assert request.type is EventType.CONNECT_REQUEST
        assert request.connection_id is not None
        cm_id = stack.enter_context(request.connection_id)
        end = form(cm_id, stack)
        await end.expect()
        await cm_id.accept(PARAMETER)
        for number in range(WARM_UP + TRIPS):
            data = await end.recv()
            if number + 1 < WARM_UP + TRIPS:
                await end.expect()
            await end.send(data)
        while (event := await events.get_event()) is not None:
            event.ack()
            if event.type is EventType.DISCONNECTED:
                break


async def use(form: type[Awaited], address: str, port: int) -> dict[str, float]:
    """Connect, and measure."""
    with contextlib.ExitStack() as stack:
        cm_id = stack.enter_context(ConnectionId(stack.enter_context(EventChannel())))
        await cm_id.resolve_addr((address, port))
        await cm_id.resolve_route()
        end = form(cm_id, stack)
        await cm_id.connect(PARAMETER)
        data, begun = bytes(SMALL), 0.0
        for number in range(-WARM_UP, TRIPS):
            if not number:
                begun = time.perf_counter()
            await end.expect()
            await end.send(data)
            await end.recv()
        took = time.perf_counter() - begun
        await cm_id.disconnect()
    return {"us": took / TRIPS / 2 * 1e6}


def main(words: list[str]) -> int:
    """Run one end; returns the exit status."""
    role, form, _number, loop, _over, address, port = words

    async def end() -> None:
        if role == "server":
            await serve(FORMS[form], address, int(port))
        else:
            print(json.dumps(await use(FORMS[form], address, int(port))))

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
