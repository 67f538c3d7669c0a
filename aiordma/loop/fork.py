"""Fork guard: in a forked child every handle is dead.

The kernel serves a child's ioctl-based destroys on the parent's objects, so that a finalizer that
runs in the child would pull the parent's queue pairs away.  Whoever owns a handle registers here
and is poisoned, without any C call, before the child runs its first Python code.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

__all__ = ["Poisonable", "guard", "new_lock"]


class Poisonable(Protocol):
    """An object that can be made harmless in a forked child."""

    def poison_after_fork(self) -> None:
        """Drop every handle without a C call; must not raise."""


_locks: list[Any] = []
_guarded: weakref.WeakSet[Poisonable] = weakref.WeakSet()


def guard(obj: Poisonable) -> None:
    """Have `obj` poisoned in every child forked from now on."""
    _guarded.add(obj)


def new_lock() -> Any:
    """A lock of a module, for as long as the process lives; an `RLock`.

    It may be taken again by who has it: the collector may run meanwhile, and end something.  In a
    forked child it is free: the thread that had it may not exist there.
    """
    lock = threading.RLock()
    _locks.append(lock)
    return lock


def _poison_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # as the standard library does it
    for obj in list(_guarded):
        obj.poison_after_fork()
    _guarded.clear()


os.register_at_fork(after_in_child=_poison_all)
