"""The verbs: one C object a file."""

from aiordma.verbs.ah import GRH, AddressHandle, AHAttributes
from aiordma.verbs.async_event import AsyncEvent, DeviceEvents
from aiordma.verbs.bring_up import BringUp, BringUpConfig, QPAddress
from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.context import (
    Context,
    DeviceAttributes,
    DeviceClock,
    GidEntry,
    ODPCaps,
    PortAttributes,
)
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.cq_ex import ExtendedCompletion, ExtendedCompletionQueue
from aiordma.verbs.device import Device, devices, fork_status, is_available, why_unavailable
from aiordma.verbs.enums import (
    MTU,
    Access,
    AsyncEventType,
    AtomicCap,
    DeviceCapFlags,
    ForkStatus,
    GIDType,
    LinkLayer,
    MigrationState,
    MRAdvice,
    MWType,
    NodeType,
    ODPGeneralCaps,
    ODPTransportCaps,
    Opcode,
    PortState,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    SRQAttrMask,
    TransportType,
    WCFields,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.mw import MemoryWindow
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.prepared import PreparedPost
from aiordma.verbs.qp import QPAttributes, QPInitAttr, QPLimits, QueuePair
from aiordma.verbs.qp_changes import QPChanges
from aiordma.verbs.srq import PreparedReceives, SharedReceiveQueue, SRQAttributes
from aiordma.verbs.wc import WorkCompletion
from aiordma.verbs.wr import SGE, RecvWR, SendWR

__all__ = [
    "GRH",
    "MTU",
    "SGE",
    "AHAttributes",
    "Access",
    "AddressHandle",
    "AsyncEvent",
    "AsyncEventType",
    "BringUp",
    "BringUpConfig",
    "AtomicCap",
    "CompletionChannel",
    "CompletionQueue",
    "Context",
    "Device",
    "DeviceAttributes",
    "DeviceCapFlags",
    "DeviceClock",
    "DeviceEvents",
    "ExtendedCompletion",
    "ExtendedCompletionQueue",
    "ForkStatus",
    "GIDType",
    "GidEntry",
    "LinkLayer",
    "MRAdvice",
    "MWType",
    "MemoryRegion",
    "MemoryWindow",
    "MigrationState",
    "NodeType",
    "ODPCaps",
    "ODPGeneralCaps",
    "ODPTransportCaps",
    "Opcode",
    "PortAttributes",
    "PortState",
    "PreparedPost",
    "PreparedReceives",
    "ProtectionDomain",
    "QPAddress",
    "QPAttrMask",
    "QPAttributes",
    "QPChanges",
    "QPInitAttr",
    "QPLimits",
    "QPState",
    "QPType",
    "QueuePair",
    "RecvWR",
    "SRQAttrMask",
    "SRQAttributes",
    "SendFlags",
    "SendWR",
    "SharedReceiveQueue",
    "TransportType",
    "WCFields",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WorkCompletion",
    "devices",
    "fork_status",
    "is_available",
    "why_unavailable",
]
