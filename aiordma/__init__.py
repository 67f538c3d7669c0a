"""aiordma: RDMA connections native to asyncio.

`connect` and `listen` give `Connection`s that carry messages; `aiordma.cm` and `aiordma.verbs`
are the native layer beneath.  Importing works on every machine; `why_unavailable()` tells what
RDMA itself still needs.
"""

from aiordma._core import Message
from aiordma.datagram.config import DatagramAddress, DatagramConfig
from aiordma.datagram.endpoint import create_datagram_endpoint
from aiordma.datagram.transport import RdmaDatagramTransport
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.events import ConnectionEvents
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.listener import ConnectRequest, Listener, listen
from aiordma.errors import (
    AddressError,
    AtomicResultLostError,
    CompletionError,
    ConnectionEndedError,
    ConnectionFailedError,
    ConnectionLostError,
    ConnectionRejectedError,
    ConnectTimeoutError,
    DeviceMemoryError,
    DeviceNotFoundError,
    DeviceRemovedError,
    FlushedError,
    ForkedError,
    HostNotFoundError,
    LibraryMissingError,
    LocalAccessError,
    LocalLengthError,
    MessageDamagedError,
    MessageTooLargeError,
    MulticastError,
    NotSupportedError,
    PeerGoneError,
    PeerSilentError,
    PoolTimeoutError,
    ProtocolError,
    QueueError,
    RdmaError,
    RdmaOSError,
    RdmaPermissionError,
    RdmaTimeoutError,
    ReadIncompleteError,
    ReceiverNotReadyError,
    RemoteAccessError,
    RemoteInvalidRequestError,
    RequestDeadlineError,
    RequestError,
    RequestOverloadedError,
    RequestRefusedError,
    RequestUnknownError,
    ResourceBusyError,
    ResourceClosedError,
    RouteError,
    TransportRetryError,
)
from aiordma.link.limits import ListenerLimits
from aiordma.link.tally import ConnectionStats
from aiordma.link.transport_socket import RdmaTransportSocket
from aiordma.memory.byte_budget import set_large_message_budget
from aiordma.memory.remote import RemoteRegion
from aiordma.memory.shared import Memory
from aiordma.requests.served import Request, Requests
from aiordma.service.pool import Pool, PoolStats
from aiordma.service.requests import handle_requests, serve_requests
from aiordma.service.server import Server, serve
from aiordma.streams.connecting import create_connection, open_connection
from aiordma.streams.server import RdmaServer, create_server, start_server
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_reader import RdmaStreamReader, RdmaStreamWriter
from aiordma.streams.tls import start_tls
from aiordma.streams.transport import RdmaTransport
from aiordma.verbs.device import Device, devices, is_available, why_unavailable

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "AtomicResultLostError",
    "CompletionError",
    "ConnectRequest",
    "ConnectTimeoutError",
    "Connection",
    "ConnectionConfig",
    "ConnectionEndedError",
    "ConnectionEvents",
    "ConnectionFailedError",
    "ConnectionLostError",
    "ConnectionRejectedError",
    "ConnectionStats",
    "DatagramAddress",
    "DatagramConfig",
    "Device",
    "DeviceMemoryError",
    "DeviceNotFoundError",
    "DeviceRemovedError",
    "FlushedError",
    "ForkedError",
    "HostNotFoundError",
    "Lease",
    "LibraryMissingError",
    "Listener",
    "ListenerLimits",
    "LocalAccessError",
    "LocalLengthError",
    "Memory",
    "Message",
    "MessageDamagedError",
    "MessageTooLargeError",
    "MulticastError",
    "NotSupportedError",
    "PeerGoneError",
    "PeerSilentError",
    "Pool",
    "PoolStats",
    "PoolTimeoutError",
    "ProtocolError",
    "QueueError",
    "RdmaDatagramTransport",
    "RdmaError",
    "RdmaOSError",
    "RdmaPermissionError",
    "RdmaServer",
    "RdmaStreamReader",
    "RdmaStreamWriter",
    "RdmaTimeoutError",
    "RdmaTransport",
    "RdmaTransportSocket",
    "ReadIncompleteError",
    "ReceiverNotReadyError",
    "RemoteAccessError",
    "RemoteInvalidRequestError",
    "RemoteRegion",
    "Request",
    "RequestDeadlineError",
    "RequestError",
    "RequestOverloadedError",
    "RequestRefusedError",
    "RequestUnknownError",
    "Requests",
    "ResourceBusyError",
    "ResourceClosedError",
    "RouteError",
    "Server",
    "StreamConfig",
    "TransportRetryError",
    "connect",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "devices",
    "handle_requests",
    "is_available",
    "listen",
    "open_connection",
    "serve",
    "serve_requests",
    "set_large_message_budget",
    "start_server",
    "start_tls",
    "why_unavailable",
]
