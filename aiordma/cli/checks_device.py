"""Checks of devices, drivers, nodes and ports.

Most of it is read from the kernel's files, so that it is known even where a library is missing.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from aiordma import device_nodes
from aiordma._ffi import load_error
from aiordma.cli import sysfs
from aiordma.cli.finding import Finding, fail, ok, warn
from aiordma.cm.event_channel import EventChannel
from aiordma.errors import RdmaError
from aiordma.verbs.device import devices

__all__ = ["connection_manager", "gids", "kernel_devices", "nodes", "ports", "providers"]

_NO_DEVICE = warn("not checked: there is no device")
_NO_LIBRARY = warn("not checked: the libraries do not load")
_MAP = "into a container: --device=/dev/infiniband/rdma_cm --device=/dev/infiniband/uverbs0"


def kernel_devices() -> Finding:
    """Whether the kernel has RDMA devices."""
    if names := sysfs.device_names():
        return ok(", ".join(names))
    return fail(
        f"the kernel lists none in {sysfs.CLASS}",
        "load the adapter's driver; as a software device: `modprobe rdma_rxe && rdma link add rxe0 "
        "type rxe netdev NETDEV`; without root: `python -m aiordma.testing.softroce -- COMMAND`",
    )


def providers() -> Finding:
    """Whether libibverbs has a driver for each of the kernel's devices."""
    names = sysfs.device_names()
    if not names:
        return _NO_DEVICE
    if load_error() is not None:
        return _NO_LIBRARY
    usable = {device.name for device in devices()}
    lost = [name for name in names if name not in usable]
    if not lost:
        return ok(f"libibverbs has a driver for {', '.join(names)}")
    without_node = [name for name in lost if name not in sysfs.uverbs_nodes()]
    verdict = warn if usable else fail
    if without_node:
        seen = f"{', '.join(without_node)}: the kernel offers no access for user space"
        return verdict(seen, "`modprobe ib_uverbs`")
    return verdict(
        f"libibverbs found no driver for {', '.join(lost)}",
        "install the providers: Debian/Ubuntu: apt install ibverbs-providers; Fedora/RHEL: "
        "dnf install libibverbs; in a container the package has to be in the image",
    )


def nodes() -> Finding:
    """Whether the device nodes are there and may be opened."""
    if not sysfs.device_names():
        return _NO_DEVICE
    verbs = sysfs.uverbs_nodes()
    if not verbs:
        return fail(f"{sysfs.CLASS_VERBS} is empty", "`modprobe ib_uverbs`")
    manager = sysfs.DEV / "rdma_cm"
    troubles = {node: _trouble(node) for node in (manager, *verbs.values())}
    bad = [f"{node} {trouble[0]}" for node, trouble in troubles.items() if trouble]
    if not bad:
        return ok(", ".join(str(node) for node in troubles))
    usable = not troubles[manager] and not all(troubles[node] for node in verbs.values())
    kinds = dict.fromkeys(advice for _, advice in filter(None, troubles.values()))
    return (warn if usable else fail)("; ".join(bad), "; ".join(kinds))


def _trouble(node: Path) -> tuple[str, str] | None:
    """The fault of a node and its remedy; None for a good node."""
    if not node.exists():
        return "is missing", f"`modprobe rdma_ucm`, or map it {_MAP}"
    if not node.is_char_device():
        return "is no device", f"map it {_MAP}"
    code = device_nodes.trouble(node)
    if not code:
        return None
    if code in (errno.EACCES, errno.EPERM):
        return "may not be opened by this user", device_nodes.NO_PERMISSION
    return f"cannot be opened: {os.strerror(code)}", "look into `dmesg`"


def connection_manager() -> Finding:
    """Whether rdma_cm can be used."""
    if not sysfs.device_names():
        return _NO_DEVICE
    if load_error() is not None:
        return _NO_LIBRARY
    try:
        EventChannel().close()
    except FileNotFoundError as exc:
        return fail(str(exc), f"`modprobe rdma_ucm`; map {sysfs.DEV}/rdma_cm {_MAP}")
    except RdmaError as exc:
        return fail(str(exc), exc.hint if exc.hint not in str(exc) else "")
    return ok("an event channel can be made")


def ports() -> Finding:
    """Whether a link is up."""
    found = [port for name in sysfs.device_names() for port in sysfs.ports(name)]
    if not found:
        return _NO_DEVICE
    seen = ", ".join(f"{port.device} port {port.number} {port.state}" for port in found)
    active = [port for port in found if port.active]
    if len(active) == len(found):
        return ok(seen)
    advice = (
        "Ethernet: `ip link set dev NETDEV up`; InfiniBand: is the cable in, does a subnet manager "
        "run?"
    )
    return warn(seen, advice) if active else fail(seen, advice)


def gids() -> Finding:
    """Whether the active ports have addresses by which they can be reached."""
    found = [port for name in sysfs.device_names() for port in sysfs.ports(name) if port.active]
    if not found:
        return warn("not checked: no port is active")
    seen = ", ".join(f"{port.device} port {port.number}: {len(port.gids)}" for port in found)
    if not any(port.gids for port in found):
        return fail(seen, "give the network interface an IP address: RoCE's GIDs follow from it")
    # RoCE makes a GID of each IP address; the connection manager needs one to find the device.
    lonely = [
        f"{port.device} port {port.number}"
        for port in found
        if port.is_roce and all(gid.startswith("fe80:") for gid in port.gids)
    ]
    if lonely:
        advice = "`ip address add ADDRESS/LENGTH dev NETDEV`: connections are made by IP address"
        return warn(f"{', '.join(lonely)}: no GID besides the link-local one", advice)
    return ok(f"number of GIDs: {seen}")
