"""The numbers of librdmacm as enumerations, by the rules of `aiordma.verbs.enums`."""

from __future__ import annotations

from aiordma.verbs.enums import OpenIntEnum

__all__ = [
    "EventType",
    "Option",
    "PortSpace",
]


class PortSpace(OpenIntEnum):
    """Namespace of port numbers, and with it the kind of service (`rdma_port_space`)."""

    IPOIB = 0x0002
    TCP = 0x0106
    UDP = 0x0111
    IB = 0x013F


class EventType(OpenIntEnum):
    """The kind of a connection-management event (`rdma_cm_event_type`)."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15
    # The rest is newer than rdma-core 44.
    ADDRINFO_RESOLVED = 16
    ADDRINFO_ERROR = 17
    USER = 18
    INTERNAL = 19


class Option(OpenIntEnum):
    """Second number of `rdma_set_option`, after RDMA_OPTION_ID.

    The value is a uint8_t for `ID_TOS` and `ID_ACK_TIMEOUT`, an int for the others.
    """

    ID_TOS = 0
    ID_REUSEADDR = 1
    ID_AFONLY = 2
    ID_ACK_TIMEOUT = 3
