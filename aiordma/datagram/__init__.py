"""Datagrams: asyncio's DatagramProtocol over a queue pair of unreliable datagrams."""

from aiordma.datagram.config import DatagramAddress, DatagramConfig
from aiordma.datagram.endpoint import create_datagram_endpoint
from aiordma.datagram.transport import RdmaDatagramTransport

__all__ = [
    "DatagramAddress",
    "DatagramConfig",
    "RdmaDatagramTransport",
    "create_datagram_endpoint",
]
