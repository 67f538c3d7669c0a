"""The verbs: one C object a file."""

from aiordma.verbs.async_event import AsyncEvent, DeviceEvents
from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.context import Context, DeviceAttributes, GidEntry, PortAttributes
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.device import Device, devices, is_available, why_unavailable
from aiordma.verbs.enums import (
    MTU,
    Access,
    AsyncEventType,
    LinkLayer,
    Opcode,
    PortState,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    TransportType,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPAttributes, QPInitAttr, QPLimits, QueuePair
from aiordma.verbs.wc import WorkCompletion
from aiordma.verbs.wr import SGE, RecvWR, SendWR

__all__ = [
    "MTU",
    "SGE",
    "Access",
    "AsyncEvent",
    "AsyncEventType",
    "CompletionChannel",
    "CompletionQueue",
    "Context",
    "Device",
    "DeviceAttributes",
    "DeviceEvents",
    "GidEntry",
    "LinkLayer",
    "MemoryRegion",
    "Opcode",
    "PortAttributes",
    "PortState",
    "ProtectionDomain",
    "QPAttrMask",
    "QPAttributes",
    "QPInitAttr",
    "QPLimits",
    "QPState",
    "QPType",
    "QueuePair",
    "RecvWR",
    "SendFlags",
    "SendWR",
    "TransportType",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WorkCompletion",
    "devices",
    "is_available",
    "why_unavailable",
]
