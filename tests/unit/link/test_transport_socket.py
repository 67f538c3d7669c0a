"""RdmaTransportSocket answers as the socket of asyncio's own transports does."""

from __future__ import annotations

import contextlib
import copy
import errno
import pickle
import socket
from asyncio.trsock import TransportSocket
from collections.abc import Iterator
from typing import Any

import pytest

from aiordma.link.stream_sockets import listening_socket, stream_socket
from aiordma.link.transport_socket import RdmaTransportSocket
from aiordma.streams.stream_config import DEFAULTS, StreamConfig

HERE, THERE = ("127.0.0.1", 7), ("127.0.0.1", 9)


@pytest.fixture
def stand_in() -> RdmaTransportSocket:
    return stream_socket(HERE, THERE, DEFAULTS)


@pytest.fixture
def real() -> Iterator[TransportSocket]:
    """The oracle: what asyncio has for a connection over TCP."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does
        yield TransportSocket(client)


def test_h03_it_has_all_that_asyncios_has(
    stand_in: RdmaTransportSocket, real: TransportSocket
) -> None:
    public = {name for name in dir(TransportSocket) if not name.startswith("_")}
    # getsockbyname calls a method that no socket has ever had.
    assert public - set(dir(stand_in)) == {"getsockbyname"}
    assert (stand_in.family, stand_in.type) == (real.family, real.type)
    assert stand_in.proto == real.proto
    assert type(stand_in.family) is type(real.family)
    assert type(stand_in.type) is type(real.type)
    assert stand_in.fileno() == -1
    assert stand_in.getsockname() == HERE
    assert stand_in.getpeername() == THERE
    assert stand_in.gettimeout() == real.gettimeout() == 0
    assert stand_in.get_inheritable() == real.get_inheritable()
    assert "laddr=('127.0.0.1', 7), raddr=('127.0.0.1', 9)" in repr(stand_in)


@contextlib.contextmanager
def failing(number: int) -> Iterator[None]:
    with pytest.raises(OSError, match=rf"Errno {number}\]"):
        yield


@pytest.mark.parametrize(
    "option",
    ["SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_ERROR", "SO_ACCEPTCONN", "SO_REUSEPORT"],
)
def test_h03_options_of_every_socket(
    stand_in: RdmaTransportSocket, real: TransportSocket, option: str
) -> None:
    number = getattr(socket, option)
    wanted = real.getsockopt(socket.SOL_SOCKET, number)
    assert stand_in.getsockopt(socket.SOL_SOCKET, number) == wanted
    as_bytes = real.getsockopt(socket.SOL_SOCKET, number, 4)
    assert stand_in.getsockopt(socket.SOL_SOCKET, number, 4) == as_bytes


def test_h03_options_are_remembered(stand_in: RdmaTransportSocket, real: TransportSocket) -> None:
    linger = b"\1\0\0\0\5\0\0\0"
    for sock in (stand_in, real):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == linger
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, b"\6\0\0\0")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 6
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 4) == b"\6\0\0\0"
    # Of more than four bytes no number can be made.
    with failing(errno.EINVAL):
        stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER)
    # One stand-in's options are no other's.
    assert stream_socket(HERE, THERE, DEFAULTS).getsockopt(socket.IPPROTO_TCP, 1) == 1


def test_h03_what_is_known_is_told_truly() -> None:
    config = StreamConfig(receive_buffer_size=8192, send_buffer_size=16384, tos=32)
    stand_in = stream_socket(HERE, THERE, config)
    stand_in.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    assert stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 8192
    assert stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 16384
    assert stand_in.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 32
    assert stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    silent = stream_socket(("::1", 1), ("::1", 2), StreamConfig(keepalive_s=None, tos=8))
    assert silent.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    assert silent.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == 8
    with failing(errno.ENOPROTOOPT):
        silent.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)


def test_h03_a_server_listens() -> None:
    v6 = listening_socket(("::", 80), DEFAULTS)
    assert v6.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
    for host, family in (("10.0.0.1", socket.AF_INET), ("::", socket.AF_INET6)):
        stand_in = listening_socket((host, 80), DEFAULTS)
        assert stand_in.family == family
        assert stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        assert stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        with failing(errno.ENOTCONN):
            stand_in.getpeername()
        assert "raddr" not in repr(stand_in)


def test_h03_ipv6_addresses_have_four_parts() -> None:
    interface = socket.if_indextoname(1)
    stand_in = stream_socket((f"fe80::1%{interface}", 7), ("fe80::2%5", 9), DEFAULTS)
    assert stand_in.family == socket.AF_INET6
    assert stand_in.getsockname() == ("fe80::1", 7, 0, 1)
    assert stand_in.getpeername() == ("fe80::2", 9, 0, 5)
    assert stream_socket(("::1", 7), None, DEFAULTS).getsockname() == ("::1", 7, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, "1"),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1.5),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, None),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1 << 40),
        ("SOL_SOCKET", socket.SO_KEEPALIVE, 1),
        (socket.SOL_SOCKET, None, 1),
    ],
)
def test_h03_options_of_a_wrong_type(
    stand_in: RdmaTransportSocket, real: TransportSocket, wrong: Any
) -> None:
    for sock in (stand_in, real):
        # Which of the two a number gives that is too large depends on the version of Python.
        with pytest.raises((TypeError, OverflowError)):
            sock.setsockopt(*wrong)


def test_h03_what_is_refused(stand_in: RdmaTransportSocket, real: TransportSocket) -> None:
    for sock in (stand_in, real):
        sock.setblocking(False)
        sock.settimeout(0)
        with pytest.raises(ValueError, match="cannot be blocking"):
            sock.setblocking(True)
        for timeout in (1, None):
            with pytest.raises(ValueError, match="only 0 timeout"):
                sock.settimeout(timeout)
        with pytest.raises(TypeError, match=r"serialize|copy or pickle"):
            pickle.dumps(sock)
        assert not hasattr(sock, "close")
    with pytest.raises(TypeError, match="copy or pickle"):
        copy.copy(stand_in)
    for call in (stand_in.dup, lambda: stand_in.shutdown(socket.SHUT_WR)):
        with failing(errno.EOPNOTSUPP):
            call()
