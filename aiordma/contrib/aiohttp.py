"""aiohttp over RDMA: a connector for its client, and a site for its server.

Needs aiohttp: `pip install aiordma[aiohttp]`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientConnectorSSLError,
    web,
)

from aiordma.link.transport_socket import address_of
from aiordma.streams.connecting import create_connection
from aiordma.streams.server import create_server
from aiordma.streams.stream_config import StreamConfig

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler

__all__ = ["RdmaConnector", "RdmaSite"]


class RdmaConnector(aiohttp.TCPConnector):
    """A connector whose connections, including those to proxies, go over RDMA and never over TCP.

    Args:
        config: Settings of the connections.
        kwargs: As for `aiohttp.TCPConnector`, which also resolves and caches names, limits the
            connections and checks TLS.  Settings of sockets have no effect.

    For `aiohttp.ClientSession(connector=...)`, which closes it.
    """

    def __init__(self, *, config: StreamConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._config = config

    # aiohttp's loop over the addresses calls this with those that are left, makes a socket of one
    # in it and gives that to the event loop.
    async def _wrap_create_connection(  # type: ignore[override]
        self,
        factory: Callable[[], Any],
        *,
        addr_infos: list[Any],
        req: Any,
        timeout: aiohttp.ClientTimeout,
        client_error: type[ClientConnectorError] = ClientConnectorError,
        **kwargs: Any,
    ) -> tuple[asyncio.Transport, ResponseHandler]:
        host, port = address_of(addr_infos[0][4])
        local = address_of(self._local_addr_infos[0][4]) if self._local_addr_infos else None
        try:
            async with asyncio.timeout(timeout.sock_connect):
                transport, protocol = await create_connection(
                    factory, host, port, local_addr=local, config=self._config, **kwargs
                )
        except ssl.CertificateError as exc:
            raise ClientConnectorCertificateError(req.connection_key, exc) from exc
        except ssl.SSLError as exc:
            raise ClientConnectorSSLError(req.connection_key, exc) from exc
        except OSError as exc:
            # aiohttp makes its own error of a TimeoutError without a number, and tries no further.
            if isinstance(exc, TimeoutError) and exc.errno is None:
                raise
            raise client_error(req.connection_key, exc) from exc
        # The caller checks it too, but asks the socket of a connection that fails for its name.
        fingerprint = self._get_fingerprint(req)
        if fingerprint is not None and req.is_ssl():
            try:
                fingerprint.check(transport)
            except aiohttp.ServerFingerprintMismatch:
                transport.close()
                raise
        return transport, protocol


class RdmaSite(web.BaseSite):
    """A site of a runner, like `aiohttp.web.TCPSite`, over RDMA.

    Args:
        runner: An `AppRunner` or `ServerRunner` that is set up; its `cleanup()` stops the site.
        host: Local name or address; by default all addresses.
        port: 0 lets the kernel choose; `runner.addresses` has the choice.
        config: Settings of the connections.
        kwargs: As for `aiohttp.web.BaseSite`: `ssl_context`, `backlog`.
    """

    __slots__ = ("_config", "_host", "_port")

    def __init__(
        self,
        runner: web.BaseRunner,
        host: str | None = None,
        port: int = 8080,
        *,
        config: StreamConfig | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(runner, **kwargs)
        self._host = host
        self._port = port
        self._config = config

    @property
    def name(self) -> str:
        """URL of the site."""
        scheme = "https" if self._ssl_context else "http"
        host = self._host or "0.0.0.0"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def start(self) -> None:
        """Serve from now on.

        Raises:
            LibraryMissingError, DeviceNotFoundError: RDMA is not available here.
            OSError: The address or the port is not available.

        Cancellation: the start is undone.
        """
        await super().start()
        factory = self._runner.server
        assert factory is not None
        self._server = server = await create_server(
            factory,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            config=self._config,
        )
        self._port = server.port

    async def wait_closed(self) -> None:
        """Wait until the connections have ended, after `runner.cleanup()`.

        Cancellation: ends the wait.
        """
        if self._server is not None:
            await self._server.wait_closed()
