"""How much memory the system lets the process pin.

A container has the memory that its control group may use, whatever the machine has, because beyond
that the kernel kills it.  The groups above it limit it, too, as far as these can be seen.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["may_lock", "memory_of_machine", "memory_to_pin"]

PROC = Path("/proc/self")
CGROUPS = Path("/sys/fs/cgroup")
_CAP_IPC_LOCK = 14
_WHOLE_UID_MAP = ["0", "0", "4294967295"]


def may_lock() -> bool:
    """Whether RLIMIT_MEMLOCK does not apply: CAP_IPC_LOCK lifts it, but not in a user namespace."""
    try:
        status = (PROC / "status").read_text()
        uid_map = (PROC / "uid_map").read_text().split()
        effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    except OSError:
        return False
    if effective is None or uid_map != _WHOLE_UID_MAP:
        return False
    return bool(int(effective[1], 16) >> _CAP_IPC_LOCK & 1)


@functools.cache
def memory_of_machine() -> int:
    """Bytes of memory that the machine, or the container, had when this was first called."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits_of_groups()])


def _limits_of_groups() -> Iterator[int]:
    """The memory limits of the process's control group, and of those above it: cgroups(7)."""
    try:
        groups = (PROC / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Without a namespace for groups a container sees its own group as the root, but not under
        # the path of the machine.
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                yield int((root / part / name).read_text())


def memory_to_pin() -> int:
    """Bytes: the machine's or container's memory, or RLIMIT_MEMLOCK, if less and in force."""
    size = memory_of_machine()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return size if soft == resource.RLIM_INFINITY or soft > size or may_lock() else soft
