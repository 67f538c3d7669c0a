"""aiordma: RDMA connections native to asyncio.

`connect` and `listen` give `Connection`s that carry messages; `aiordma.cm` and `aiordma.verbs`
are the native layer beneath.  Importing works on every machine; `why_unavailable()` tells what
RDMA itself still needs.
"""

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection, ConnectionStats
from aiordma.endpoint.listener import Listener, listen
from aiordma.endpoint.message import Message
from aiordma.endpoint.request import ConnectRequest
from aiordma.errors import (
    AddressError,
    CompletionError,
    ConnectionEndedError,
    ConnectionFailedError,
    ConnectionLostError,
    ConnectionRejectedError,
    ConnectTimeoutError,
    DeviceNotFoundError,
    FlushedError,
    ForkedError,
    LibraryMissingError,
    LocalAccessError,
    MessageTooLargeError,
    NotSupportedError,
    ProtocolError,
    RdmaError,
    ReceiverNotReadyError,
    RemoteAccessError,
    ResourceBusyError,
    ResourceClosedError,
    RouteError,
    TransportRetryError,
)
from aiordma.verbs.device import Device, devices, is_available, why_unavailable

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "CompletionError",
    "ConnectRequest",
    "ConnectTimeoutError",
    "Connection",
    "ConnectionConfig",
    "ConnectionEndedError",
    "ConnectionFailedError",
    "ConnectionLostError",
    "ConnectionRejectedError",
    "ConnectionStats",
    "Device",
    "DeviceNotFoundError",
    "FlushedError",
    "ForkedError",
    "LibraryMissingError",
    "Listener",
    "LocalAccessError",
    "Message",
    "MessageTooLargeError",
    "NotSupportedError",
    "ProtocolError",
    "RdmaError",
    "ReceiverNotReadyError",
    "RemoteAccessError",
    "ResourceBusyError",
    "ResourceClosedError",
    "RouteError",
    "TransportRetryError",
    "connect",
    "devices",
    "is_available",
    "listen",
    "why_unavailable",
]
