"""Fork guard: in a forked child every handle is dead.

The kernel serves a child's ioctl-based destroys on the parent's objects, so that a finalizer that
runs in the child would pull the parent's queue pairs away.  Whoever owns a handle registers here
and is poisoned, without any C call, before the child runs its first Python code.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Poisonable", "guard"]


class Poisonable(Protocol):
    """An object that can be made harmless in a forked child."""

    def poison_after_fork(self) -> None:
        """Drop every handle without a C call; must not raise."""


_guarded: weakref.WeakSet[Poisonable] = weakref.WeakSet()


def guard(obj: Poisonable) -> None:
    """Have `obj` poisoned in every child forked from now on."""
    _guarded.add(obj)


def _poison_all() -> None:
    for obj in list(_guarded):
        obj.poison_after_fork()
    _guarded.clear()


os.register_at_fork(after_in_child=_poison_all)
