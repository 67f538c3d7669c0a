"""Addresses: to C and back, and names by the loop's resolver."""

from __future__ import annotations

import ast
import ipaddress
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiordma._ffi import ffi
from aiordma.cm.address import from_sockaddr, is_local, look_up, to_sockaddr

from ..conftest import Run

PORTS = st.integers(0, 0xFFFF)


def as_c(storage: Any) -> Any:
    return ffi.cast("struct sockaddr *", storage)


@given(st.ip_addresses(v=4), PORTS)
def test_ipv4_round_trip(address: ipaddress.IPv4Address, port: int) -> None:
    storage = to_sockaddr((str(address), port))
    assert from_sockaddr(as_c(storage)) == (str(address), port)
    # family in the machine's order, port and address in the network's
    assert bytes(ffi.buffer(storage, 8)) == (
        socket.AF_INET.to_bytes(2, "little") + port.to_bytes(2, "big") + address.packed
    )


@given(st.ip_addresses(v=6), PORTS)
def test_ipv6_round_trip(address: ipaddress.IPv6Address, port: int) -> None:
    assume(not address.is_link_local and address.ipv4_mapped is None)
    storage = to_sockaddr((str(address), port))
    assert from_sockaddr(as_c(storage)) == (str(address), port)
    raw = bytes(ffi.buffer(storage, 28))
    assert raw[2:4] == port.to_bytes(2, "big")
    assert raw[8:24] == address.packed


def test_a_scope_may_be_a_number_or_an_interface() -> None:
    by_number = to_sockaddr(("fe80::1%7", 1))
    assert from_sockaddr(as_c(by_number)) == ("fe80::1%7", 1)
    index = socket.if_nametoindex("lo")
    by_name = to_sockaddr(("fe80::1%lo", 1))
    assert from_sockaddr(as_c(by_name)) == (f"fe80::1%{index}", 1)
    with pytest.raises(OSError, match="interface"):
        to_sockaddr(("fe80::1%no-such-card", 1))


def test_a_link_local_address_needs_its_interface() -> None:
    with pytest.raises(ValueError, match=r"name its interface, as in fe80::1%eth0"):
        to_sockaddr(("fe80::1", 1))


@given(st.ip_addresses(v=4), PORTS)
def test_ipv4_in_ipv6_form_is_ipv4(address: ipaddress.IPv4Address, port: int) -> None:
    assert from_sockaddr(as_c(to_sockaddr((f"::ffff:{address}", port)))) == (str(address), port)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("", True), ("0.0.0.0", True), ("::", True), ("127.0.0.1", True), ("127.0.0.2", True),
        ("192.0.2.1", False), ("2001:db8::1", False), ("224.0.0.1", False), ("ff02::1", False),
        ("255.255.255.255", False),
    ],
)  # fmt: skip
def test_local_addresses(host: str, local: bool) -> None:
    assert is_local((host, 7)) is local


def local_in_a_namespace(before: str, *hosts: str) -> list[bool]:
    """Which of the hosts are local in a network namespace of its own, after commands of a shell."""
    code = "import sys; from aiordma.cm.address import is_local\n"
    code += "print([is_local((host, 7)) for host in sys.argv[1:]])"
    # In a chroot nobody may make a namespace of users, and root needs none.
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    apart = ("unshare", *as_root, "--net", "sh", "-ec", f'{before}; exec "$@"', "sh")
    done = subprocess.run(
        [*apart, sys.executable, "-c", code, *hosts], capture_output=True, timeout=60
    )
    assert done.stderr == b""
    return list(ast.literal_eval(done.stdout.decode()))


def test_an_address_is_local_only_where_an_interface_has_it() -> None:
    """A bind would succeed there: the namespace has no interface that is up."""
    assert local_in_a_namespace(":", "127.0.0.1") == [False]


@pytest.mark.parametrize("nonlocal_bind", [0, 1])
def test_a_secondary_address_is_local(nonlocal_bind: int) -> None:
    commands = (
        f"echo {nonlocal_bind} >/proc/sys/net/ipv4/ip_nonlocal_bind", "ip link set lo up",
        "ip addr add 192.0.2.1/24 dev lo", "ip addr add 192.0.2.2/24 dev lo",
        "ip route add 198.51.100.0/24 dev lo",
    )  # fmt: skip
    hosts = "192.0.2.1", "192.0.2.2", "198.51.100.1"
    assert local_in_a_namespace("; ".join(commands), *hosts) == [True, True, False]


def test_no_host_is_any_address() -> None:
    assert from_sockaddr(as_c(to_sockaddr(("", 5)))) == ("0.0.0.0", 5)


@pytest.mark.parametrize("host", ["localhost", "1.2.3", "1.2.3.4.5", "::g", "1.2.3.4 "])
def test_names_and_nonsense_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="IPv4 or IPv6"):
        to_sockaddr((host, 1))


@pytest.mark.parametrize("port", [-1, 0x10000, 1 << 40])
def test_ports_out_of_range_are_refused(port: int, run: Run) -> None:
    with pytest.raises(ValueError, match=r"not in 0\.\.65535"):
        to_sockaddr(("1.2.3.4", port))
    with pytest.raises(ValueError, match=r"not in 0\.\.65535"):
        run(look_up("1.2.3.4", port))


@pytest.mark.parametrize(
    "address",
    [(1, 2), ("1.2.3.4", "80"), (None, 1), (b"1.2.3.4", 1), "1.2.3.4", ("1.2.3.4",), None],
)
def test_other_types_are_refused(address: Any) -> None:
    with pytest.raises(TypeError, match="a pair of str and int"):
        to_sockaddr(address)


@given(st.text(max_size=30), PORTS)
def test_any_text_is_an_address_or_an_error(host: str, port: int) -> None:
    try:
        storage = to_sockaddr((host, port))
    except (ValueError, OSError):
        return
    assert from_sockaddr(as_c(storage)) is not None


def test_what_is_no_ip_address_is_none() -> None:
    assert from_sockaddr(ffi.NULL) is None
    storage = ffi.new("struct sockaddr_storage *")
    assert from_sockaddr(as_c(storage)) is None


@pytest.mark.parametrize(
    ("host", "passive", "expected"),
    [
        ("10.80.0.1", False, ["10.80.0.1"]),
        ("fe80::1%lo", False, ["fe80::1%lo"]),
        ("::", True, ["::"]),
        ("::ffff:10.80.0.1", False, ["10.80.0.1"]),
        (None, True, ["0.0.0.0", "::"]),
        ("", True, ["0.0.0.0", "::"]),
        (None, False, ["127.0.0.1"]),
    ],
)
def test_numeric_hosts_ask_nobody(
    run: Run, monkeypatch: pytest.MonkeyPatch, host: str | None, passive: bool, expected: list[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked the resolver")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert run(look_up(host, 7, passive=passive)) == [(numeric, 7) for numeric in expected]


def test_names_are_resolved(run: Run) -> None:
    found = run(look_up("localhost", 7))
    assert ("127.0.0.1", 7) in found or ("::1", 7) in found
    assert all(from_sockaddr(as_c(to_sockaddr(address))) == address for address in found)


def test_a_name_that_does_not_resolve_is_an_error(run: Run) -> None:
    with pytest.raises(socket.gaierror):
        run(look_up("no-such-host.invalid", 7))
