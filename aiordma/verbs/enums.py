"""The numbers of libibverbs as enumerations.

They are integers, so that they can be imported, compared and documented without the compiled
module; a test compares each number with the header.  A member has the C name without its prefix:
C's `IBV_WC_RNR_RETRY_EXC_ERR` is `WCStatus.RNR_RETRY_EXC_ERR` here, so that a search for the
field's term finds both.

A newer kernel or driver may report a number that is not listed.  It becomes a member named
`UNKNOWN_<n>` of the same class: reading an event must never raise.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Self

__all__ = [
    "MTU",
    "Access",
    "AsyncEventType",
    "AtomicCap",
    "DeviceCapFlags",
    "ForkStatus",
    "GIDType",
    "LinkLayer",
    "MRAdvice",
    "MWType",
    "MigrationState",
    "NodeType",
    "ODPGeneralCaps",
    "ODPTransportCaps",
    "Opcode",
    "OpenIntEnum",
    "OpenIntFlag",
    "PortState",
    "QPAttrMask",
    "QPState",
    "QPType",
    "SRQAttrMask",
    "SendFlags",
    "TransportType",
    "WCFields",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
]


class OpenIntEnum(IntEnum):
    """An IntEnum that accepts numbers it does not know."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        # Not stored in the class: a source of ever new numbers would grow it without end. Two
        # unknown members of one number are equal, but not the same object.
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member


class OpenIntFlag(IntFlag):
    """An IntFlag that also names a value whose bits are all unknown."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        # IntFlag keeps unknown bits by itself; it only leaves their name empty.
        member: Self | None = super()._missing_(value)
        if member is not None and member._name_ is None and member._value_:
            member._name_ = f"UNKNOWN_{member._value_:#x}"
        return member


# ---- device and port -----------------------------------------------------------------------


class NodeType(OpenIntEnum):
    """Kind of adapter (`ibv_node_type`)."""

    UNKNOWN = -1
    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    USNIC = 5
    USNIC_UDP = 6
    UNSPECIFIED = 7


class TransportType(OpenIntEnum):
    """Which wire protocol a device speaks (`ibv_transport_type`); RoCE counts as IB."""

    UNKNOWN = -1
    IB = 0
    IWARP = 1
    USNIC = 2
    USNIC_UDP = 3
    UNSPECIFIED = 4


class DeviceCapFlags(OpenIntFlag):
    """Abilities of a device (`ibv_device_cap_flags`, `device_cap_flags_ex`)."""

    RESIZE_MAX_WR = 1 << 0
    BAD_PKEY_CNTR = 1 << 1
    BAD_QKEY_CNTR = 1 << 2
    RAW_MULTI = 1 << 3
    AUTO_PATH_MIG = 1 << 4
    CHANGE_PHY_PORT = 1 << 5
    UD_AV_PORT_ENFORCE = 1 << 6
    CURR_QP_STATE_MOD = 1 << 7
    SHUTDOWN_PORT = 1 << 8
    INIT_TYPE = 1 << 9
    PORT_ACTIVE_EVENT = 1 << 10
    SYS_IMAGE_GUID = 1 << 11
    RC_RNR_NAK_GEN = 1 << 12
    SRQ_RESIZE = 1 << 13
    N_NOTIFY_CQ = 1 << 14
    MEM_WINDOW = 1 << 17
    UD_IP_CSUM = 1 << 18
    XRC = 1 << 20
    MEM_MGT_EXTENSIONS = 1 << 21
    MEM_WINDOW_TYPE_2A = 1 << 23
    MEM_WINDOW_TYPE_2B = 1 << 24
    RC_IP_CSUM = 1 << 25
    RAW_IP_CSUM = 1 << 26
    MANAGED_FLOW_STEERING = 1 << 29
    RAW_SCATTER_FCS = 1 << 34
    PCI_WRITE_END_PADDING = 1 << 36


class ForkStatus(OpenIntEnum):
    """Whether registered memory survives a fork of this process (`ibv_fork_status`)."""

    DISABLED = 0
    ENABLED = 1
    UNNEEDED = 2


class AtomicCap(OpenIntEnum):
    """The scope in which atomic operations are atomic (`ibv_atomic_cap`)."""

    NONE = 0
    HCA = 1
    GLOB = 2


class MTU(OpenIntEnum):
    """Path MTU code (`ibv_mtu`); `in_bytes` is the size that it stands for."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def in_bytes(self) -> int:
        """Payload bytes of a packet; 0 for a code that does not exist."""
        return 128 << self if 1 <= self <= 5 else 0


class PortState(OpenIntEnum):
    """Logical state of a port (`ibv_port_state`)."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class LinkLayer(OpenIntEnum):
    """The link layer of a port's packets (`IBV_LINK_LAYER_*`)."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class GIDType(OpenIntEnum):
    """Kind of a GID table entry (`ibv_gid_type`, as in `ibv_gid_entry.gid_type`).

    Not libibverbs' internal enumeration for sysfs, in which IB and RoCE v1 share the number 0.
    """

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


class AsyncEventType(OpenIntEnum):
    """The event of a device, port, QP, CQ or SRQ (`ibv_event_type`)."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19
    DEVICE_SPEED_CHANGE = 20  # newer than rdma-core 44


# ---- memory --------------------------------------------------------------------------------


class Access(OpenIntFlag):
    """The accesses that a memory region, window or queue pair allows (`ibv_access_flags`)."""

    LOCAL_WRITE = 1 << 0
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5
    ON_DEMAND = 1 << 6
    HUGETLB = 1 << 7
    FLUSH_GLOBAL = 1 << 8  # newer than rdma-core 44
    FLUSH_PERSISTENT = 1 << 9  # newer than rdma-core 44
    RELAXED_ORDERING = 1 << 20  # optional: an older kernel ignores it


class MWType(OpenIntEnum):
    """Kind of a memory window (`ibv_mw_type`)."""

    TYPE_1 = 1
    TYPE_2 = 2


class MRAdvice(OpenIntEnum):
    """Advice about pages of on-demand memory (`ibv_advise_mr_advice`)."""

    PREFETCH = 0
    PREFETCH_WRITE = 1
    PREFETCH_NO_FAULT = 2


class ODPGeneralCaps(OpenIntFlag):
    """Whether a device does on-demand paging at all (`ibv_odp_general_caps`)."""

    SUPPORT = 1 << 0
    SUPPORT_IMPLICIT = 1 << 1


class ODPTransportCaps(OpenIntFlag):
    """Operations that may use on-demand memory (`ibv_odp_transport_cap_bits`)."""

    SEND = 1 << 0
    RECV = 1 << 1
    WRITE = 1 << 2
    READ = 1 << 3
    ATOMIC = 1 << 4
    SRQ_RECV = 1 << 5


# ---- queue pair ----------------------------------------------------------------------------


class QPType(OpenIntEnum):
    """Transport service of a queue pair (`ibv_qp_type`)."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 0xFF


class QPState(OpenIntEnum):
    """State of a queue pair (`ibv_qp_state`)."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7


class MigrationState(OpenIntEnum):
    """Which path a queue pair with an alternate path is on (`ibv_mig_state`)."""

    MIGRATED = 0
    REARM = 1
    ARMED = 2


class QPAttrMask(OpenIntFlag):
    """Which members of `ibv_qp_attr` a modify or query concerns (`ibv_qp_attr_mask`)."""

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20
    RATE_LIMIT = 1 << 25


class SRQAttrMask(OpenIntFlag):
    """Which members of `ibv_srq_attr` a modify concerns (`ibv_srq_attr_mask`)."""

    MAX_WR = 1 << 0
    LIMIT = 1 << 1


# ---- work requests and completions ---------------------------------------------------------


class Opcode(OpenIntEnum):
    """Operation of a send work request (`ibv_wr_opcode`)."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    TSO = 10
    DRIVER1 = 11
    FLUSH = 14  # newer than rdma-core 44
    ATOMIC_WRITE = 15


class SendFlags(OpenIntFlag):
    """Modifiers of a send work request (`ibv_send_flags`)."""

    FENCE = 1 << 0
    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3
    IP_CSUM = 1 << 4


class WCStatus(OpenIntEnum):
    """How a work request ended (`ibv_wc_status`)."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


class WCOpcode(OpenIntEnum):
    """Operation that a completion reports (`ibv_wc_opcode`); undefined unless it succeeded.

    `RECV` is a bit that every kind of receive has, so that `opcode & WCOpcode.RECV` finds them all.
    """

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    TSO = 7
    FLUSH = 8  # newer than rdma-core 44
    ATOMIC_WRITE = 9
    RECV = 1 << 7
    RECV_RDMA_WITH_IMM = 129
    TM_ADD = 130
    TM_DEL = 131
    TM_SYNC = 132
    TM_RECV = 133
    TM_NO_TAG = 134
    DRIVER1 = 135
    DRIVER2 = 136  # newer than rdma-core 35
    DRIVER3 = 137  # the same


class WCFields(OpenIntFlag):
    """Fields of a completion that an extended queue is made for (`ibv_create_cq_wc_flags`)."""

    BYTE_LEN = 1 << 0
    IMM = 1 << 1
    QP_NUM = 1 << 2
    SRC_QP = 1 << 3
    SLID = 1 << 4
    SL = 1 << 5
    DLID_PATH_BITS = 1 << 6
    COMPLETION_TIMESTAMP = 1 << 7
    CVLAN = 1 << 8
    FLOW_TAG = 1 << 9
    TM_INFO = 1 << 10
    COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11


class WCFlags(OpenIntFlag):
    """Properties and further fields of a completion (`ibv_wc_flags`)."""

    GRH = 1 << 0
    WITH_IMM = 1 << 1
    IP_CSUM_OK = 1 << 2
    WITH_INV = 1 << 3
    TM_SYNC_REQ = 1 << 4
    TM_MATCH = 1 << 5
    TM_DATA_VALID = 1 << 6
