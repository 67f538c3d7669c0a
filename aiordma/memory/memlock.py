"""How much memory the process may pin.

Theory of operation
    A connection or stream pins its first slots or rings as long as it lives.  `FIRST` counts them,
    over all loops.  All that comes with traffic is a part of the rest (`Room`): budgets that were
    parts of the whole would promise memory that the first slots of many connections have taken.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from aiordma.loop import fork

__all__ = ["FIRST", "Room", "may_lock", "memory_to_pin"]

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


def _machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_to_pin() -> int:
    """Bytes: the machine's memory, or RLIMIT_MEMLOCK, if that is less and holds."""
    size = _machine()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return size if soft == resource.RLIM_INFINITY or soft > size or may_lock() else soft


class _First:
    """The first slots and rings of all connections and streams.

    Attributes:
        pinned: Their bytes.
    """

    __slots__ = ("_lock", "pinned")

    def __init__(self) -> None:
        self._lock = fork.new_lock()
        self.pinned: int = 0

    def count(self, size: int) -> None:
        """Count bytes in, or out if `size` is negative; in any thread."""
        with self._lock:
            self.pinned += size

    def forget(self) -> None:
        """Count none: a forked child has no connections."""
        self.pinned = 0


FIRST = _First()
fork.renew(FIRST.forget)


class Room:
    """The memory that the process may pin beside the first slots and rings.

    The limits are those of the moment at which it is made: by then the program has given up its
    privileges.
    """

    __slots__ = ("_may", "_whole")

    def __init__(self) -> None:
        self._may = memory_to_pin()
        self._whole = self._may >= _machine()

    @property
    def left(self) -> int:
        """Bytes."""
        return max(0, self._may - FIRST.pinned)

    @property
    def for_steps(self) -> int:
        """Bytes that a loop's connections and streams pin beyond those they begin with: an eighth.

        The rest is for large messages and for the program.
        """
        return self.left // 8

    @property
    def for_sends(self) -> int:
        """Bytes that a loop's large messages pin until peers have read them.

        A sixteenth, as fetches need more; without RLIMIT_MEMLOCK half.
        """
        return self.left // (2 if self._whole else 16)

    @property
    def for_messages(self) -> int:
        """Bytes of large messages of the peers that the process holds: a quarter."""
        return self.left // 4
