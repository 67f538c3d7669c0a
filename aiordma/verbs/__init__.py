"""The verbs: one C object a file."""

from aiordma.verbs.ah import GRH, AddressHandle, AHAttributes
from aiordma.verbs.async_event import DeviceEvents
from aiordma.verbs.bring_up import BringUp, BringUpConfig, QPAddress
from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.context import Context, DeviceAttributes
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.cq_ex import ExtendedCompletionQueue
from aiordma.verbs.device import fork_status
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
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.srq import SharedReceiveQueue
from aiordma.verbs.wc import WorkCompletion
from aiordma.verbs.wr import SGE, RecvWR, SendWR

__all__ = [
    "GRH",
    "MTU",
    "SGE",
    "AHAttributes",
    "Access",
    "AddressHandle",
    "AsyncEventType",
    "BringUp",
    "BringUpConfig",
    "AtomicCap",
    "CompletionChannel",
    "CompletionQueue",
    "Context",
    "DeviceAttributes",
    "DeviceCapFlags",
    "DeviceEvents",
    "ExtendedCompletionQueue",
    "ForkStatus",
    "GIDType",
    "LinkLayer",
    "MRAdvice",
    "MWType",
    "MemoryRegion",
    "MemoryWindow",
    "MigrationState",
    "NodeType",
    "ODPGeneralCaps",
    "ODPTransportCaps",
    "Opcode",
    "PortState",
    "PreparedPost",
    "ProtectionDomain",
    "QPAddress",
    "QPAttrMask",
    "QPInitAttr",
    "QPState",
    "QPType",
    "QueuePair",
    "RecvWR",
    "SRQAttrMask",
    "SendFlags",
    "SendWR",
    "SharedReceiveQueue",
    "TransportType",
    "WCFields",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WorkCompletion",
    "fork_status",
]
