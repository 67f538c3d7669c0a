# Written by `python build_ffi.py --stub` from the cdef headers: change those, not this file.
# The part about `ffi` is in build_ffi.py.
from collections.abc import Callable, Iterator
from typing import Any, Final, final

class CData:
    """A C value. Opaque to the checker: fields are `Any`, ints and bytes are not a `CData`."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __add__(self, offset: int) -> CData: ...
    def __sub__(self, other: Any) -> Any: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __enter__(self) -> CData: ...
    def __exit__(self, *exc_info: object) -> None: ...

class CType:
    """A C type, as `ffi.typeof` returns it."""

    kind: Final[str]
    cname: Final[str]
    fields: Final[list[tuple[str, Any]] | None]
    args: Final[tuple[CType, ...]]
    result: Final[CType]
    item: Final[CType]
    elements: Final[dict[int, str]]
    relements: Final[dict[str, int]]

class _Buffer:
    """Result of `ffi.buffer`: a view of C memory that supports the buffer protocol."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> bytes: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class _FFI:
    NULL: Final[CData]
    error: type[Exception]
    errno: int
    def new(self, cdecl: str | CType, init: Any = ...) -> CData: ...
    def cast(self, cdecl: str | CType, value: Any) -> CData: ...
    def buffer(self, cdata: CData, size: int = ...) -> _Buffer: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def unpack(self, cdata: CData, length: int) -> Any: ...
    def gc(
        self, cdata: CData, destructor: Callable[[CData], Any] | None, size: int = ...
    ) -> CData: ...
    def release(self, cdata: CData) -> None: ...
    def new_allocator(
        self,
        alloc: Callable[[int], CData],
        free: Callable[[CData], object],
        should_clear_after_alloc: bool = ...,
    ) -> Callable[[str], CData]: ...
    def addressof(self, cdata: CData, *fields_or_indexes: str | int) -> CData: ...
    def from_buffer(
        self, cdecl: Any, python_buffer: Any = ..., require_writable: bool = ...
    ) -> CData: ...
    def memmove(self, dest: Any, src: Any, n: int) -> None: ...
    def sizeof(self, cdecl: str | CType | CData) -> int: ...
    def alignof(self, cdecl: str | CType) -> int: ...
    def offsetof(self, cdecl: str | CType, *fields_or_indexes: str | int) -> int: ...
    def typeof(self, cdecl: Any) -> CType: ...
    def list_types(self) -> tuple[list[str], list[str], list[str]]: ...
    def new_handle(self, x: Any) -> CData: ...
    def callback(self, cdecl: str | CType, python_callable: Callable[..., Any]) -> CData: ...
    def from_handle(self, handle: CData) -> Any: ...

@final
class _Lib:
    IBV_NODE_UNKNOWN: Final[int]
    IBV_NODE_CA: Final[int]
    IBV_NODE_SWITCH: Final[int]
    IBV_NODE_ROUTER: Final[int]
    IBV_NODE_RNIC: Final[int]
    IBV_NODE_USNIC: Final[int]
    IBV_NODE_USNIC_UDP: Final[int]
    IBV_NODE_UNSPECIFIED: Final[int]
    IBV_TRANSPORT_UNKNOWN: Final[int]
    IBV_TRANSPORT_IB: Final[int]
    IBV_TRANSPORT_IWARP: Final[int]
    IBV_TRANSPORT_USNIC: Final[int]
    IBV_TRANSPORT_USNIC_UDP: Final[int]
    IBV_TRANSPORT_UNSPECIFIED: Final[int]
    IBV_DEVICE_RESIZE_MAX_WR: Final[int]
    IBV_DEVICE_BAD_PKEY_CNTR: Final[int]
    IBV_DEVICE_BAD_QKEY_CNTR: Final[int]
    IBV_DEVICE_RAW_MULTI: Final[int]
    IBV_DEVICE_AUTO_PATH_MIG: Final[int]
    IBV_DEVICE_CHANGE_PHY_PORT: Final[int]
    IBV_DEVICE_UD_AV_PORT_ENFORCE: Final[int]
    IBV_DEVICE_CURR_QP_STATE_MOD: Final[int]
    IBV_DEVICE_SHUTDOWN_PORT: Final[int]
    IBV_DEVICE_INIT_TYPE: Final[int]
    IBV_DEVICE_PORT_ACTIVE_EVENT: Final[int]
    IBV_DEVICE_SYS_IMAGE_GUID: Final[int]
    IBV_DEVICE_RC_RNR_NAK_GEN: Final[int]
    IBV_DEVICE_SRQ_RESIZE: Final[int]
    IBV_DEVICE_N_NOTIFY_CQ: Final[int]
    IBV_DEVICE_MEM_WINDOW: Final[int]
    IBV_DEVICE_UD_IP_CSUM: Final[int]
    IBV_DEVICE_XRC: Final[int]
    IBV_DEVICE_MEM_MGT_EXTENSIONS: Final[int]
    IBV_DEVICE_MEM_WINDOW_TYPE_2A: Final[int]
    IBV_DEVICE_MEM_WINDOW_TYPE_2B: Final[int]
    IBV_DEVICE_RC_IP_CSUM: Final[int]
    IBV_DEVICE_RAW_IP_CSUM: Final[int]
    IBV_DEVICE_MANAGED_FLOW_STEERING: Final[int]
    IBV_ATOMIC_NONE: Final[int]
    IBV_ATOMIC_HCA: Final[int]
    IBV_ATOMIC_GLOB: Final[int]
    IBV_ODP_SUPPORT: Final[int]
    IBV_ODP_SUPPORT_IMPLICIT: Final[int]
    IBV_ODP_SUPPORT_SEND: Final[int]
    IBV_ODP_SUPPORT_RECV: Final[int]
    IBV_ODP_SUPPORT_WRITE: Final[int]
    IBV_ODP_SUPPORT_READ: Final[int]
    IBV_ODP_SUPPORT_ATOMIC: Final[int]
    IBV_ODP_SUPPORT_SRQ_RECV: Final[int]
    IBV_FORK_DISABLED: Final[int]
    IBV_FORK_ENABLED: Final[int]
    IBV_FORK_UNNEEDED: Final[int]
    IBV_MTU_256: Final[int]
    IBV_MTU_512: Final[int]
    IBV_MTU_1024: Final[int]
    IBV_MTU_2048: Final[int]
    IBV_MTU_4096: Final[int]
    IBV_PORT_NOP: Final[int]
    IBV_PORT_DOWN: Final[int]
    IBV_PORT_INIT: Final[int]
    IBV_PORT_ARMED: Final[int]
    IBV_PORT_ACTIVE: Final[int]
    IBV_PORT_ACTIVE_DEFER: Final[int]
    IBV_LINK_LAYER_UNSPECIFIED: Final[int]
    IBV_LINK_LAYER_INFINIBAND: Final[int]
    IBV_LINK_LAYER_ETHERNET: Final[int]
    IBV_PORT_SM: Final[int]
    IBV_PORT_CM_SUP: Final[int]
    IBV_PORT_IP_BASED_GIDS: Final[int]
    IBV_GID_TYPE_IB: Final[int]
    IBV_GID_TYPE_ROCE_V1: Final[int]
    IBV_GID_TYPE_ROCE_V2: Final[int]
    IBV_EVENT_CQ_ERR: Final[int]
    IBV_EVENT_QP_FATAL: Final[int]
    IBV_EVENT_QP_REQ_ERR: Final[int]
    IBV_EVENT_QP_ACCESS_ERR: Final[int]
    IBV_EVENT_COMM_EST: Final[int]
    IBV_EVENT_SQ_DRAINED: Final[int]
    IBV_EVENT_PATH_MIG: Final[int]
    IBV_EVENT_PATH_MIG_ERR: Final[int]
    IBV_EVENT_DEVICE_FATAL: Final[int]
    IBV_EVENT_PORT_ACTIVE: Final[int]
    IBV_EVENT_PORT_ERR: Final[int]
    IBV_EVENT_LID_CHANGE: Final[int]
    IBV_EVENT_PKEY_CHANGE: Final[int]
    IBV_EVENT_SM_CHANGE: Final[int]
    IBV_EVENT_SRQ_ERR: Final[int]
    IBV_EVENT_SRQ_LIMIT_REACHED: Final[int]
    IBV_EVENT_QP_LAST_WQE_REACHED: Final[int]
    IBV_EVENT_CLIENT_REREGISTER: Final[int]
    IBV_EVENT_GID_CHANGE: Final[int]
    IBV_EVENT_WQ_FATAL: Final[int]
    IBV_WC_SUCCESS: Final[int]
    IBV_WC_LOC_LEN_ERR: Final[int]
    IBV_WC_LOC_QP_OP_ERR: Final[int]
    IBV_WC_LOC_EEC_OP_ERR: Final[int]
    IBV_WC_LOC_PROT_ERR: Final[int]
    IBV_WC_WR_FLUSH_ERR: Final[int]
    IBV_WC_MW_BIND_ERR: Final[int]
    IBV_WC_BAD_RESP_ERR: Final[int]
    IBV_WC_LOC_ACCESS_ERR: Final[int]
    IBV_WC_REM_INV_REQ_ERR: Final[int]
    IBV_WC_REM_ACCESS_ERR: Final[int]
    IBV_WC_REM_OP_ERR: Final[int]
    IBV_WC_RETRY_EXC_ERR: Final[int]
    IBV_WC_RNR_RETRY_EXC_ERR: Final[int]
    IBV_WC_LOC_RDD_VIOL_ERR: Final[int]
    IBV_WC_REM_INV_RD_REQ_ERR: Final[int]
    IBV_WC_REM_ABORT_ERR: Final[int]
    IBV_WC_INV_EECN_ERR: Final[int]
    IBV_WC_INV_EEC_STATE_ERR: Final[int]
    IBV_WC_FATAL_ERR: Final[int]
    IBV_WC_RESP_TIMEOUT_ERR: Final[int]
    IBV_WC_GENERAL_ERR: Final[int]
    IBV_WC_TM_ERR: Final[int]
    IBV_WC_TM_RNDV_INCOMPLETE: Final[int]
    IBV_WC_SEND: Final[int]
    IBV_WC_RDMA_WRITE: Final[int]
    IBV_WC_RDMA_READ: Final[int]
    IBV_WC_COMP_SWAP: Final[int]
    IBV_WC_FETCH_ADD: Final[int]
    IBV_WC_BIND_MW: Final[int]
    IBV_WC_LOCAL_INV: Final[int]
    IBV_WC_TSO: Final[int]
    IBV_WC_RECV: Final[int]
    IBV_WC_RECV_RDMA_WITH_IMM: Final[int]
    IBV_WC_TM_ADD: Final[int]
    IBV_WC_TM_DEL: Final[int]
    IBV_WC_TM_SYNC: Final[int]
    IBV_WC_TM_RECV: Final[int]
    IBV_WC_TM_NO_TAG: Final[int]
    IBV_WC_DRIVER1: Final[int]
    IBV_WC_EX_WITH_BYTE_LEN: Final[int]
    IBV_WC_EX_WITH_IMM: Final[int]
    IBV_WC_EX_WITH_QP_NUM: Final[int]
    IBV_WC_EX_WITH_SRC_QP: Final[int]
    IBV_WC_EX_WITH_SLID: Final[int]
    IBV_WC_EX_WITH_SL: Final[int]
    IBV_WC_EX_WITH_DLID_PATH_BITS: Final[int]
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP: Final[int]
    IBV_WC_EX_WITH_CVLAN: Final[int]
    IBV_WC_EX_WITH_FLOW_TAG: Final[int]
    IBV_WC_EX_WITH_TM_INFO: Final[int]
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK: Final[int]
    IBV_WC_GRH: Final[int]
    IBV_WC_WITH_IMM: Final[int]
    IBV_WC_IP_CSUM_OK: Final[int]
    IBV_WC_WITH_INV: Final[int]
    IBV_WC_TM_SYNC_REQ: Final[int]
    IBV_WC_TM_MATCH: Final[int]
    IBV_WC_TM_DATA_VALID: Final[int]
    IBV_ACCESS_LOCAL_WRITE: Final[int]
    IBV_ACCESS_REMOTE_WRITE: Final[int]
    IBV_ACCESS_REMOTE_READ: Final[int]
    IBV_ACCESS_REMOTE_ATOMIC: Final[int]
    IBV_ACCESS_MW_BIND: Final[int]
    IBV_ACCESS_ZERO_BASED: Final[int]
    IBV_ACCESS_ON_DEMAND: Final[int]
    IBV_ACCESS_HUGETLB: Final[int]
    IBV_ACCESS_RELAXED_ORDERING: Final[int]
    IBV_ADVISE_MR_ADVICE_PREFETCH: Final[int]
    IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE: Final[int]
    IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT: Final[int]
    IBV_MW_TYPE_1: Final[int]
    IBV_MW_TYPE_2: Final[int]
    IBV_SRQ_MAX_WR: Final[int]
    IBV_SRQ_LIMIT: Final[int]
    IBV_QPT_RC: Final[int]
    IBV_QPT_UC: Final[int]
    IBV_QPT_UD: Final[int]
    IBV_QPT_RAW_PACKET: Final[int]
    IBV_QPT_XRC_SEND: Final[int]
    IBV_QPT_XRC_RECV: Final[int]
    IBV_QPT_DRIVER: Final[int]
    IBV_QPS_RESET: Final[int]
    IBV_QPS_INIT: Final[int]
    IBV_QPS_RTR: Final[int]
    IBV_QPS_RTS: Final[int]
    IBV_QPS_SQD: Final[int]
    IBV_QPS_SQE: Final[int]
    IBV_QPS_ERR: Final[int]
    IBV_QPS_UNKNOWN: Final[int]
    IBV_MIG_MIGRATED: Final[int]
    IBV_MIG_REARM: Final[int]
    IBV_MIG_ARMED: Final[int]
    IBV_QP_STATE: Final[int]
    IBV_QP_CUR_STATE: Final[int]
    IBV_QP_EN_SQD_ASYNC_NOTIFY: Final[int]
    IBV_QP_ACCESS_FLAGS: Final[int]
    IBV_QP_PKEY_INDEX: Final[int]
    IBV_QP_PORT: Final[int]
    IBV_QP_QKEY: Final[int]
    IBV_QP_AV: Final[int]
    IBV_QP_PATH_MTU: Final[int]
    IBV_QP_TIMEOUT: Final[int]
    IBV_QP_RETRY_CNT: Final[int]
    IBV_QP_RNR_RETRY: Final[int]
    IBV_QP_RQ_PSN: Final[int]
    IBV_QP_MAX_QP_RD_ATOMIC: Final[int]
    IBV_QP_ALT_PATH: Final[int]
    IBV_QP_MIN_RNR_TIMER: Final[int]
    IBV_QP_SQ_PSN: Final[int]
    IBV_QP_MAX_DEST_RD_ATOMIC: Final[int]
    IBV_QP_PATH_MIG_STATE: Final[int]
    IBV_QP_CAP: Final[int]
    IBV_QP_DEST_QPN: Final[int]
    IBV_QP_RATE_LIMIT: Final[int]
    IBV_WR_RDMA_WRITE: Final[int]
    IBV_WR_RDMA_WRITE_WITH_IMM: Final[int]
    IBV_WR_SEND: Final[int]
    IBV_WR_SEND_WITH_IMM: Final[int]
    IBV_WR_RDMA_READ: Final[int]
    IBV_WR_ATOMIC_CMP_AND_SWP: Final[int]
    IBV_WR_ATOMIC_FETCH_AND_ADD: Final[int]
    IBV_WR_LOCAL_INV: Final[int]
    IBV_WR_BIND_MW: Final[int]
    IBV_WR_SEND_WITH_INV: Final[int]
    IBV_WR_TSO: Final[int]
    IBV_WR_DRIVER1: Final[int]
    IBV_SEND_FENCE: Final[int]
    IBV_SEND_SIGNALED: Final[int]
    IBV_SEND_SOLICITED: Final[int]
    IBV_SEND_INLINE: Final[int]
    IBV_SEND_IP_CSUM: Final[int]
    IBV_CQ_ATTR_MODERATE: Final[int]
    RDMA_CM_EVENT_ADDR_RESOLVED: Final[int]
    RDMA_CM_EVENT_ADDR_ERROR: Final[int]
    RDMA_CM_EVENT_ROUTE_RESOLVED: Final[int]
    RDMA_CM_EVENT_ROUTE_ERROR: Final[int]
    RDMA_CM_EVENT_CONNECT_REQUEST: Final[int]
    RDMA_CM_EVENT_CONNECT_RESPONSE: Final[int]
    RDMA_CM_EVENT_CONNECT_ERROR: Final[int]
    RDMA_CM_EVENT_UNREACHABLE: Final[int]
    RDMA_CM_EVENT_REJECTED: Final[int]
    RDMA_CM_EVENT_ESTABLISHED: Final[int]
    RDMA_CM_EVENT_DISCONNECTED: Final[int]
    RDMA_CM_EVENT_DEVICE_REMOVAL: Final[int]
    RDMA_CM_EVENT_MULTICAST_JOIN: Final[int]
    RDMA_CM_EVENT_MULTICAST_ERROR: Final[int]
    RDMA_CM_EVENT_ADDR_CHANGE: Final[int]
    RDMA_CM_EVENT_TIMEWAIT_EXIT: Final[int]
    RDMA_PS_IPOIB: Final[int]
    RDMA_PS_TCP: Final[int]
    RDMA_PS_UDP: Final[int]
    RDMA_PS_IB: Final[int]
    RDMA_MAX_RESP_RES: Final[int]
    RDMA_MAX_INIT_DEPTH: Final[int]
    RDMA_OPTION_ID: Final[int]
    RDMA_OPTION_IB: Final[int]
    RDMA_OPTION_ID_TOS: Final[int]
    RDMA_OPTION_ID_REUSEADDR: Final[int]
    RDMA_OPTION_ID_AFONLY: Final[int]
    RDMA_OPTION_ID_ACK_TIMEOUT: Final[int]
    RDMA_OPTION_IB_PATH: Final[int]
    RDMA_CM_JOIN_MC_ATTR_ADDRESS: Final[int]
    RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS: Final[int]
    RDMA_MC_JOIN_FLAG_FULLMEMBER: Final[int]
    RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER: Final[int]
    IBV_DEVICE_RAW_SCATTER_FCS: Final[int]
    IBV_DEVICE_PCI_WRITE_END_PADDING: Final[int]
    IBV_QPF_GRH_REQUIRED: Final[int]
    IBV_ACCESS_OPTIONAL_RANGE: Final[int]
    IBV_ADVISE_MR_FLAG_FLUSH: Final[int]
    AF_UNSPEC: Final[int]
    AF_INET: Final[int]
    AF_INET6: Final[int]
    AF_IB: Final[int]
    RDMA_UDP_QKEY: Final[int]
    RAI_PASSIVE: Final[int]
    RAI_NUMERICHOST: Final[int]
    RAI_NOROUTE: Final[int]
    RAI_FAMILY: Final[int]
    AIO_NOT_PROPOSED: Final[int]
    def ibv_get_device_list(self, num_devices: CData, /) -> CData: ...
    def ibv_free_device_list(self, list: CData, /) -> None: ...
    def ibv_get_device_name(self, device: CData, /) -> CData: ...
    def ibv_get_device_index(self, device: CData, /) -> int: ...
    def ibv_get_device_guid(self, device: CData, /) -> int: ...
    def ibv_open_device(self, device: CData, /) -> CData: ...
    def ibv_close_device(self, context: CData, /) -> int: ...
    def ibv_query_device(self, context: CData, device_attr: CData, /) -> int: ...
    def ibv_query_device_ex(self, context: CData, input: CData, attr: CData, /) -> int: ...
    def ibv_query_port(self, context: CData, port_num: int, port_attr: CData, /) -> int: ...
    def ibv_query_gid_ex(
        self, context: CData, port_num: int, gid_index: int, entry: CData, flags: int, /
    ) -> int: ...
    def ibv_query_gid_table(
        self, context: CData, entries: CData, max_entries: int, flags: int, /
    ) -> int: ...
    def ibv_query_pkey(self, context: CData, port_num: int, index: int, pkey: CData, /) -> int: ...
    def ibv_get_pkey_index(self, context: CData, port_num: int, pkey: int, /) -> int: ...
    def ibv_get_async_event(self, context: CData, event: CData, /) -> int: ...
    def ibv_ack_async_event(self, event: CData, /) -> None: ...
    def ibv_is_fork_initialized(self) -> int: ...
    def ibv_alloc_pd(self, context: CData, /) -> CData: ...
    def ibv_dealloc_pd(self, pd: CData, /) -> int: ...
    def ibv_reg_mr(self, pd: CData, addr: CData, length: int, access: int, /) -> CData: ...
    def ibv_reg_mr_iova(
        self, pd: CData, addr: CData, length: int, iova: int, access: int, /
    ) -> CData: ...
    def ibv_reg_dmabuf_mr(
        self, pd: CData, offset: int, length: int, iova: int, fd: int, access: int, /
    ) -> CData: ...
    def ibv_dereg_mr(self, mr: CData, /) -> int: ...
    def ibv_advise_mr(
        self, pd: CData, advice: int, flags: int, sg_list: CData, num_sge: int, /
    ) -> int: ...
    def ibv_alloc_mw(self, pd: CData, type: int, /) -> CData: ...
    def ibv_dealloc_mw(self, mw: CData, /) -> int: ...
    def ibv_bind_mw(self, qp: CData, mw: CData, mw_bind: CData, /) -> int: ...
    def ibv_create_comp_channel(self, context: CData, /) -> CData: ...
    def ibv_destroy_comp_channel(self, channel: CData, /) -> int: ...
    def ibv_create_cq(
        self, context: CData, cqe: int, cq_context: CData, channel: CData, comp_vector: int, /
    ) -> CData: ...
    def ibv_create_cq_ex(self, context: CData, cq_attr: CData, /) -> CData: ...
    def ibv_query_rt_values_ex(self, context: CData, values: CData, /) -> int: ...
    def ibv_resize_cq(self, cq: CData, cqe: int, /) -> int: ...
    def ibv_modify_cq(self, cq: CData, attr: CData, /) -> int: ...
    def ibv_destroy_cq(self, cq: CData, /) -> int: ...
    def ibv_get_cq_event(self, channel: CData, cq: CData, cq_context: CData, /) -> int: ...
    def ibv_ack_cq_events(self, cq: CData, nevents: int, /) -> None: ...
    def ibv_poll_cq(self, cq: CData, num_entries: int, wc: CData, /) -> int: ...
    def ibv_req_notify_cq(self, cq: CData, solicited_only: int, /) -> int: ...
    def ibv_create_srq(self, pd: CData, srq_init_attr: CData, /) -> CData: ...
    def ibv_modify_srq(self, srq: CData, srq_attr: CData, srq_attr_mask: int, /) -> int: ...
    def ibv_query_srq(self, srq: CData, srq_attr: CData, /) -> int: ...
    def ibv_destroy_srq(self, srq: CData, /) -> int: ...
    def ibv_post_srq_recv(self, srq: CData, recv_wr: CData, bad_recv_wr: CData, /) -> int: ...
    def ibv_create_qp(self, pd: CData, qp_init_attr: CData, /) -> CData: ...
    def ibv_modify_qp(self, qp: CData, attr: CData, attr_mask: int, /) -> int: ...
    def ibv_query_qp(self, qp: CData, attr: CData, attr_mask: int, init_attr: CData, /) -> int: ...
    def ibv_destroy_qp(self, qp: CData, /) -> int: ...
    def ibv_post_send(self, qp: CData, wr: CData, bad_wr: CData, /) -> int: ...
    def ibv_post_recv(self, qp: CData, wr: CData, bad_wr: CData, /) -> int: ...
    def ibv_create_ah(self, pd: CData, attr: CData, /) -> CData: ...
    def ibv_init_ah_from_wc(
        self, context: CData, port_num: int, wc: CData, grh: CData, ah_attr: CData, /
    ) -> int: ...
    def ibv_destroy_ah(self, ah: CData, /) -> int: ...
    def ibv_attach_mcast(self, qp: CData, gid: CData, lid: int, /) -> int: ...
    def ibv_detach_mcast(self, qp: CData, gid: CData, lid: int, /) -> int: ...
    def rdma_create_event_channel(self) -> CData: ...
    def rdma_destroy_event_channel(self, channel: CData, /) -> None: ...
    def rdma_get_cm_event(self, channel: CData, event: CData, /) -> int: ...
    def rdma_ack_cm_event(self, event: CData, /) -> int: ...
    def rdma_create_id(self, channel: CData, id: CData, context: CData, ps: int, /) -> int: ...
    def rdma_destroy_id(self, id: CData, /) -> int: ...
    def rdma_migrate_id(self, id: CData, channel: CData, /) -> int: ...
    def rdma_set_option(
        self, id: CData, level: int, optname: int, optval: CData, optlen: int, /
    ) -> int: ...
    def rdma_bind_addr(self, id: CData, addr: CData, /) -> int: ...
    def rdma_resolve_addr(
        self, id: CData, src_addr: CData, dst_addr: CData, timeout_ms: int, /
    ) -> int: ...
    def rdma_resolve_route(self, id: CData, timeout_ms: int, /) -> int: ...
    def rdma_get_local_addr(self, id: CData, /) -> CData: ...
    def rdma_get_peer_addr(self, id: CData, /) -> CData: ...
    def rdma_listen(self, id: CData, backlog: int, /) -> int: ...
    def rdma_connect(self, id: CData, conn_param: CData, /) -> int: ...
    def rdma_establish(self, id: CData, /) -> int: ...
    def rdma_accept(self, id: CData, conn_param: CData, /) -> int: ...
    def rdma_reject(
        self, id: CData, private_data: CData | bytes, private_data_len: int, /
    ) -> int: ...
    def rdma_disconnect(self, id: CData, /) -> int: ...
    def rdma_notify(self, id: CData, event: int, /) -> int: ...
    def rdma_init_qp_attr(self, id: CData, qp_attr: CData, qp_attr_mask: CData, /) -> int: ...
    def rdma_join_multicast_ex(self, id: CData, mc_join_attr: CData, context: CData, /) -> int: ...
    def rdma_leave_multicast(self, id: CData, addr: CData, /) -> int: ...
    def rdma_get_devices(self, num_devices: CData, /) -> CData: ...
    def rdma_free_devices(self, list: CData, /) -> None: ...
    def rdma_getaddrinfo(
        self, node: CData | bytes, service: CData | bytes, hints: CData, res: CData, /
    ) -> int: ...
    def rdma_freeaddrinfo(self, res: CData, /) -> None: ...
    def aio_map(self, size: int, /) -> CData: ...
    def aio_unmap(self, memory: CData, size: int, /) -> None: ...
    def aio_clear(self, memory: CData, size: int, /) -> None: ...
    def aio_async_next(self, context: CData, out: CData, /) -> int: ...
    def aio_post_send(
        self,
        qp: CData,
        wr_id: int,
        addr: int,
        length: int,
        lkey: int,
        flags: int,
        has_imm: int,
        imm: int,
        /,
    ) -> int: ...
    def aio_post_read(
        self,
        qp: CData,
        wr_id: int,
        addr: int,
        length: int,
        lkey: int,
        remote_addr: int,
        rkey: int,
        /,
    ) -> int: ...
    def aio_post_write(
        self,
        qp: CData,
        wr_id: int,
        addr: int,
        length: int,
        lkey: int,
        remote_addr: int,
        rkey: int,
        /,
    ) -> int: ...
    def aio_post_recv_slots(
        self, qp: CData, wr_id: int, addr: int, stride: int, lkey: int, slots: CData, count: int, /
    ) -> int: ...
    def aio_execute(self, p: CData, /) -> int: ...
    def aio_qp_advance(
        self,
        id: CData,
        qp: CData,
        first: int,
        last: int,
        access: int,
        timeout: int,
        retry_count: int,
        rnr_retry_count: int,
        min_rnr_timer: int,
        max_dest_rd_atomic: int,
        max_rd_atomic: int,
        /,
    ) -> int: ...
    def aio_connect(
        self,
        id: CData,
        data: CData | bytes,
        length: int,
        responder_resources: int,
        initiator_depth: int,
        flow_control: int,
        retry_count: int,
        rnr_retry_count: int,
        qp_num: int,
        /,
    ) -> int: ...
    def aio_accept(
        self,
        id: CData,
        data: CData | bytes,
        length: int,
        responder_resources: int,
        initiator_depth: int,
        flow_control: int,
        retry_count: int,
        rnr_retry_count: int,
        qp_num: int,
        /,
    ) -> int: ...
    def aio_create_cq(
        self, context: CData, cqe: int, own: int, channel: CData, vector: int, /
    ) -> CData: ...
    def aio_create_qp(
        self,
        pd: CData,
        send_cq: CData,
        recv_cq: CData,
        srq: CData,
        type: int,
        all_signaled: int,
        token: int,
        numbers: CData,
        /,
    ) -> CData: ...
    def aio_create_cq_ex(
        self, context: CData, cqe: int, own: int, channel: CData, vector: int, fields: int, /
    ) -> CData: ...
    def aio_poll_cq_ex(
        self, cq: CData, most: int, fields: int, wcs: CData, extras: CData, /
    ) -> int: ...
    def aio_query_clock(self, context: CData, ticks: CData, /) -> int: ...

ffi: Final[_FFI]
lib: Final[_Lib]
