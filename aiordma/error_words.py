"""Words and hints for what C and adapters report: errno, statuses, reasons, events of queues.

This file has data only; `aiordma.errors` makes exceptions from it.
"""

from __future__ import annotations

import errno

from aiordma.device_nodes import NO_PERMISSION

__all__ = [
    "CASE_HINTS",
    "CAUSE_HINT",
    "CLASS_HINTS",
    "CM_HINTS",
    "DISCONNECTED_HINT",
    "ERRNO_HINTS",
    "ERRNO_HINTS_ANY",
    "EVENT_HINTS",
    "REJECT_REASONS",
    "SERVICE_REASONS",
    "WC_HINTS",
    "WC_STATUS",
]

_RD = "belongs to the reliable datagram service, which no adapter has"

# ibv_wc_status, in order, with the hint for each; people search for these names.
WC_HINTS = {
    "SUCCESS": "",
    "LOC_LEN_ERR": "the message is longer than the posted receive",
    "LOC_QP_OP_ERR": "the queue pair could not carry out its own request; on Soft-RoCE also: "
    "a message longer than the posted receive, or the network device is down",
    "LOC_EEC_OP_ERR": _RD,
    "LOC_PROT_ERR": "the buffer is not registered in the queue pair's protection domain",
    "WR_FLUSH_ERR": "the queue pair was already in error; look for the first failed request",
    "MW_BIND_ERR": "the window could not be bound: was the region registered with "
    "Access.MW_BIND, is the window in the same protection domain?",
    "BAD_RESP_ERR": "the peer's adapter answered with something unexpected: a fault of an "
    "adapter, or of the network",
    "LOC_ACCESS_ERR": "the receive's region does not allow local writing: register it with "
    "Access.LOCAL_WRITE",
    "REM_INV_REQ_ERR": "the peer's queue pair does not allow this operation: its access flags lack "
    "it (`BringUpConfig.access`, by default without atomics), or the lease has ended; its posted "
    "receive was too small; or an atomic is not aligned",
    "REM_ACCESS_ERR": "wrong rkey or range, missing permission, or the peer's lease or process has "
    "ended",
    "REM_OP_ERR": "the peer's adapter could not complete the request; on Soft-RoCE also: the "
    "message is longer than the posted receive",
    "RETRY_EXC_ERR": "no acknowledgement from the peer's adapter: is the peer alive, "
    "is UDP port 4791 (RoCE) open, do GID, VLAN and MTU match on the path?",
    "RNR_RETRY_EXC_ERR": "the peer has no receive posted",
    "LOC_RDD_VIOL_ERR": _RD,
    "REM_INV_RD_REQ_ERR": _RD,
    "REM_ABORT_ERR": "the peer's adapter aborted the operation",
    "INV_EECN_ERR": _RD,
    "INV_EEC_STATE_ERR": _RD,
    "FATAL_ERR": "the adapter itself failed: see the kernel's log (`dmesg`)",
    "RESP_TIMEOUT_ERR": "the peer's adapter took the request and did not answer in time",
    "GENERAL_ERR": "an error of the transport without a status of its own: vendor_err and the "
    "adapter's documentation say more",
    "TM_ERR": "tag matching failed; aiordma posts no tagged receives",
    "TM_RNDV_INCOMPLETE": "the peer's tag-matching rendezvous was not completed by the adapter",
}
WC_STATUS = tuple(WC_HINTS)

EVENT_HINTS = {
    "CQ_ERR": "most likely an overrun: more completions than the completion queue has room for",
    "QP_FATAL": "the adapter could not report the failure through a completion",
    "QP_REQ_ERR": "the peer sent a request that its queue pair must not send",
    "QP_ACCESS_ERR": "the peer used a wrong key, a wrong range, or a right that it was not given",
    "SRQ_ERR": "no queue pair can receive through the shared receive queue any more",
}

# For connections with `raw`, where the peer cannot send a reason.
DISCONNECTED_HINT = (
    "its program aborted or ended, or its library found that this side broke the protocol: see its "
    "log"
)

# Of a lost connection with a `__cause__` that has no hint of its own.
CAUSE_HINT = "`__cause__` has the first failure; the peer's log may tell more"

# By the class of the exception, for cases without a better hint.
CLASS_HINTS = {
    "RdmaError": "the text, and `__cause__` if there is one, say what happened; `aiordma "
    "doctor` looks for what this machine lacks",
    "LibraryMissingError": "install rdma-core's libraries; `aiordma doctor` says what is missing",
    "ForkedError": "start processes that use RDMA with multiprocessing's method `spawn` or "
    "`forkserver`",
    "RdmaOSError": "the call's man page explains the errno; the kernel's log (`dmesg`) and "
    "`aiordma doctor` may say more",
    "RdmaPermissionError": "see the modes of /dev/infiniband/*, and `ulimit -l` if memory was to "
    "be pinned; `aiordma doctor` checks both",
    "RdmaTimeoutError": "the peer lives but does not answer: does its program receive? The "
    "configuration has the time limits",
    "ResourceClosedError": "this program closed the object before: look for a close(), an abort(), "
    "or the end of a `with` block",
    "DeviceNotFoundError": "`rdma link` and `aiordma devices` list the devices, `aiordma doctor` "
    "says what is missing",
    "NotSupportedError": "`aiordma devices` and Context.query_device() tell what a device can do",
    "ResultLostError": "the network loses or reorders packets, and the adapter is Soft-RoCE: "
    "the connection will break; connect again, and read again (`docs/surprises.md`)",
    "BatchError": "`__cause__` tells why; `done`, `failed`, `unknown` and `unposted` name the "
    "operations",
    "BatchLostError": "`__cause__` tells why; `done`, `unknown` and `unposted` name the "
    "operations: connect again, and repeat those that were not done",
    "MessageTooLargeError": "send it in pieces, or have the receiving side raise max_message_size "
    "in its ConnectionConfig",
    "ConnectionFailedError": "is the peer up, is the address right? see `aiordma doctor` on both "
    "sides",
    "AuthenticationError": "do both sides have the same secret under the same name, or has one "
    "side keys and the other none? see docs/security.md",
    "HostNotFoundError": "is the name right? `getent hosts NAME` asks the same resolver",
    "ConnectionRejectedError": "`private_data` and `status` have what the peer gave as its reason",
    "ConnectTimeoutError": "no answer: is the peer up, is the address right, is UDP port 4791 "
    "(RoCE) open?",
    "PeerGoneError": "the peer's log, and the log of this side, may say more",
    "ConnectionLostError": "the peer's log, and the log of this side, may say more",
    "ConnectionEndedError": "the peer closed in good order; all that it sent was delivered",
    "DeviceRemovedError": "the kernel's log (`dmesg`) tells why the device went",
    "ProtocolError": "do both sides run the same kind of program, and compatible versions of "
    "aiordma?",
    "RequestError": "`remote_type` and the text are the peer's; its log has the traceback",
    "RequestRefusedError": "the request was not served; the text has the peer's reason",
    "RequestUnknownError": "do both sides run compatible versions of the program?",
    "RequestDeadlineError": "the peer's handler took too long, or `timeout` was short",
    "StaleRegionError": "ask the peer for the region again, over the connection that uses it "
    "(`docs/memory.md`)",
    "CompletionError": "docs/errors.md explains the statuses, and the adapter's documentation "
    "vendor_err",
}

# For cases that have no class of their own.
CASE_HINTS = {
    "busy": "wait until its other users are done, or close them, and call again",
    "device memory": "docs/buffers.md lists the parts; copy to memory of the processor instead",
    "atomic": "the network loses or reorders packets, and the adapter is Soft-RoCE: "
    "read the integer before you decide (`docs/memory.md`)",
    "silent": "is its event loop blocked, as by time.sleep() or a debugger, has its host "
    "stopped, or is the link down?",
    "damaged": "does the network reorder packets (`docs/surprises.md`), or does the "
    "sender's program change the buffer of a message before `send()` has returned?",
    "overloaded": "send fewer or smaller requests at a time, or try again later; the "
    "peer sets its limits where it calls requests()",
    "stopping": "connect again, perhaps to another server, as a `Pool` does by itself",
    "pool": "raise max_size or timeout, or hold connections for a shorter time; "
    "`__cause__` tells why the pool could not connect",
    "queue": "the kernel's log (`dmesg`) may tell more",
}

# For events of the connection manager whose errno has no hint.
CM_HINTS = {
    "ADDR_ERROR": "`ip route get ADDRESS` shows the route, `rdma link` its device, `ip neighbor` "
    "the neighbor",
    "ROUTE_ERROR": "`ip route get ADDRESS` shows the route; on InfiniBand it comes from the subnet "
    "manager",
    "MULTICAST_ERROR": "is the interface up, is the group a multicast address?",
}

# ib_cm_sidr_status: how a datagram service answers a request; reason, hint.
SERVICE_REASONS = {
    1: ("no such service", "no program listens for datagrams on that port"),
    2: ("consumer defined", "the peer's program refused the request"),
    3: ("no queue pair", ""),
    4: ("redirected", "the service is elsewhere"),
    5: ("unsupported version", ""),
}

_GONE_GID = (
    "the port has no GID with this index, perhaps because an address was removed: `aiordma "
    "gids`, `ip address`"
)
# By the C function that failed, and the errno.
ERRNO_HINTS: dict[tuple[str, int], str] = {
    ("ibv_reg_mr", errno.ENOMEM): "is RLIMIT_MEMLOCK too low? see `ulimit -l`; Soft-RoCE "
    "registers at most 1 GiB at a time",
    ("ibv_reg_mr", errno.EPERM): "RLIMIT_MEMLOCK is 0; raise it with `ulimit -l`",
    ("ibv_reg_mr", errno.EFAULT): "the kernel does not pin this memory: Linux 6.12 pins no shared "
    "mapping of a file on disk for writing, Linux 6.1 no shared mapping that is read-only; copy it "
    "to other memory, or map with MAP_PRIVATE what is only read",
    ("ibv_query_gid_ex", errno.ENODATA): "the port has no GID with this index: `aiordma gids`",
    ("ibv_query_gid_ex", errno.EINVAL): "the port has no GID with this index: `aiordma gids`",
    ("ibv_modify_qp", errno.ENODATA): _GONE_GID,
    ("ibv_create_ah", errno.ENODATA): _GONE_GID,
    ("ibv_query_port_speed", errno.EOPNOTSUPP): "the `active_width` and `active_speed` of "
    "`query_port` stand for the number of lanes and the speed of each",
    ("ibv_open_device", errno.EACCES): NO_PERMISSION,
    ("ibv_open_device", errno.EPERM): NO_PERMISSION,
    ("rdma_create_event_channel", errno.EACCES): NO_PERMISSION,
    ("rdma_create_event_channel", errno.EPERM): NO_PERMISSION,
    ("rdma_create_event_channel", errno.ENODEV): "no RDMA device can be reached: "
    "`aiordma doctor`; without one `aiordma-fabric -- COMMAND` runs a program in memory, and "
    "`python -m aiordma_softroce -- COMMAND` on a software adapter, after `pip install "
    "aiordma-softroce`, or in a checkout `pip install ./softroce`",
    ("rdma_create_event_channel", errno.ENOENT): "`modprobe rdma_ucm`; a container needs "
    "/dev/infiniband/rdma_cm mapped",
    ("rdma_bind_addr", errno.EADDRNOTAVAIL): "no interface of this host has the address",
    ("rdma_bind_addr", errno.EADDRINUSE): "another listener has this port",
    ("rdma_bind_addr", errno.ENODEV): "no RDMA device serves the address: `rdma link`; or the "
    "limit of the rdma cgroup is reached (rdma.max)",
    ("rdma_connect", errno.EADDRINUSE): "on iWARP a TCP socket has the local port: connect from "
    "another port, or from any",
    ("rdma_listen", errno.EADDRINUSE): "another listener has this port, or on iWARP TCP has it",
    ("rdma_resolve_addr", errno.EADDRINUSE): "another id has the port: set reuse_address for both",
    ("rdma_resolve_addr", errno.EADDRNOTAVAIL): "no interface of this host has the local address, "
    "or every local port has a connection to that address and port",
    ("rdma_resolve_addr", errno.EINVAL): "no RDMA device serves this address, or the source "
    "address does not fit: `rdma link`",
    ("rdma_resolve_addr", errno.ENODEV): "no RDMA device serves this address: `rdma link`, "
    "`aiordma devices`; or the limit of the rdma cgroup is reached (rdma.max)",
    ("ibv_create_ah", errno.ETIMEDOUT): "no neighbor has the address: `ip neighbor`",
}
for _queue in ("ibv_create_cq", "ibv_create_qp", "ibv_create_srq"):
    # libsiw takes a valid page for invalid, and gives no reason: tests/device/test_siw_limits.py.
    ERRNO_HINTS[_queue, errno.EIO] = (
        "the driver gave no reason; a process has 144 pages for all its queues on software iWARP"
    )
for _post in ("ibv_post_send", "ibv_post_recv", "ibv_post_srq_recv"):
    ERRNO_HINTS[_post, errno.EAGAIN] = ""  # a post makes nothing that the cgroup counts
ERRNO_HINTS_ANY: dict[int, str] = {
    errno.ENETUNREACH: "no route to this address: `ip route` lists the routes",
    errno.EHOSTUNREACH: "the neighbor did not answer: is the host up, is the address right?",
    errno.EACCES: "RDMA handles belong to the process and credentials that opened them",
    errno.EMFILE: "too many open files: `ulimit -n`",
    errno.EAGAIN: "the rdma cgroup's limit may be reached (rdma.max)",
    errno.ENODEV: "no RDMA device serves this address: `rdma link`, `aiordma devices`",
}

# ib_cm_rej_reason, where a user can do something about it.
REJECT_REASONS: dict[int, tuple[str, str]] = {
    1: ("no queue pair", ""),
    3: ("no resources", "the peer ran out of resources"),
    4: ("timeout", "the peer gave up waiting; try again"),
    5: ("unsupported request", ""),
    6: ("invalid communication id", ""),
    8: ("invalid service id", "no program listens on that port"),
    10: ("stale connection", "the peer still holds an old connection; try again"),
    28: (
        "consumer defined",
        "the peer's program or its library refused: `private_data` may say why; is it another kind "
        "of server?",
    ),
    30: ("duplicate communication id", "try again"),
}
