"""The nodes in /dev/infiniband, and the reason why this process cannot open a node.

Without permission the C libraries report "no such device", because librdmacm skips a device that it
cannot open, and in the end has none.  So the nodes are tried when such an error gets its text.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["FOLDER", "MANAGER", "NO_PERMISSION", "nodes", "trouble", "unopened"]

FOLDER = Path("/dev/infiniband")
MANAGER = "rdma_cm"
NO_PERMISSION = (
    "give the user read and write permission: mode 0666 is usual, by a udev rule or `chmod`; in "
    "a container, by its device rules"
)
# Errors of this process, and not of a device that has no driver or is being removed.
_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE})


def nodes() -> list[Path]:
    """The connection manager's node, if it is there, and those of the devices."""
    return [path for path in (FOLDER / MANAGER, *sorted(FOLDER.glob("uverbs*"))) if path.exists()]


def trouble(node: Path) -> int:
    """Open a node and close it again.

    Returns:
        0, or the errno: EACCES because of the node's mode, EPERM because of a control group's
        rules.
    """
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0


def unopened() -> tuple[int, Path, bool] | None:
    """The first node that this process may not open, or has no descriptor for.

    Returns:
        The errno, the node, and whether RDMA is impossible for that reason: it is the connection
        manager's node, or no device has a node that can be opened.  None if all can be opened, and
        over the fabric, which needs no node (`docs/fabric.md`).
    """
    if "AIORDMA_FABRIC" in os.environ:
        return None
    try:
        troubles = {node: trouble(node) for node in nodes()}
    except OSError:  # of the folder itself: there is nothing to say about it
        return None
    bad = [node for node, code in troubles.items() if code in _OURS]
    if not bad:
        return None
    usable = [node for node in troubles if node.name != MANAGER and not troubles[node]]
    return troubles[bad[0]], bad[0], bad[0].name == MANAGER or not usable
