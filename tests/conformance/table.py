"""Which of CPython's tests run over RDMA, and why each of the others does not.

A name is `module.Class.method`, as in CPython's `test.test_asyncio`; a pattern is `fnmatch`'s. The
first pattern that fits gives the reason. A test that fits none runs, if its class is one that does;
otherwise `test_table.py` fails, as it does for what a new version of Python brings.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["LEFT_OUT", "RUN", "why_left_out"]

#: Classes that run; of each loop's variants one.
RUN = (
    "test_buffered_proto.BufferedProtocolSelectorTests",
    "test_events.EPollEventLoopTests",
    "test_sendfile.EPollEventLoopTests",
    "test_ssl.TestSSL",
    "test_sslproto.SelectorStartTLSTests",
    "test_streams.StreamTests",
)

_UNIX = "Unix sockets"
_READER = "StreamReader by itself, no transport"
_LOOP = "the loop itself, no connection"
_WINDOWS = "Windows only"

_EVENTS = {
    "*unix*": _UNIX,
    "test_create_datagram_endpoint*": "datagrams",
    "test_subprocess_*": "child processes",
    "test_*pipe*": "pipes",
    "test_*pty*": "terminals",
    "test_*connect_accepted_socket*": "hands an accepted TCP socket to the loop",
    "test_create_server_sock": "compares the file descriptor of the socket given by sock=",
    "test_create_server_reuse_port": "SO_REUSEPORT: two RDMA servers cannot share a port",
    "test_create_server_multiple_hosts_*": "replaces the socket module, and serves on addresses "
    "that this host does not have",
    "test_create_server_dual_stack": "a TCP client of ::1; the RDMA device has one address",
    "test_create_server": "expects the client's address to be 127.0.0.1; the relay has the "
    "device's. test_create_server_ssl runs, which is the same with TLS",
    "test_create_connection_local_addr_in_use": "a port in use by a TCP program is free to RDMA",
    "test_prompt_cancellation": "socket methods of the loop, and private ones",
    **dict.fromkeys(
        (
            "test_add_fds_after_closing", "test_add_signal_handler", "test_call_later",
            "test_call_soon*", "test_close", "test_close_running_event_loop", "test_internal_fds",
            "test_reader_callback", "test_writer_callback", "test_remove_fds_after_closing",
            "test_run_in_executor*", "test_run_until_complete*", "test_signal_handling_*",
            "test_timeout_rounding",
        ),
        _LOOP,
    ),
}  # fmt: skip

_STREAMS = {
    "*unix*": _UNIX,
    "test_read_all_from_pipe_reader": "pipes",
    "test_multiple_drain": "the mixin of drain() by itself, no transport",
    "test_unhandled_exceptions": "closes the server as soon as its client is through, which may be "
    "before the server has read that client's confirmation; tests/device/test_stream_server.py",
    "test_*Error_pickleable": "exceptions by themselves",
    **dict.fromkeys(
        (
            "test___repr__*", "test_at_eof", "test_exception*", "test_feed_*", "test_invalid_limit",
            "test_read_*", "test_read", "test_readexactly*", "test_readline*", "test_readuntil_*",
            "test_streamreader*",
        ),
        _READER,
    ),
}  # fmt: skip

_SENDFILE = {
    "test_sock_sendfile_*": "a TCP socket, no transport",
    "test_sendfile_not_supported": "datagrams",
    "test_sendfile_no_fallback_for_fallback_transport": "a mock, no transport",
    "test_sendfile_force_unsupported_native": "expects the words of a transport that has a native "
    "sendfile; RdmaTransport has the fallback alone, and the loop says so",
    "test_sendfile_prevents_bare_write": "forbids write() while the native sendfile runs; the "
    "fallback replaces the protocol instead, as with TLS",
}

_SSLPROTO = {
    "test_buf_feed_data": "a function by itself",
    "test_start_tls_wrong_args": "no connection is made",
}

_SSL = {
    "*connect_accepted_socket": "hands an accepted TCP socket to the loop",
}

_CLASSES = {
    "test_server.SelectorStartServerTests.test_start_unix_server_1": _UNIX,
    "test_server.SelectorStartServerTests.test_start_server_1": "reads private attributes of "
    "asyncio.Server at its end",
    "*Proactor*": _WINDOWS,
    "test_windows_*": _WINDOWS,
    "test_proactor_events.*": _WINDOWS,
    "test_events.PollEventLoopTests.*": "the same tests with another selector",
    "test_events.SelectEventLoopTests.*": "the same tests with another selector",
    "test_events.*": "policies, handles and timers: no transport",
    "test_sendfile.PollEventLoopTests.*": "the same tests with another selector",
    "test_sendfile.SelectEventLoopTests.*": "the same tests with another selector",
    "test_sslproto.SslProtoHandshakeTests.*": "mocks in place of transports",
    "test_base_events.*": "the loop on mocks of sockets",
    "test_selector_events.*": "asyncio's own transport, on mocks of sockets",
    "test_sock_lowlevel.*": "socket methods of the loop: no transport",
    "test_unix_events.*": "pipes, signals, child processes and Unix sockets",
    "test_eager_task_factory.*": "tasks: no transport",
    "test_free_threading.*": "tasks: no transport",
    "test_graph.*": "tasks: no transport",
    "test_staggered.*": "tasks: no transport",
    "test_tools.*": "tasks: no transport",
    **dict.fromkeys(
        (
            "test_context.*", "test_futures.*", "test_futures2.*", "test_locks.*", "test_pep492.*",
            "test_protocols.*", "test_queues.*", "test_runners.*", "test_subprocess.*",
            "test_taskgroups.*", "test_tasks.*", "test_threads.*", "test_timeouts.*",
            "test_transports.*", "test_waitfor.*",
        ),
        "no transport of a connection is used",
    ),
}  # fmt: skip

_INSIDE: dict[str, dict[str, str]] = {
    "test_events.EPollEventLoopTests": _EVENTS,
    "test_sendfile.EPollEventLoopTests": _SENDFILE,
    "test_ssl.TestSSL": _SSL,
    "test_sslproto.SelectorStartTLSTests": _SSLPROTO,
    "test_streams.StreamTests": _STREAMS,
}

#: Reason of each test that is left out, by pattern.
LEFT_OUT: dict[str, str] = {
    f"{kind}.{name}": why for kind, table in _INSIDE.items() for name, why in table.items()
} | _CLASSES


def why_left_out(name: str) -> str | None:
    """The reason; None for a test that runs.

    Raises:
        LookupError: The test is neither in a class that runs nor in the table.
    """
    kind = name.rpartition(".")[0]
    patterns = _CLASSES if kind not in RUN else [f"{kind}.{each}" for each in _INSIDE.get(kind, ())]
    for pattern in patterns:
        if fnmatchcase(name, pattern):
            return LEFT_OUT[pattern]
    if kind in RUN:
        return None
    msg = f"{name} neither runs nor is in the table"
    raise LookupError(msg)
