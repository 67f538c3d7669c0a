"""Which of distributed's tests do not run over `rdma://`, and why; a plugin of pytest that says so.

A pattern is the name of a file without `test_`, and that of a test; the first that fits is the
reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

_OTHER = "the test of another backend"
_FUNCTION = "a function by itself"
_PRIVATE = "replaces or expects private parts of the backend over TCP"
_IPV6 = "listens on addresses of IPv6, which the device has not"
_LOOPBACK = "expects addresses of loopback to stay as they are"
_AT_ONCE = "expects a batch of messages, 2 ms later, before a task ends, which is first over RDMA"
_HEADER = "expects that a header lies in the memory of the array behind it"
_NO_WAIT = "expects that a comm is gone when nothing has waited for its end"
_TWO = "needs 127.0.0.2: a second address, which the device has not"
LEFT_OUT = {
    "comms::test_inproc_*": _OTHER,
    "comms::test_tls_*": _OTHER,
    "comms::test_parse_host_port*": _FUNCTION,
    "comms::test_unparse_host_port*": _FUNCTION,
    "comms::test_register_backend_entrypoint*": "makes a backend of its own",
    "comms::test_get_stream_address_raises_if_closed*": _OTHER,
    "comms::test_default_client_server_*": "the default scheme, which is tcp://",
    "comms::test_tcp_listener_does_not_call_handler_on_handshake_error*": _PRIVATE,
    "comms::test_tcp_specific*": _PRIVATE,
    "comms::test_comm_closed_on_write_error*": _PRIVATE,
    "comms::test_stop_listener_during_handle_stream*": _PRIVATE,
    "comms::test_tcp_client_server_ipv6*": _IPV6,
    "comms::test_resolve_address*": _LOOPBACK,
    "comms::test_get_local_address_for*": "expects a way to the Internet",
    "comms::test_comm_failure_threading*": "counts the threads of the backend over TCP",
    "comms::test_share_buffer_with_header*-200000-9500-*": _HEADER,
    "comms::test_share_buffer_with_header*-350000-0-*": _HEADER,
    "core::test_server_listen": _IPV6,
    "core::test_rpc_tls": _OTHER,
    "core::test_large_payload": "a message of 2 GiB, five times in memory: a guest of 16 GiB",
    "client::test_exception_text": "fails over tcp:// too: the text of a function is not found",
    "client::test_nbytes_determines_worker": _AT_ONCE,
    "client::test_restrictions_*": _TWO,
    "client::test_allow_restrictions": _TWO,
    "client::test_unrunnable_task_runs": _TWO,
    "client::test_workers_register_indirect_data": _TWO,
    "client::test_client_replicate_host": _TWO,
    "scheduler::test_host_address": _TWO,
    "scheduler::test_coerce_address": _LOOPBACK,
    "scheduler::test_no_dangling_asyncio_tasks": _NO_WAIT,
    "worker::test_do_not_block_event_loop_during_shutdown": "two processors: on one it fails over "
    "tcp://, too",
    "worker::test_bad_local_directory": "fails over tcp:// too: root may write everywhere",
    "worker::test_worker_bad_args": "fails over tcp:// too: it looks for a text in a log",
    "worker::test_gather_dep_from_remote_workers_if_all_local_workers_are_busy": _TWO,
    "worker::test_host_address": _TWO,
    "worker::test_prefer_gather_from_local_address": _TWO,
    "worker::test_gather_dep_local_workers_first": _TWO,
    "nanny::test_worker_uses_same_host_as_nanny*": _TWO,
}
#: In virtual time: time passes only while everything sleeps.
SPIN = {
    "nanny::test_restart_memory*": "allocates memory until it is stopped, and never sleeps",
    "scheduler::test_restart_nanny_timeout_exceeded": _AT_ONCE,
    "scheduler::test_stimulus_from_erred_task": _AT_ONCE,
}


def why_left_out(name: str) -> str:
    """The reason, or an empty text for a test that runs; the name is that of a pattern."""
    every = dict(LEFT_OUT)
    if os.environ.get("AIORDMA_SOFTROCE_VIRTUAL_TIME"):
        every |= SPIN
    return next((reason for pattern, reason in every.items() if fnmatchcase(name, pattern)), "")


def name_of(item: pytest.Item) -> str:
    """What a pattern stands for."""
    return f"{Path(str(item.path)).stem.removeprefix('test_')}::{item.name}"


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip them."""
    for item in items:
        if reason := why_left_out(name_of(item)):
            item.add_marker(pytest.mark.skip(reason=f"left out: {reason}"))
