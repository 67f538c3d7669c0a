"""How much memory the system lets the process pin."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

__all__ = ["may_lock", "memory_of_machine", "memory_to_pin"]

PROC = Path("/proc/self")
_CAP_IPC_LOCK = 14
_WHOLE_UID_MAP = ["0", "0", "4294967295"]


def may_lock() -> bool:
    """Whether RLIMIT_MEMLOCK does not hold; outside of containers the kernel asks a capability."""
    try:
        status = (PROC / "status").read_text()
        uid_map = (PROC / "uid_map").read_text().split()
        effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    except OSError:
        return False
    if effective is None or uid_map != _WHOLE_UID_MAP:
        return False
    return bool(int(effective[1], 16) >> _CAP_IPC_LOCK & 1)


def memory_of_machine() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_to_pin() -> int:
    """Bytes: the machine's memory, or RLIMIT_MEMLOCK, if that is less and holds."""
    size = memory_of_machine()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return size if soft == resource.RLIM_INFINITY or soft > size or may_lock() else soft
