"""asyncio's transports over RDMA."""

from aiordma.streams.datagram import create_datagram_endpoint
from aiordma.streams.datagram_config import DatagramAddress, DatagramConfig
from aiordma.streams.datagram_transport import RdmaDatagramTransport

__all__ = [
    "DatagramAddress",
    "DatagramConfig",
    "RdmaDatagramTransport",
    "create_datagram_endpoint",
]
