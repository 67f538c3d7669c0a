"""httpx over RDMA: a network backend for httpcore, and a transport for httpx that uses it.

Needs httpx on asyncio or uvloop, not on trio: `pip install aiordma[httpx]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from aiordma.streams.connecting import open_connection
from aiordma.streams.stream_config import StreamConfig

__all__ = ["RdmaBackend", "RdmaHTTPTransport"]


class _AsHttpcore:
    """Turns errors into those that httpcore's callers expect.

    Not a generator under `contextlib.contextmanager`: in CPython 3.12 and 3.13, one that replaces
    an exception leaves it in a cycle.
    """

    def __init__(self, late: type[Exception], failed: type[Exception]) -> None:
        self._late = late
        self._failed = failed

    def __enter__(self) -> None:
        """Nothing to do: the end of the block counts."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if isinstance(error, TimeoutError):
            raise self._late(str(error)) from error
        if isinstance(error, OSError):
            raise self._failed(str(error)) from error


class _Stream(httpcore.AsyncNetworkStream):
    """A connection as httpcore uses it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _AsHttpcore(httpcore.ReadTimeout, httpcore.ReadError):
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _AsHttpcore(httpcore.WriteTimeout, httpcore.WriteError):
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):  # how it ends is of no interest any more
            await self._writer.wait_closed()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            with _AsHttpcore(httpcore.ConnectTimeout, httpcore.ConnectError):
                async with asyncio.timeout(timeout):
                    await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except BaseException:
            self._writer.close()
            raise
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "client_addr":
            return self._writer.get_extra_info("sockname")
        if info == "server_addr":
            return self._writer.get_extra_info("peername")
        if info == "is_readable":
            # Asked of an idle connection: whether the server has ended it, or spoken out of turn.
            return self._reader.at_eof() or bool(self._reader._buffer)  # type: ignore[attr-defined]
        return self._writer.get_extra_info(info)


class RdmaBackend(httpcore.AsyncNetworkBackend):
    """For `httpcore.AsyncConnectionPool(network_backend=...)`: connections go over RDMA.

    Args:
        config: Settings of the connections.
    """

    def __init__(self, config: StreamConfig | None = None) -> None:
        self._config = config

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect over RDMA.

        Args:
            host: Name or address of the server.
            port: Its port.
            timeout: Seconds until the connection is established; None for no limit.
            local_address: Local address to connect from.
            socket_options: None, or empty.

        Raises:
            httpcore.ConnectTimeout, httpcore.ConnectError: The connection was not made.
            ValueError: There are socket options, but no socket.

        Cancellation: the connect is undone.
        """
        if socket_options:
            msg = "socket_options are not possible: an RDMA connection has no socket"
            raise ValueError(msg)
        local = None if local_address is None else (local_address, 0)
        with _AsHttpcore(httpcore.ConnectTimeout, httpcore.ConnectError):
            return _Stream(
                *await open_connection(
                    host, port, local_addr=local, config=self._config, timeout=timeout
                )
            )

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: RDMA has no UNIX sockets.

        Args:
            path: Named in the error.
            timeout: Seconds; ignored.
            socket_options: Ignored.

        Raises:
            httpcore.ConnectError: Always.

        Cancellation: it never waits.
        """
        msg = f"{path}: RDMA has no UNIX sockets"
        raise httpcore.ConnectError(msg)

    async def sleep(self, seconds: float) -> None:
        """Wait between two attempts.

        Args:
            seconds: How many seconds.

        Cancellation: ends the wait.
        """
        await asyncio.sleep(seconds)


class RdmaHTTPTransport(httpx.AsyncHTTPTransport):
    """For `httpx.AsyncClient(transport=...)`: connections go over RDMA and never over TCP.

    Args:
        config: Settings of the connections.
        kwargs: As for `httpx.AsyncHTTPTransport`, except `uds` and `socket_options`.
    """

    def __init__(self, *, config: StreamConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # httpx makes the pool itself, and takes no backend for it as an argument.
        self._pool._network_backend = RdmaBackend(config)
