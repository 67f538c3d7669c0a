"""Event loops that make connections over RDMA: the switch for a whole program.

`RdmaLoopMixin` overrides `create_connection` and `create_server` of the loop that it is mixed with,
through which all connections of asyncio are made.  A call for an address without an RDMA device
goes to that loop as if the mixin were not there.  Which way a connection or a server takes is
decided before anything is tried, by a rule that the program chooses, and is logged.  If RDMA was
chosen and fails, the call fails: nothing is tried again over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import socket
import stat
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVarTuple

from aiordma.cm.address import Address
from aiordma.link.reach import device_at, device_towards
from aiordma.link.stream_sockets import obstacle
from aiordma.link.transport_socket import address_of
from aiordma.logs import log_of
from aiordma.streams.connecting import create_connection
from aiordma.streams.server import create_server
from aiordma.streams.tls import start_tls

__all__ = ["RdmaEventLoop", "RdmaLoopMixin", "event_loop_policy", "new_event_loop"]

When = Literal["device", "always"] | Callable[[str, int], bool]
_Ts = TypeVarTuple("_Ts")
_log = log_of()
_inside = contextvars.ContextVar("inside create_connection", default=False)

if TYPE_CHECKING:
    _Loop = asyncio.AbstractEventLoop
else:
    _Loop = object


class RdmaLoopMixin(_Loop):
    """Makes an event loop connect and serve over RDMA: mix it in before the loop's class.

    Args:
        args: For the loop's class.
        when: Which addresses are for RDMA.  "device": those that an RDMA device has, or that are
            reached through one; "always": all; or a function of a numeric host and a port.
        kwargs: For the loop's class.

    Raises:
        ValueError: `when` is something else.

    A server for a socket that is bound and does not listen yet serves its address over RDMA.
    Sockets that are connected or listen, `sock_connect` and `sock_accept`, sockets that the program
    watches by `add_reader`, and datagrams always stay with the loop itself, which is logged; UNIX
    sockets do, too.
    """

    def __init__(self, *args: Any, when: When = "device", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            _check(when)
        except ValueError:
            self.close()
            raise
        self._when: When = when
        self._told: dict[int, int] = {}  # inode of the socket that was logged, by descriptor

    async def create_connection(
        self,
        protocol_factory: Callable[[], Any],
        host: Any = None,
        port: Any = None,
        *,
        family: int = 0,
        proto: int = 0,
        flags: int = 0,
        sock: Any = None,
        local_addr: Any = None,
        **options: Any,
    ) -> Any:
        """Connect over RDMA if the address is for it, else as the loop itself does.

        If some addresses of a name are for RDMA, only these are tried.

        Args:
            protocol_factory: Makes the protocol.
            host: Name or address of the peer.
            port: Its port, a number or the name of a service.
            family: As for `getaddrinfo`; proto and flags likewise.
            proto: See family.
            flags: See family.
            sock: A socket that the program has connected; it stays with the loop itself.
            local_addr: Local (host, port) to connect from.
            options: As for `aiordma.create_connection`, and `all_errors`; without RDMA as for the
                loop's own method.

        Raises: as `aiordma.create_connection`; without RDMA as the loop's own method.

        Cancellation: the resources are closed.
        """
        lookup = {"family": family, "proto": proto, "flags": flags}
        if sock is None and host is not None and port is not None:
            found = await self._look_up(host, port, **lookup)
            source = local_addr[0] if local_addr else None
            ways = {address: await self._towards(address, source) for address in found}
            chosen = [address for address, way in ways.items() if way]
            if chosen:
                _log.info("connecting to %s port %s over RDMA: %s", host, port, ways[chosen[0]])
                # All of a name's addresses: then they are raced, with a head start for the first.
                whole = len(chosen) == len(found)
                hosts = [host] if whole else [numeric for numeric, _ in chosen]
                if options.get("ssl") and options.get("server_hostname") is None:
                    options["server_hostname"] = host
                options |= {"local_addr": local_addr, **lookup}
                return await _connect(protocol_factory, hosts, chosen[0][1], options)
            _log.info("connecting to %s port %s not over RDMA: %s", host, port, self._why_not())
        elif sock is not None:
            _tell_own("a connection by create_connection(sock=)", sock)
        base: Any = super()
        return await base.create_connection(
            protocol_factory, host, port, sock=sock, local_addr=local_addr, **lookup, **options
        )

    async def create_server(
        self,
        protocol_factory: Callable[[], Any],
        host: Any = None,
        port: Any = None,
        *,
        family: int = socket.AF_UNSPEC,
        flags: int = socket.AI_PASSIVE,
        sock: Any = None,
        **options: Any,
    ) -> Any:
        """Serve over RDMA if the addresses are for it, else as the loop itself does.

        A wildcard is for RDMA if the machine has a device.

        Args:
            protocol_factory: Makes the protocol of each connection.
            host: Local name or address, or several; None or "" for all.
            port: A number, or the name of a service.
            family: As for `getaddrinfo`; flags likewise.
            flags: See family.
            sock: A socket instead of host and port.  If it neither listens nor is connected, its
                address decides whether to serve over RDMA; otherwise it stays with the loop itself.
            options: As for `aiordma.create_server`; without RDMA as for the loop's own method.

        Raises:
            ValueError: Some of the addresses are for RDMA and some are not: make two servers.
            OSError: As `aiordma.create_server`; without RDMA as the loop's own method.

        Cancellation: the resources are closed.
        """
        ways: dict[Address, str | None] = {}
        hosts = [host] if host is None or isinstance(host, str) else list(host)
        where = ", ".join(each or "every address" for each in hosts), port
        if host is not None and not isinstance(host, str):
            host = hosts  # an iterator has been used up
        if sock is None and port is not None:
            for each in hosts:
                for address in await self._look_up(each or None, port, family, flags=flags):
                    ways[address] = await self._at(address)
        elif sock is not None and host is None and port is None:
            reason = obstacle(sock)
            if reason is None:
                where = address_of(sock.getsockname())
                ways[where] = await self._at(where)
            else:
                _tell_own(f"a server by create_server(sock=), which {reason}", sock)
        if any(ways.values()):
            if not all(ways.values()):
                lost = ", ".join(address[0] for address, way in ways.items() if not way)
                msg = f"a server has all its addresses over RDMA, or none; not for RDMA: {lost}"
                raise ValueError(msg)
            address, way = next(iter(ways.items()))
            _log.info("listening on %s port %s over RDMA: %s", *where, way)
            return await create_server(
                protocol_factory,
                host,
                address[1] if sock is None else None,
                family=family,
                flags=flags,
                sock=sock,
                **_without_socket_options(options),
            )
        if ways:
            _log.info("listening on %s port %s not over RDMA: %s", *where, self._why_not())
        return await super().create_server(
            protocol_factory, host, port, family=family, flags=flags, sock=sock, **options
        )

    # Calls that stay on sockets are the loop's own, and are logged

    async def connect_accepted_socket(
        self, protocol_factory: Callable[[], Any], sock: Any, **options: Any
    ) -> Any:
        """The loop's own: the program has accepted the connection itself.

        Args:
            protocol_factory: Makes the protocol.
            sock: Its socket.
            options: As for the loop's.

        Raises: as the loop's own.

        Cancellation: as the loop's own.
        """
        _tell_own("a connection by connect_accepted_socket", sock)
        return await super().connect_accepted_socket(protocol_factory, sock, **options)

    async def create_datagram_endpoint(
        self, protocol_factory: Callable[[], Any], *args: Any, **options: Any
    ) -> Any:
        """The loop's own: the switch is for streams.

        Args:
            protocol_factory: Makes the protocol.
            args: As for the loop's.
            options: As for the loop's.

        Raises: as the loop's own.

        Cancellation: as the loop's own.
        """
        _log.info("a datagram endpoint not over RDMA: the switch is for streams")
        return await super().create_datagram_endpoint(protocol_factory, *args, **options)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """The loop's own: the socket is the program's.

        Args:
            sock: A socket.
            address: The peer's address.

        Raises: as the loop's own.

        Cancellation: as the loop's own.
        """
        if not _inside.get():
            _tell_own("a connection by sock_connect", sock, address)
        await super().sock_connect(sock, address)

    async def _connect_sock(self, *args: Any) -> Any:
        """The call of sock_connect by asyncio itself; `create_connection` has logged it already."""
        token = _inside.set(True)
        try:
            base: Any = super()
            return await base._connect_sock(*args)
        finally:
            _inside.reset(token)

    async def sock_accept(self, sock: Any) -> Any:
        """The loop's own: the socket is the program's.

        Args:
            sock: A socket that listens.

        Raises: as the loop's own.

        Cancellation: as the loop's own.
        """
        self._tell_once("a server by sock_accept", sock)
        return await super().sock_accept(sock)

    def add_reader(self, fd: Any, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """The loop's own: the descriptor is the program's.

        Args:
            fd: A descriptor.
            callback: Called when it can be read.
            args: For `callback`.
        """
        self._tell_once("a socket by add_reader", fd)
        super().add_reader(fd, callback, *args)

    def add_writer(self, fd: Any, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """The loop's own: the descriptor is the program's.

        Args:
            fd: A descriptor.
            callback: Called when it can be written.
            args: For `callback`.
        """
        self._tell_once("a socket by add_writer", fd)
        super().add_writer(fd, callback, *args)

    def _tell_once(self, what: str, fd: Any) -> None:
        """Log a stream socket once; once more if its descriptor is another socket's later."""
        try:
            number = fd if isinstance(fd, int) else fd.fileno()
            status = os.fstat(number)
        except (AttributeError, OSError):
            return  # the loop itself refuses it
        if stat.S_ISSOCK(status.st_mode) and self._told.get(number) != status.st_ino:
            self._told[number] = status.st_ino
            sock = socket.socket(fileno=number)
            try:
                _tell_own(what, sock)
            finally:
                sock.detach()

    async def start_tls(
        self, transport: Any, protocol: Any, sslcontext: Any, **options: Any
    ) -> Any:
        """Encrypt a connection, whichever way it goes.

        Args:
            transport: The connection's.
            protocol: For the new transport.
            sslcontext: An `ssl.SSLContext`.
            options: As for `aiordma.start_tls`.

        Raises: as `aiordma.start_tls`; without RDMA as the loop's own method.

        Cancellation: the connection is closed.
        """
        # asyncio's TLS transport asks the one below: TLS within TLS is possible.
        if _goes_over_rdma(transport):
            return await start_tls(transport, protocol, sslcontext, **options)
        return await super().start_tls(transport, protocol, sslcontext, **options)

    async def sendfile(
        self,
        transport: Any,
        file: Any,
        offset: int = 0,
        count: int | None = None,
        *,
        fallback: bool = True,
    ) -> int:
        """Send a file, whichever way the connection goes; as `loop.sendfile`.

        Args:
            transport: The connection's.
            file: Open in binary mode.
            offset: Bytes of the file before the first that is sent.
            count: Bytes to send; to the end of the file by default.
            fallback: False refuses a connection over RDMA, which needs the file to be read.

        Returns:
            Bytes that were sent.

        Raises:
            ValueError: The file is a text file.
            RuntimeError: The connection is closing.
            NotImplementedError: The loop is uvloop's, which sends no files.

        Cancellation: bytes that were read from the file before are sent.
        """
        if _goes_over_rdma(transport):
            if "b" not in getattr(file, "mode", "b"):
                msg = "file should be opened in binary mode"
                raise ValueError(msg)
            # asyncio's own way to read a file begins where the file is, for an offset of 0.
            file.seek(offset)
        return int(await super().sendfile(transport, file, offset, count, fallback=fallback))

    async def _look_up(self, host: Any, port: Any, family: int, **hints: int) -> list[Address]:
        found = await self.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, **hints)
        addresses = (sockaddr for *_, sockaddr in found)
        return list(dict.fromkeys(address_of(each) for each in addresses))

    async def _towards(self, address: Address, source: str | None) -> str | None:
        """The reason to connect over RDMA; None to leave it to the loop."""
        if self._when == "device":
            return await device_towards(address, source)
        return self._ruled(address)

    async def _at(self, address: Address) -> str | None:
        """The reason to listen over RDMA; None to leave it to the loop."""
        return await device_at(address[0]) if self._when == "device" else self._ruled(address)

    def _ruled(self, address: Address) -> str | None:
        if callable(self._when):
            return "the program's rule" if self._when(*address) else None
        return "always"

    def _why_not(self) -> str:
        return "the program's rule" if callable(self._when) else "no RDMA device for the address"


class RdmaEventLoop(RdmaLoopMixin, asyncio.SelectorEventLoop):
    """asyncio's own loop, with RDMA: `RdmaEventLoop(selector=None, *, when="device")`."""


def _goes_over_rdma(transport: Any) -> bool:
    told = getattr(transport, "get_extra_info", None)
    return told is not None and told("backend") == "rdma"


def new_event_loop(*, when: When = "device", uvloop: bool = False) -> asyncio.AbstractEventLoop:
    """A loop that makes connections over RDMA, for `asyncio.Runner(loop_factory=...)`.

    Args:
        when: As for `RdmaLoopMixin`.
        uvloop: uvloop's loop instead of asyncio's.

    Returns:
        The loop, which the caller closes.

    Raises:
        ValueError: `when` is not one of the rules.
        ModuleNotFoundError: uvloop is not installed.
    """
    if not uvloop:
        return RdmaEventLoop(when=when)
    from uvloop import Loop

    # uvloop's types do not agree with asyncio's: no class statement that mypy could check.
    made: asyncio.AbstractEventLoop = type("RdmaUvloop", (RdmaLoopMixin, Loop), {})(when=when)
    return made


def event_loop_policy(*, when: When = "device", uvloop: bool = False) -> Any:
    """A policy whose new loops are those of `new_event_loop`, for `asyncio.set_event_loop_policy`.

    For programs whose call of `asyncio.run` cannot be changed.  Policies are deprecated in Python
    3.14, and gone in 3.16.

    Args:
        when: As for `RdmaLoopMixin`.
        uvloop: uvloop's loop instead of asyncio's.

    Raises:
        ValueError: `when` is not one of the rules.
        AttributeError: This Python has no policies any more.
    """
    _check(when)

    class RdmaEventLoopPolicy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return new_event_loop(when=when, uvloop=uvloop)

    return RdmaEventLoopPolicy()


def _check(when: object) -> None:
    if when not in ("device", "always") and not callable(when):
        msg = f'when is "device", "always" or a function of host and port, not {when!r}'
        raise ValueError(msg)


def _tell_own(what: str, sock: Any, peer: Any = None) -> None:
    """Log that the program's own stream socket is used as it is, and not over RDMA."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return
    with contextlib.suppress(OSError):
        peer = peer or sock.getpeername()
    where = f"to {peer[0]} port {peer[1]}" if peer else f"on {sock.getsockname()}"
    _log.info("%s %s not over RDMA: its socket is the program's own", what, where)


def _without_socket_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options except those that are only for sockets; a `reuse_port` of None is left out."""
    kept = {name: value for name, value in options.items() if name != "keep_alive"}
    if kept.get("reuse_port") is None:
        kept.pop("reuse_port", None)
    return kept


async def _connect(
    protocol_factory: Callable[[], Any], hosts: Iterable[str], port: int, options: dict[str, Any]
) -> Any:
    """Connect to the first of the hosts that accepts."""
    all_errors = options.pop("all_errors", False)
    failures: list[OSError] = []
    try:
        for host in hosts:
            try:
                return await create_connection(protocol_factory, host, port, **options)
            except OSError as exc:
                failures.append(exc)
        if all_errors:
            raise ExceptionGroup("create_connection failed", failures)
        raise failures[-1]
    finally:
        failures.clear()  # the exception has this frame in its traceback
