"""asyncio's own loop, whose create_connection and create_server go over RDMA.

Addresses of this host become that of the RDMA device. A socket given by `sock=`, and whatever TCP
program is at the other end, gets to the RDMA connection through the relay.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiordma
from tests.conformance.relay import Relay

#: What means this host in CPython's tests.
_LOCAL = {"127.0.0.1", "localhost"}


class RdmaLoop(asyncio.SelectorEventLoop):
    """The loop that CPython's tests are given.

    Attributes:
        relay: shared by all loops; set by the tests' fixture.
        made: how many RDMA connections and servers were made, of all loops.
    """

    relay: Relay
    made = 0

    def _map(self, host: Any) -> Any:
        if isinstance(host, str):
            return self.relay.address if host in _LOCAL else host
        return host

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **kwds: Any
    ) -> Any:
        sock = kwds.pop("sock", None)
        if kwds.get("ssl") and kwds.get("server_hostname") is None and host:
            kwds["server_hostname"] = host
        if kwds.get("local_addr"):
            name, number = kwds["local_addr"]
            kwds["local_addr"] = (self._map(name), number)
        if sock is not None:
            host, port = self.relay.address, await self.relay.run(self.relay.adopt(sock))
        elif port in self.relay.exposed:
            host, port = self.relay.address, self.relay.exposed[port]
        elif host is not None:
            # Where no TCP program listens, RDMA has to find out for itself.
            port = await self.relay.run(self.relay.gateway(host, port)) or port
            host = self._map(host)
        RdmaLoop.made += 1
        try:
            return await aiordma.create_connection(protocol_factory, host, port, **kwds)
        except BaseException:
            self.relay.give_up(port)
            raise

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **kwds: Any
    ) -> Any:
        sock = kwds.pop("sock", None)
        if sock is None:
            # TCP's port first: of RDMA's none is taken.
            sock = socket.create_server(("", port or 0), reuse_port=False)
            port = sock.getsockname()[1]
            host = self._map(host)
        else:
            host, port = self.relay.address, 0
        RdmaLoop.made += 1
        try:
            server = await aiordma.create_server(protocol_factory, host, port, **kwds)
        except BaseException:
            sock.close()
            raise
        listener = await self.relay.run(self.relay.expose(sock, server.port))
        _withdraw_at_close(server, self.relay, listener)
        return server


def _withdraw_at_close(server: Any, relay: Relay, listener: asyncio.Server) -> None:
    """TCP clients are refused once the RDMA server is closed."""
    close = server.close

    def close_both() -> None:
        future = asyncio.run_coroutine_threadsafe(relay.withdraw(listener), relay.loop)
        future.result(10)
        close()

    server.close = close_both
