"""The connection manager: event channels, connection ids, events and parameters."""

from aiordma.cm.addrinfo import getaddrinfo
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId, Stage
from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.cm.enums import EventType, Option, PortSpace
from aiordma.cm.event_channel import EventChannel
from aiordma.cm.qp_transition import QPPolicy

__all__ = [
    "ConnectionEvent",
    "ConnectionId",
    "ConnectionParameter",
    "EventChannel",
    "EventType",
    "Option",
    "PortSpace",
    "QPPolicy",
    "Stage",
    "getaddrinfo",
]
