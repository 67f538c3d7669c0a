"""asyncio's transports over RDMA."""

from aiordma.streams.connecting import create_connection, open_connection
from aiordma.streams.datagram import create_datagram_endpoint
from aiordma.streams.datagram_config import DatagramAddress, DatagramConfig
from aiordma.streams.datagram_transport import RdmaDatagramTransport
from aiordma.streams.server import RdmaServer
from aiordma.streams.serving import create_server, start_server
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_reader import RdmaStreamReader, RdmaStreamWriter
from aiordma.streams.tls import start_tls
from aiordma.streams.transport import RdmaTransport
from aiordma.streams.transport_socket import RdmaTransportSocket

__all__ = [
    "DatagramAddress",
    "DatagramConfig",
    "RdmaDatagramTransport",
    "RdmaServer",
    "RdmaStreamReader",
    "RdmaStreamWriter",
    "RdmaTransport",
    "RdmaTransportSocket",
    "StreamConfig",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "open_connection",
    "start_server",
    "start_tls",
]
