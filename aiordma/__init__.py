"""aiordma: RDMA connections native to asyncio.

`connect` and `listen` give `Connection`s that carry messages; `aiordma.cm` and `aiordma.verbs`
are the native layer beneath.  aiordma can be imported on every machine; `why_unavailable()` says
what RDMA itself still needs.
"""

from aiordma._core import Message
from aiordma.datagram.config import DatagramAddress, DatagramConfig
from aiordma.datagram.endpoint import create_datagram_endpoint
from aiordma.endpoint.batch import Batch
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.events import ConnectionEvents
from aiordma.endpoint.keys import Keys
from aiordma.endpoint.lease import Lease
from aiordma.endpoint.listener import ConnectRequest, Listener, listen
from aiordma.endpoint.notes import Note, Notes
from aiordma.errors import (
    AuthenticationError,
    BatchError,
    BatchLostError,
    CompletionError,
    ConnectionEndedError,
    ConnectionFailedError,
    ConnectionLostError,
    ConnectionRejectedError,
    ConnectTimeoutError,
    DeviceNotFoundError,
    DeviceRemovedError,
    FlushedError,
    ForkedError,
    LibraryMissingError,
    MessageTooLargeError,
    NotSupportedError,
    PeerGoneError,
    ProtocolError,
    RdmaError,
    RdmaOSError,
    RemoteAccessError,
    RequestDeadlineError,
    RequestError,
    RequestRefusedError,
    RequestUnknownError,
    ResourceClosedError,
    ResultLostError,
    StaleRegionError,
)
from aiordma.link.limits import ListenerLimits
from aiordma.link.tally import ConnectionStats
from aiordma.memory.governor import set_large_message_budget
from aiordma.memory.remote import RemoteRegion
from aiordma.memory.shared import Memory
from aiordma.requests.served import Request, Requests
from aiordma.service.broadcast import Broadcast, Delivery, SubscriberStats
from aiordma.service.pool import Pool, PoolStats
from aiordma.service.requests import handle_requests, serve_requests
from aiordma.service.server import Server, serve
from aiordma.service.way import AddressStats
from aiordma.streams.connecting import create_connection, open_connection
from aiordma.streams.server import RdmaServer, create_server, start_server
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_reader import RdmaStreamReader, RdmaStreamWriter
from aiordma.streams.tls import start_tls
from aiordma.streams.transport import RdmaTransport
from aiordma.verbs.device import Device, devices, is_available, why_unavailable

__version__ = "0.1.0"

__all__ = [
    "AddressStats",
    "AuthenticationError",
    "Batch",
    "BatchError",
    "BatchLostError",
    "Broadcast",
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
    "Delivery",
    "Device",
    "DeviceNotFoundError",
    "DeviceRemovedError",
    "FlushedError",
    "ForkedError",
    "LibraryMissingError",
    "Keys",
    "Lease",
    "Listener",
    "ListenerLimits",
    "Memory",
    "Message",
    "MessageTooLargeError",
    "NotSupportedError",
    "Note",
    "Notes",
    "PeerGoneError",
    "Pool",
    "PoolStats",
    "ProtocolError",
    "RdmaError",
    "RdmaOSError",
    "RdmaServer",
    "RdmaStreamReader",
    "RdmaStreamWriter",
    "RdmaTransport",
    "RemoteAccessError",
    "RemoteRegion",
    "Request",
    "RequestDeadlineError",
    "RequestError",
    "RequestRefusedError",
    "RequestUnknownError",
    "Requests",
    "ResourceClosedError",
    "ResultLostError",
    "Server",
    "StaleRegionError",
    "StreamConfig",
    "SubscriberStats",
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

#: The packages that have pages in docs/; all other modules are internal.
_PACKAGES = {"cm", "contrib", "memory", "metrics", "streams", "testing", "verbs"}


def __dir__() -> list[str]:
    public = {*__all__, *_PACKAGES}
    return [name for name in globals() if name in public or name.startswith("__")]
