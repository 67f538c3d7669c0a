"""What the tests of datagrams share: one end at the native level, and a protocol that records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiordma import create_datagram_endpoint
from aiordma.cm import ConnectionEvent, ConnectionId, EventChannel, EventType, PortSpace
from aiordma.verbs import GRH, SGE, Access, WorkCompletion
from tests import native_ends
from tests.native_ends import acked, resolved

Where = tuple[str, int]


async def run(*words: str) -> str:
    """Run a command, which succeeds; its output."""
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, words
    return output.decode()


def network_device() -> str:
    """The name of the network device that Soft-RoCE sends through."""
    return Path("/sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/0").read_text().strip()


class UDEnd(native_ends.End):
    """A UD queue pair of an id, with one region to send from and one to receive into."""

    def __init__(self, cm_id: ConnectionId) -> None:
        super().__init__(cm_id)
        self.build(max_send_sge=2)
        self.outgoing = self.region(16 * 1024, Access.LOCAL_WRITE)
        self.incoming = self.region(16 * 1024, Access.LOCAL_WRITE)

    async def receiving(self, size: int = 8192) -> asyncio.Task[tuple[bytes, GRH, WorkCompletion]]:
        """A receive that is posted; its task gives datagram, header and completion."""

        async def receive() -> tuple[bytes, GRH, WorkCompletion]:
            wc = await self.qp.recv(SGE(self.incoming, 0, size))
            view = self.incoming.view
            return bytes(GRH.payload(view, wc)), GRH.parse(view), wc

        task = asyncio.create_task(receive())
        await asyncio.sleep(0)
        return task

    def put(self, data: bytes) -> SGE:
        """The bytes, ready to be sent."""
        self.outgoing.view[: len(data)] = data
        return SGE(self.outgoing, 0, len(data))


def bound(channel: EventChannel, address: str) -> ConnectionId:
    """An id for datagrams, bound to the device."""
    cm_id = ConnectionId(channel, PortSpace.UDP)
    cm_id.bind_addr((address, 0))
    return cm_id


async def routed(channel: EventChannel, address: str, port: int) -> ConnectionId:
    """An id for datagrams with a resolved route."""
    return await resolved(channel, address, port, PortSpace.UDP)


async def next_request(channel: EventChannel) -> tuple[ConnectionId, ConnectionEvent]:
    """The id of the next request, and its event, acknowledged."""
    event = await acked(channel, EventType.CONNECT_REQUEST)
    assert event.connection_id is not None
    return event.connection_id, event


class Recorder(asyncio.DatagramProtocol):
    """Keeps all that it is told, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.got: list[tuple[bytes, Any]] = []
        self.errors: list[Exception] = []
        self.lost: BaseException | None = None
        self.transport: Any = None
        self.changed = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.calls.append("made")
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if not self.got:
            self.calls.append("received")
        self.got.append((data, addr))
        self.changed.set()

    def error_received(self, exc: Exception) -> None:
        self.calls.append("error")
        self.errors.append(exc)
        self.changed.set()

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")
        self.changed.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.calls.append("lost")
        self.lost = exc
        self.changed.set()

    @property
    def data(self) -> list[bytes]:
        return [data for data, _ in self.got]

    async def until(self, condition: Any, seconds: float = 20.0) -> None:
        """Wait until `condition()` is true; looked at after each call."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Echo(Recorder):
    """Sends each datagram back to where it came from."""

    def datagram_received(self, data: bytes, addr: Any) -> None:
        super().datagram_received(data, addr)
        self.transport.sendto(data, addr)


@asynccontextmanager
async def endpoint(
    kind: type[Recorder] = Recorder, *args: Any, **options: Any
) -> AsyncIterator[Recorder]:
    """The protocol of an endpoint, which is closed and gone at the end."""
    transport, protocol = await create_datagram_endpoint(kind, *args, **options)
    try:
        yield protocol
    finally:
        transport.abort()
        await transport.wait_closed()
        assert protocol.calls.count("lost") == 1


def where(protocol: Recorder) -> Where:
    name: Where = protocol.transport.get_extra_info("sockname")
    return name
