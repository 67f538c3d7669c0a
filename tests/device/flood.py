"""Clients that stop in the middle of their handshake, and what they make the server pin."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiordma.cm import ConnectionEvent, ConnectionId, EventChannel, EventType
from aiordma.endpoint.config import DEFAULTS, hello_of
from aiordma.rsocket import Hello
from tests.device.foreign import DEPTHS
from tests.inside.cm import take_events
from tests.native_ends import LIMIT_S, End

__all__ = ["Flood", "flooding", "pinned_bytes"]

HELLO = hello_of(DEFAULTS, b"").pack(56)
STREAM_HELLO = Hello(16, 65536, 1, 2, 4096, 1, 4096).pack()


class Mute(ConnectionId):
    """A client that does not confirm: software iWARP's kernel does it all the same."""

    __slots__ = ()

    def _on_response(self, event: ConnectionEvent) -> None:
        event.type = EventType.ESTABLISHED


def pinned_bytes() -> int:
    """What this process has pinned for adapters."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"^VmPin:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024


class Flood:
    """Clients of one address that connect and then say nothing; one that is dropped comes again.

    Args:
        address: Where the listener is.
        port: Its port.
        rate: Connects a second, all clients together.
        streams: Whether they want a stream, which they then do not confirm.

    Attributes:
        met: Connects that the listener has answered.
        dropped: Those that it has ended.
        refused: Those that it has refused.
        sent: Bytes that the clients' programs have sent.
        peak: Most bytes that were pinned when a client was answered.
    """

    def __init__(self, address: str, port: int, rate: float, *, streams: bool = False) -> None:
        self.met = self.dropped = self.refused = self.sent = self.peak = 0
        self._where = address, port
        self._kind = Mute if streams else ConnectionId
        self._hello = STREAM_HELLO if streams else HELLO
        self._pause = 1 / rate
        self._next = asyncio.get_running_loop().time()

    async def client(self, events: EventChannel) -> None:
        """One that never gives up."""
        while True:
            self._next = max(self._next + self._pause, asyncio.get_running_loop().time())
            await asyncio.sleep(self._next - asyncio.get_running_loop().time())
            end = End(self._kind(events))
            try:
                await self._stay(end)
            finally:
                end.close()

    async def _stay(self, end: End) -> None:
        over = asyncio.Event()

        def sink(event: ConnectionEvent) -> bool:
            if event.type in (EventType.DISCONNECTED, EventType.REJECTED):
                over.set()
            return True

        await end.cm_id.resolve_addr(self._where, timeout=LIMIT_S)
        await end.cm_id.resolve_route(timeout=LIMIT_S)
        take_events(end.cm_id, sink)
        end.build(room=4, max_send_wr=1, max_recv_wr=1)
        self.sent += len(self._hello)
        try:
            await end.cm_id.connect(DEPTHS, private_data=self._hello, timeout=60)
        except OSError:
            self.refused += 1
            return
        self.met += 1
        self.peak = max(self.peak, pinned_bytes())
        await over.wait()
        self.dropped += 1


@asynccontextmanager
async def flooding(
    address: str, port: int, clients: int, rate: float, *, streams: bool = False
) -> AsyncIterator[Flood]:
    """So many of them, as long as the block lasts."""
    flood = Flood(address, port, rate, streams=streams)
    with EventChannel() as events:
        tasks = [asyncio.create_task(flood.client(events)) for _ in range(clients)]
        try:
            yield flood
        finally:
            for task in tasks:
                task.cancel()
            for done in await asyncio.gather(*tasks, return_exceptions=True):
                with contextlib.suppress(asyncio.CancelledError):
                    if isinstance(done, BaseException):
                        raise done
