"""A relay between TCP and RDMA, in a thread and a loop of its own.

Many of CPython's tests have a blocking socket at one end, in a thread or in `http.server`. The
relay is what such an end talks to: it carries the bytes, the ends of stream and the aborts of each
TCP connection over to an RDMA connection of its own, so that the end under test is an RDMA one and
has a program of TCP behind its peer.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import aiordma

T = TypeVar("T")


class Leg(asyncio.Protocol):
    """One of the two connections that are joined; reads nothing before that."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.made = asyncio.Event()
        self.other: Leg | None = None
        self.early = bytearray()  # early releases of Python 3.11 forget a pause in connection_made
        self.ended = False
        self.lost: list[BaseException | None] = []

    def join(self, other: Leg) -> None:
        """Carry everything from now on."""
        for one, two in ((self, other), (other, self)):
            one.other = two
            if one.lost:
                two.end(one.lost[0])
        for leg in (self, other):
            early, leg.early = leg.early, bytearray()
            if early:
                leg.data_received(early)
            if leg.ended:
                leg.eof_received()
            if not leg.lost:
                leg.transport.resume_reading()

    def end(self, exc: BaseException | None) -> None:
        """The other leg has ended."""
        if exc is None:
            self.transport.close()
        else:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.pause_reading()
        self.made.set()

    def data_received(self, data: bytes | bytearray) -> None:
        if self.other is None:
            self.early += data
        else:
            self.other.transport.write(bytes(data))

    def eof_received(self) -> bool:
        self.ended = True
        if self.other is None:
            return True
        if self.other.ended:
            self.other.transport.close()
            return False
        if not self.other.lost:
            self.other.transport.write_eof()
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost.append(exc)
        if self.other is not None and not self.other.lost:
            self.other.end(exc)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()


class Relay:
    """The thread.

    Args:
        address: of the RDMA device.

    Attributes:
        failures: of connections to such a server, for messages.
        exposed: RDMA port of each TCP port behind which a server of the loop under test is.
        loop: The relay's own, in its thread.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.exposed: dict[int, int] = {}
        self.failures: list[BaseException] = []
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._joining: dict[int, asyncio.Task[None]] = {}  # by the RDMA port
        self._thread = threading.Thread(target=self.loop.run_forever, name="relay", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the relay's loop, from another one."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def stop(self) -> None:
        """End everything."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def gateway(self, host: str, port: int) -> int | None:
        """Connect to a TCP server, and return the RDMA port at which one client may follow.

        None if nobody listens there.
        """
        leg = Leg()
        try:
            await self.loop.create_connection(lambda: leg, host, port)
        except OSError:
            return None
        try:
            return await self._await_rdma(leg)
        except BaseException:
            leg.transport.abort()
            raise

    async def adopt(self, sock: socket.socket) -> int:
        """The same for a TCP connection that is there already."""
        sock.setblocking(False)
        leg = Leg()
        await self.loop.create_connection(lambda: leg, sock=sock)
        return await self._await_rdma(leg)

    async def _await_rdma(self, tcp: Leg) -> int:
        rdma = Leg()
        server = await aiordma.create_server(lambda: rdma, self.address, 0)

        async def join() -> None:
            try:
                async with asyncio.timeout(30):
                    await rdma.made.wait()
                rdma.join(tcp)
            except (TimeoutError, asyncio.CancelledError):
                tcp.transport.abort()
            finally:
                del self._joining[server.port]
                server.close()

        self._joining[server.port] = self._spawn(join())
        return server.port

    def give_up(self, port: int | None) -> None:
        """A client does not come, from another thread: a busy machine may take too long for it."""

        def end() -> None:
            if port in self._joining:
                self._joining[port].cancel()

        self.loop.call_soon_threadsafe(end)

    async def expose(self, sock: socket.socket, rdma_port: int) -> asyncio.Server:
        """Carry every connection to a listening TCP socket over to an RDMA server."""
        sock.setblocking(False)

        class Accepted(Leg):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                relay._spawn(relay._dial(self, rdma_port))

        relay = self
        server = await self.loop.create_server(Accepted, sock=sock)
        self.exposed[sock.getsockname()[1]] = rdma_port
        return server

    async def withdraw(self, server: asyncio.Server) -> None:
        """Listen no more."""
        for sock in server.sockets:
            self.exposed.pop(sock.getsockname()[1], None)
        server.close()

    async def _dial(self, tcp: Leg, port: int) -> None:
        rdma = Leg()
        try:
            await aiordma.create_connection(lambda: rdma, self.address, port)
        except Exception as exc:
            self.failures.append(exc)
            tcp.transport.abort()
        else:
            rdma.join(tcp)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
