"""Checks of devices, drivers, nodes and ports.

Most facts are read from the kernel's files, so they are known even if a library is missing.
"""

from __future__ import annotations

import errno
import ipaddress
import os
from pathlib import Path

from aiordma import device_nodes
from aiordma._ffi import load_error
from aiordma.cli import sysfs
from aiordma.cli.finding import Finding, fail, ok, skip, warn
from aiordma.cm.event_channel import EventChannel
from aiordma.errors import RdmaError
from aiordma.interfaces import has_address
from aiordma.verbs.device import devices

__all__ = ["connection_manager", "gids", "kernel_devices", "nodes", "ports", "providers"]

_NO_DEVICE = skip("there is no device")
_NO_LIBRARY = skip("the libraries do not load")
_UVERBS = "`modprobe ib_uverbs`"
_UCM = "`modprobe rdma_ucm`"
#: By the errno of a node that cannot be opened.
_REMEDIES = {
    errno.EACCES: "its mode does not let this user read and write it: 0666 is usual, by "
    "`chmod 0666 {node}` until the next boot, or by a udev rule",
    errno.EPERM: "a control group does not let this process open it: in a container, map it by "
    "--device={node}",
    errno.EMFILE: "this process has too many open files: `ulimit -n`",
    errno.ENFILE: "the machine has too many open files: `sysctl fs.file-max`",
}


def kernel_devices() -> Finding:
    """Whether the kernel has RDMA devices."""
    if names := sysfs.device_names():
        return ok(", ".join(names))
    if "AIORDMA_FABRIC" in os.environ:
        return skip("the fabric is in use, which has none")
    return fail(
        f"the kernel lists none in {sysfs.CLASS}",
        "load the adapter's driver; as a software device: `modprobe rdma_rxe && rdma link add rxe0 "
        "type rxe netdev NETDEV`; without root: `python -m aiordma_softroce -- COMMAND`",
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
    offered = sysfs.uverbs_nodes()
    without_node = [name for name in lost if name not in offered]
    verdict = warn if usable else fail
    if without_node:
        seen = f"{', '.join(without_node)}: the kernel offers no access for user space"
        return verdict(seen, _UVERBS)
    # libibverbs passes over a device whose node it does not find, whatever driver it has.
    missing = [str(offered[name]) for name in lost if not offered[name].exists()]
    if missing:
        why = f"{', '.join(missing)} missing"
        advice = "see `device nodes`, below"
        return warn(f"not checked: {why}", advice) if usable else skip(why, advice)
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
        return fail(f"{sysfs.CLASS_VERBS} is empty", _UVERBS)
    manager = _manager()
    troubles = {node: _trouble(node) for node in (manager, *verbs.values())}
    bad = [f"{node} {trouble[0]}" for node, trouble in troubles.items() if trouble]
    if not bad:
        return ok(", ".join(str(node) for node in troubles))
    usable = not troubles[manager] and not all(troubles[node] for node in verbs.values())
    kinds = dict.fromkeys(advice for _, advice in filter(None, troubles.values()))
    return (warn if usable else fail)("; ".join(bad), "; ".join(kinds))


def _manager() -> Path:
    return sysfs.DEV / device_nodes.MANAGER


def _trouble(node: Path) -> tuple[str, str] | None:
    """The fault of a node and its remedy; None for a good node."""
    if not node.exists():
        if node == _manager() and not sysfs.MANAGER_CLASS.exists():
            return "is missing, as is its kernel module", _UCM
        return "is missing, though the kernel has it", _to_map(node)
    if not node.is_char_device():
        return "is no device", f"remove it; {_to_map(node)}"
    code = device_nodes.trouble(node)
    if not code:
        return None
    seen = "may not be opened by this user" if code == errno.EACCES else "cannot be opened"
    advice = _REMEDIES.get(code, "the kernel's log may say why: `dmesg`")
    return f"{seen}: {os.strerror(code)}", advice.format(node=node)


def _to_map(node: Path) -> str:
    advice = f"in a container, map it by --device={node}"
    if numbers := sysfs.numbers_of(node):
        advice += f"; elsewhere `mknod -m 666 {node} c {numbers[0]} {numbers[1]}`"
    return advice


def connection_manager() -> Finding:
    """Whether rdma_cm can be used."""
    if not sysfs.device_names():
        return _NO_DEVICE
    if load_error() is not None:
        return _NO_LIBRARY
    try:
        EventChannel().close()
    except (OSError, RdmaError) as exc:
        # librdmacm needs the nodes of both, and its errors do not name them.
        troubles = {node: _trouble(node) for node in (_manager(), *sysfs.uverbs_nodes().values())}
        if bad := [f"{node} {trouble[0]}" for node, trouble in troubles.items() if trouble]:
            return skip("; ".join(bad), "see `device nodes`, above")
        hint = getattr(exc, "hint", "")
        return fail(str(exc), hint if hint not in str(exc) else "")
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
    advice = "; ".join(dict.fromkeys(_to_activate(port) for port in found if not port.active))
    return warn(seen, advice) if active else fail(seen, advice)


def _to_activate(port: sysfs.Port) -> str:
    if port.is_roce or port.is_iwarp:
        netdev = sysfs.netdev(port.device, port.number) or "NETDEV"
        return f"`ip link set dev {netdev} up`, and is the cable of {netdev} in?"
    if port.state == "INIT":
        return "does a subnet manager run (`opensm`, or in the switch)?"
    return "is the cable in?"


def gids() -> Finding:
    """Whether the active ports have addresses by which they can be reached."""
    found = [port for name in sysfs.device_names() for port in sysfs.ports(name) if port.active]
    if not found:
        return skip("no port is active")
    seen = ", ".join(f"{port.device} port {port.number}: {len(port.gids)}" for port in found)
    if not any(port.gids for port in found):
        if not any(port.is_roce for port in found):
            return fail(seen, "the kernel's log may say why: `dmesg`")
        return fail(seen, "give the network interface an IP address: RoCE's GIDs follow from it")
    # RoCE makes a GID of each IP address; the connection manager needs one to find the device.
    lonely = [
        f"{port.device} port {port.number}"
        for port in found
        if port.is_roce and all(gid.startswith("fe80:") for gid in port.gids)
    ]
    foreign = [port for port in found if port.is_roce and not _is_of_this_namespace(port)]
    if foreign:
        names = ", ".join(f"{port.device} port {port.number}" for port in foreign)
        return (fail if len(foreign) == len(found) else warn)(
            f"{names}: no GID is of an interface of this network namespace",
            "`aiordma gids` names the interfaces: the host's network has them (`hostNetwork: true` "
            "or `--network=host`), or one of them is moved or linked into this namespace",
        )
    if lonely:
        advice = "`ip address add ADDRESS/LENGTH dev NETDEV`: connections are made by IP address"
        return warn(f"{', '.join(lonely)}: no GID besides the link-local one", advice)
    return ok(f"number of GIDs: {seen}")


def _is_of_this_namespace(port: sysfs.Port) -> bool:
    """Whether a program here can connect by the port: a shared device also has others' GIDs."""
    addresses = [
        str(mapped or address)
        for address in map(ipaddress.IPv6Address, port.gids)
        for mapped in [address.ipv4_mapped]
        if not address.is_link_local
    ]
    return not addresses or any(map(has_address, addresses))
