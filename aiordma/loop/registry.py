"""Objects of which an event loop has one each: its users share them, the last closes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from aiordma.loop import fork

__all__ = ["Shared", "acquire", "find", "keep", "lasting", "let_go", "retire"]


class Shared(Protocol):
    """An object that can be shared through the registry."""

    def close(self) -> None:
        """Called when the last user has released the object."""


S = TypeVar("S", bound=Shared)
T = TypeVar("T")


class _Entry:
    __slots__ = ("entries", "key", "shared", "users")

    def __init__(self, shared: Any, key: Hashable, entries: dict[Hashable, _Entry]) -> None:
        self.shared = shared
        self.key = key
        self.entries = entries
        self.users = 0

    def retire(self) -> None:
        """Remove the entry, so that it is not found any more."""
        if self.entries.get(self.key) is self:
            del self.entries[self.key]


class _Release:
    """Releases an entry for one user, once.

    It is a class, because a closure consists of five times as many objects, and each connection has
    two releases.
    """

    __slots__ = ("_entry",)

    def __init__(self, entry: _Entry) -> None:
        self._entry: _Entry | None = entry

    def __call__(self) -> None:
        with _lock:
            entry, self._entry = self._entry, None
            if entry is None:
                return
            entry.users -= 1
            last = entry.users == 0
            if last:
                entry.retire()
        if last:
            entry.shared.close()


#: A user may release an entry in any thread, and the garbage collector may run another release in
#: the middle of one.
_lock = fork.new_lock()
_ATTRIBUTE = "_aiordma_shared"


def _entries_of(loop: asyncio.AbstractEventLoop) -> dict[Hashable, _Entry]:
    """Return the shared objects of a loop, by key.

    The dict is an attribute of the loop.  A shared object refers to its loop, so a table of the
    library would keep both alive forever if the object is never closed.  This way both are garbage
    collected together, and the finalizers warn.
    """
    entries: dict[Hashable, _Entry] | None = getattr(loop, _ATTRIBUTE, None)
    if entries is None:
        entries = {}
        setattr(loop, _ATTRIBUTE, entries)
    return entries


def acquire(
    key: Hashable, factory: Callable[[], S], loop: asyncio.AbstractEventLoop | None = None
) -> tuple[S, Callable[[], None]]:
    """Return the object of `loop`, or of the running loop, for `key`; `factory` makes a new one.

    Returns:
        The object, and a function that releases it; only the first call has an effect.  The object
        is closed when its last user has released it.
    """
    loop = loop or asyncio.get_running_loop()
    entries = _entries_of(loop)
    with _lock:
        entry = entries.get(key)
        if entry is not None:
            entry.users += 1
            return entry.shared, _Release(entry)
    # The lock is not held here.  No other thread can make the entry meanwhile, because `acquire` is
    # only called in the loop's thread.
    entry = _Entry(factory(), key, entries)
    entry.users = 1
    entries[key] = entry
    return entry.shared, _Release(entry)


def retire(shared: object, loop: asyncio.AbstractEventLoop) -> None:
    """Have `acquire` make a new object next time, because this one has failed.

    Present users keep it until they end.  Objects that have it as their `channel` are retired, too.
    """
    with _lock:
        for entry in list(_entries_of(loop).values()):
            if entry.shared is shared or getattr(entry.shared, "channel", None) is shared:
                entry.retire()


def find(key: Hashable, loop: asyncio.AbstractEventLoop) -> object:
    """Return the object of `loop` for `key`, or None if there is none.  In any thread."""
    entries: dict[Hashable, _Entry] = getattr(loop, _ATTRIBUTE, None) or {}
    entry = entries.get(key)
    return None if entry is None else entry.shared


def lasting(key: Hashable, factory: Callable[[], T], loop: asyncio.AbstractEventLoop) -> T:
    """Return the object of `loop` for `key`, or make it; it lives as long as the loop."""
    entries = _entries_of(loop)
    entry = entries.get(key)
    if entry is None:
        entry = entries[key] = _Entry(factory(), key, entries)
        entry.users = 1
    made: T = entry.shared
    return made


def keep(obj: object, loop: asyncio.AbstractEventLoop) -> None:
    """Keep `obj` alive until `let_go`, but not longer than the loop."""
    kept: set[object] = lasting("kept", set, loop)
    kept.add(obj)


def let_go(obj: object, loop: asyncio.AbstractEventLoop) -> None:
    """Undo `keep`; harmless if there is nothing to undo.  In any thread."""
    kept = _entries_of(loop).get("kept")
    if kept is not None:
        kept.shared.discard(obj)
