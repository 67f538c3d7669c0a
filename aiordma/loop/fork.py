"""Fork guard: in a forked child every object of the parent is dead.

What a child has are copies of the parent's objects, and none of its own.  So each object that owns
a handle registers with `guard`, and is poisoned, without any C call, before the child runs Python
code.

An object that programs use (`guard_public`) becomes a stand-in of its own class at the same moment:
it refuses every public method and attribute with a ForkedError, and its closing methods do nothing.
So the rule is written once, also for methods that will be added, and costs the parent nothing.

librdmacm keeps open devices for the whole process, and a child cannot open them anew: `use_library`
refuses its use there.
"""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from aiordma.errors import ForkedError
from aiordma.loop.weak import living

__all__ = [
    "Poisonable", "forked_error", "guard", "guard_public", "new_lock", "public_objects",
    "renew", "use_library",
]  # fmt: skip


class Poisonable(Protocol):
    """An object that can be made harmless in a forked child."""

    def poison_after_fork(self) -> None:
        """Drop every handle without a C call; must not raise."""


_locks: list[Any] = []
_renewals: list[Callable[[], None]] = []
# Not `weakref.WeakSet`, which adds and takes out an object in Python: each connection has six.
_guarded: set[weakref.ref[Poisonable]] = set()
_public: set[weakref.ref[Any]] = set()
# Looked up once: each look would make another object, for each reference.
_forget_guarded: Callable[[weakref.ref[Poisonable]], None] = _guarded.discard
_forget_public: Callable[[weakref.ref[Any]], None] = _public.discard
_stand_ins: dict[type, type] = {}
_used = False
_used_by_a_parent = False

# Methods that end an object; they do nothing in a child.
_ENDS = frozenset({
    "abort", "abort_clients", "close", "close_clients", "release", "revoke", "wait_closed",
    "__aexit__", "__del__", "__exit__",
})  # fmt: skip
# Attributes that are as in the parent.
_KEPT = frozenset({"closed", "poison_after_fork"})
_SPECIAL_USES = frozenset({
    "__aenter__", "__aiter__", "__anext__", "__await__", "__call__", "__enter__", "__getitem__",
    "__iter__", "__len__", "__next__",
})  # fmt: skip


def guard(obj: Poisonable) -> None:
    """Have an object poisoned in every child forked from now on."""
    _guarded.add(weakref.ref(obj, _forget_guarded))


def guard_public(obj: Any) -> None:
    """Have an object that programs use become a stand-in in every child forked from now on."""
    _public.add(weakref.ref(obj, _forget_public))


def public_objects() -> list[Any]:
    """The objects of `guard_public` that live; in any thread."""
    return living(_public.copy())


def forked_error(name: str) -> ForkedError:
    """Return the error for the use of an object whose class has this name."""
    return ForkedError(
        f"this {name} belongs to the parent process and cannot be used after fork(); start "
        "processes that use RDMA with the `spawn` or `forkserver` method"
    )


def use_library() -> None:
    """Note that the process uses a library of C that keeps open devices; refuse it in a child.

    Raises:
        ForkedError: The parent used the library before this process was forked: requests of the
            child would go through descriptors of the parent, and the kernel refuses those.
    """
    global _used
    if _used_by_a_parent:
        msg = (
            "this process was forked from one that had used RDMA, and cannot connect or listen; "
            "start processes that use RDMA with the `spawn` or `forkserver` method, or fork before "
            "the first use"
        )
        raise ForkedError(msg)
    _used = True


def new_lock() -> Any:
    """Return an `RLock` for a module, which lasts as long as the process.

    The thread that holds it may take it again: the collector may run in between, and a finalizer
    takes the lock.  In a forked child it is free: the thread that held it may not exist there.
    """
    lock = threading.RLock()
    _locks.append(lock)
    return lock


def renew(function: Callable[[], None]) -> None:
    """Have `function` called in every forked child, where a module has to begin anew."""
    _renewals.append(function)


def become_stand_in(obj: Any) -> None:
    """In a forked child: have every public use of `obj` refused, and its end do nothing."""
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
            members[member] = property(_yes) if isinstance(value, property) else _yes
        elif member in _SPECIAL_USES:
            members[member] = refuse
        elif not member.startswith("_") and member not in _KEPT:
            # A property also for a method: it precedes an attribute of the object itself.
            members[member] = property((lambda _: refuse) if callable(value) else refuse)
    return type(name, (cls,), members)


def _yes(_: object) -> bool:
    return True


def _ending(method: Any) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        async def waited(*_: object, **__: object) -> None:
            """Do nothing: the object belongs to the parent process."""

        return waited

    return lambda *_, **__: None


def _poison_all() -> None:
    global _used_by_a_parent
    _used_by_a_parent = _used_by_a_parent or _used
    for lock in _locks:
        lock._at_fork_reinit()  # as the standard library does it
    for obj in living(_guarded.copy()):
        obj.poison_after_fork()
    _guarded.clear()
    for obj in living(_public.copy()):
        become_stand_in(obj)
    _public.clear()
    for function in _renewals:
        function()


os.register_at_fork(after_in_child=_poison_all)
