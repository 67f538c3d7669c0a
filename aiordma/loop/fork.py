"""Fork guard: in a forked child every object of the parent is dead.

The kernel serves a child's ioctl-based destroys on the parent's objects, so that a finalizer that
runs in the child would pull the parent's queue pairs away.  Whoever owns a handle registers here
and is poisoned, without any C call, before the child runs its first Python code.

An object that programs use becomes a stand-in of its own class at the same moment: it refuses
every public method and attribute with a ForkedError, and what ends it does nothing.  So the rule
is written once, for the methods that will be added, too, and costs the parent nothing.

What a library of C keeps for the whole process cannot be made anew in a child: `use_library`
refuses it there.
"""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from aiordma.errors import ForkedError

__all__ = [
    "Poisonable", "forked_error", "guard", "guard_public", "new_lock", "renew", "use_library",
]  # fmt: skip


class Poisonable(Protocol):
    """An object that can be made harmless in a forked child."""

    def poison_after_fork(self) -> None:
        """Drop every handle without a C call; must not raise."""


_locks: list[Any] = []
_renewals: list[Callable[[], None]] = []
_guarded: weakref.WeakSet[Poisonable] = weakref.WeakSet()
_public: weakref.WeakSet[Any] = weakref.WeakSet()
_stand_ins: dict[type, type] = {}
_used = False
_used_by_a_parent = False

# The end of an object: nothing, in a child.
_ENDS = frozenset({
    "abort", "abort_clients", "close", "close_clients", "release", "revoke", "wait_closed",
    "__aexit__", "__del__", "__exit__",
})  # fmt: skip
# What can be said without the object.
_KEPT = frozenset({"closed", "poison_after_fork"})
_SPECIAL_USES = frozenset({
    "__aenter__", "__aiter__", "__anext__", "__await__", "__call__", "__enter__", "__getitem__",
    "__iter__", "__len__", "__next__",
})  # fmt: skip


def guard(obj: Poisonable) -> None:
    """Have `obj` poisoned in every child forked from now on."""
    _guarded.add(obj)


def guard_public(obj: Any) -> None:
    """Have `obj`, which programs use, become a stand-in in every child forked from now on."""
    _public.add(obj)


def forked_error(name: str) -> ForkedError:
    """The error for the use of an object of a class of this name."""
    return ForkedError(
        f"this {name} belongs to the parent process and cannot be used after fork(); start "
        "processes that use RDMA with the `spawn` method"
    )


def use_library() -> None:
    """The caller is about to use a library of C that keeps open devices for the whole process.

    Raises:
        ForkedError: It did so before this process was forked: the child's requests would go
            through descriptors of the parent, and the kernel refuses those.
    """
    global _used
    if _used_by_a_parent:
        msg = (
            "this process was forked from one that had used RDMA, and cannot connect or listen; "
            "start processes that use RDMA with the `spawn` method, or fork before the first use"
        )
        raise ForkedError(msg)
    _used = True


def new_lock() -> Any:
    """A lock of a module, for as long as the process lives; an `RLock`.

    It may be taken again by who has it: the collector may run meanwhile, and end something.  In a
    forked child it is free: the thread that had it may not exist there.
    """
    lock = threading.RLock()
    _locks.append(lock)
    return lock


def renew(function: Callable[[], None]) -> None:
    """Have `function` called in every forked child: what a module keeps begins anew there."""
    _renewals.append(function)


def become_stand_in(obj: Any) -> None:
    """In a forked child: refuse from now on every public use of `obj`, and end it in silence."""
    cls = type(obj)
    if not hasattr(cls, "_stands_in_for"):
        if cls not in _stand_ins:
            _stand_ins[cls] = _stand_in_for(cls)
        obj.__class__ = _stand_ins[cls]


def _stand_in_for(cls: type) -> type:
    name = cls.__name__

    def refuse(*_: object, **__: object) -> NoReturn:
        raise forked_error(name)

    members: dict[str, Any] = {
        "__slots__": (),
        "__repr__": lambda _: f"<{name} of the parent process>",
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_stands_in_for": cls,
    }
    for member in dir(cls):
        value = inspect.getattr_static(cls, member)
        if member in _ENDS:
            members[member] = _ending(value)
        elif member == "is_closing":
            members[member] = property(lambda _: True) if isinstance(value, property) else _yes
        elif member in _SPECIAL_USES:
            members[member] = refuse
        elif not member.startswith("_") and member not in _KEPT:
            # A property also for a method: it goes before an attribute of the object itself.
            members[member] = property((lambda _: refuse) if callable(value) else refuse)
    return type(name, (cls,), members)


def _yes(_: object) -> bool:
    return True


def _ending(method: Any) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        async def waited(*_: object, **__: object) -> None:
            """Do nothing: the object belongs to the parent process."""

        return waited

    def done(*_: object, **__: object) -> None:
        """Do nothing: the object belongs to the parent process."""

    return done


def _poison_all() -> None:
    global _used_by_a_parent
    _used_by_a_parent = _used_by_a_parent or _used
    for lock in _locks:
        lock._at_fork_reinit()  # as the standard library does it
    for obj in list(_guarded):
        obj.poison_after_fork()
    _guarded.clear()
    for obj in list(_public):
        become_stand_in(obj)
    _public.clear()
    for function in _renewals:
        function()


os.register_at_fork(after_in_child=_poison_all)
