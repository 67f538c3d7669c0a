"""The interface under the RDMA device: its other addresses, and a neighbor that does not answer."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from typing import Any

#: In the device's subnet, and nobody's.
NOBODY = "10.80.0.77"


def _ip(*words: str) -> bytes:
    return subprocess.run(["ip", *words], capture_output=True, check=True, timeout=20).stdout


def _interface(address: str) -> Any:
    for link in json.loads(_ip("-j", "addr")):
        if address in [info.get("local") for info in link["addr_info"]]:
            return link
    raise AssertionError(f"no interface has {address}")


def ipv6(address: str, scope: str) -> str:
    """The IPv6 address of this scope (`global` or `link`) of the interface that has `address`."""
    link = _interface(address)
    for info in link["addr_info"]:
        if info["family"] == "inet6" and info["scope"] == scope:
            suffix = f"%{link['ifindex']}" if scope == "link" else ""
            return f"{info['local']}{suffix}"
    raise AssertionError(f"no {scope} IPv6 address beside {address}")


@contextlib.contextmanager
def neighbors_are_asked(address: str) -> Iterator[None]:
    """Have the interface resolve its neighbors, which a dummy interface by itself does not."""
    link = _interface(address)
    if "NOARP" not in link["flags"]:
        yield
        return
    _ip("link", "set", link["ifname"], "arp", "on")
    try:
        yield
    finally:
        _ip("link", "set", link["ifname"], "arp", "off")
