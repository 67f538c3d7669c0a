"""asyncio's transports over RDMA."""

from aiordma.link.transport_socket import RdmaTransportSocket
from aiordma.streams.connecting import create_connection, open_connection
from aiordma.streams.server import RdmaServer, create_server, start_server
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_reader import RdmaStreamReader, RdmaStreamWriter
from aiordma.streams.tls import start_tls
from aiordma.streams.transport import RdmaTransport

__all__ = [
    "RdmaServer",
    "RdmaStreamReader",
    "RdmaStreamWriter",
    "RdmaTransport",
    "RdmaTransportSocket",
    "StreamConfig",
    "create_connection",
    "create_server",
    "open_connection",
    "start_server",
    "start_tls",
]
