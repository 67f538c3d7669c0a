"""Names of hosts and services as librdmacm resolves them (`rdma_getaddrinfo(3)`).

Ordinary programs let `aiordma.connect` resolve a name by the event loop.  These calls are for
programs that need what only librdmacm knows: the type of queue pair, the port space, and the path
that ibacm has cached.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma.arguments import check_kind, check_seconds
from aiordma.cm.address import Address, from_sockaddr
from aiordma.cm.enums import PortSpace
from aiordma.errors import HostNotFoundError, os_error
from aiordma.loop.workers import call_blocking
from aiordma.verbs.enums import QPType

__all__ = ["AddressInfo", "c_names", "getaddrinfo", "hints_of", "taken"]


@dataclass(frozen=True, slots=True)
class AddressInfo:
    """One way to a host and service (`struct rdma_addrinfo`).

    Attributes:
        family: Address family, such as `socket.AF_INET`.
        qp_type: Type of queue pair for it.
        port_space: Port space of an id for it.
        source: Local (address, port); None if any will do.
        destination: (address, port) of the peer; None for an address to listen on.
        canonical_name: Name of the peer, if it was found; otherwise empty.
    """

    family: int
    qp_type: QPType
    port_space: PortSpace
    source: Address | None
    destination: Address | None
    canonical_name: str = ""


def hints_of(port_space: PortSpace, *, passive: bool = False, numeric: bool = False) -> Any:
    """The C hints.

    Raises:
        TypeError: Not a port space.
    """
    check_kind("port_space", port_space, PortSpace, none=False)
    hints = ffi.new("struct rdma_addrinfo *")
    hints.ai_port_space = int(port_space)
    hints.ai_flags = lib.RAI_PASSIVE * passive | lib.RAI_NUMERICHOST * numeric
    return hints


def c_names(node: str | None, service: str | int | None) -> tuple[Any, Any]:
    """Node and service for C.

    Raises:
        TypeError: Not a str, or no int for a service.
        ValueError: Both are None, or a name has a NUL in it.
    """
    check_kind("node", node, str)
    if type(service) is int:
        service = str(service)
    check_kind("service", service, str)
    if node is None and service is None:
        msg = "node and service are both None"
        raise ValueError(msg)
    return _c_name(node), _c_name(service)


def _c_name(name: Any) -> Any:
    if name is None:
        return ffi.NULL
    if "\0" in name:
        msg = f"a NUL in {name!r}"
        raise ValueError(msg)
    return ffi.new("char[]", name.encode("idna"))


def taken(first: Any) -> list[AddressInfo]:
    """Convert the list that C has made, and free it."""
    found = []
    try:
        each = first
        while each:
            found.append(
                AddressInfo(
                    family=each.ai_family,
                    qp_type=QPType(each.ai_qp_type),
                    port_space=PortSpace(each.ai_port_space),
                    source=_address(each.ai_src_addr),
                    destination=_address(each.ai_dst_addr),
                    canonical_name=_text(each.ai_dst_canonname),
                )
            )
            each = each.ai_next
    finally:
        if first:
            lib.rdma_freeaddrinfo(first)
    return found


def _address(sockaddr: Any) -> Address | None:
    return from_sockaddr(sockaddr) if sockaddr else None


def _text(name: Any) -> str:
    return bytes(ffi.string(name)).decode(errors="replace") if name else ""


async def getaddrinfo(
    node: str | None,
    service: str | int | None = None,
    *,
    port_space: PortSpace = PortSpace.TCP,
    passive: bool = False,
    numeric: bool = False,
    timeout: float = 10.0,
) -> list[AddressInfo]:
    """Resolve the names of a host and a service (`rdma_getaddrinfo(3)`), in a thread.

    Args:
        node: Name or address of the host; None with `passive` for all addresses.
        service: Name or number of the port.
        port_space: TCP for connections, UDP for datagrams.
        passive: For an address to listen on.
        numeric: `node` is an address: no resolver is asked.
        timeout: Seconds.

    Raises:
        TypeError, ValueError: Not such names.
        socket.gaierror: The name does not resolve.
        TimeoutError: The resolver takes longer; the call goes on in its thread.
        OSError: librdmacm refused.

    Cancellation: ends the wait.
    """
    check_seconds("timeout", timeout, none=False)
    hints = hints_of(port_space, passive=passive, numeric=numeric)
    c_node, c_service = c_names(node, service)

    def run() -> list[AddressInfo]:
        out = ffi.new("struct rdma_addrinfo **")
        ffi.errno = 0
        code = lib.rdma_getaddrinfo(c_node, c_service, hints, out)
        refused = ffi.errno
        if not code:
            return taken(out[0])
        # It returns -1 with errno, or the code of getaddrinfo(3), whose EAI_BADFLAGS is -1, too.
        if code == -1 and refused:
            raise os_error(refused, "rdma_getaddrinfo")
        if code == socket.EAI_SYSTEM:
            raise os_error(refused or errno.EIO, "rdma_getaddrinfo")
        words = _EAI.get(code, f"error {code}")
        raise HostNotFoundError(code, f"{node or ''}:{service or ''}: {words}")

    return await call_blocking(run, undo=lambda _: None, timeout=timeout)


_EAI = {
    socket.EAI_NONAME: "Name or service not known",
    socket.EAI_AGAIN: "Temporary failure in name resolution",
    socket.EAI_FAIL: "Non-recoverable failure in name resolution",
    socket.EAI_SERVICE: "Service not supported for this socket type",
    socket.EAI_FAMILY: "Address family not supported",
    socket.EAI_MEMORY: os.strerror(errno.ENOMEM),
}
