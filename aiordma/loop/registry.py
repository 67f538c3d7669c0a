"""Objects that an event loop has once, shared by their users and closed with the last user."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from aiordma.loop import fork

__all__ = ["Shared", "acquire", "find", "keep", "lasting", "let_go", "retire"]


class Shared(Protocol):
    """An object that can be shared through the registry."""

    def close(self) -> None:
        """Called when the last user has let go."""


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
        """Be found no more."""
        if self.entries.get(self.key) is self:
            del self.entries[self.key]


class _Release:
    """Releases an entry for one user, once.

    A class and no closure, which has five times as many objects: each connection has two.
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


#: A user may release in any thread, and the collector may end another user in between.
_lock = fork.new_lock()
_ATTRIBUTE = "_aiordma_shared"
#: For loops that take no attributes.
_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, _Entry]] = (
    weakref.WeakKeyDictionary()
)


def _entries_of(loop: asyncio.AbstractEventLoop) -> dict[Hashable, _Entry]:
    """Return the shared objects of a loop, by key.

    They are an attribute of the loop.  A shared object refers to its loop, so that a table of the
    library's would keep both for ever if they are not closed.  As an attribute they are garbage
    together with the loop, and finalizers run and warn.
    """
    entries: dict[Hashable, _Entry] | None = getattr(loop, _ATTRIBUTE, None)
    if entries is not None:
        return entries
    entries = {}
    try:
        setattr(loop, _ATTRIBUTE, entries)
    except AttributeError:
        # Second best: the entries of a closed loop are dropped when another loop asks.
        for closed in [other for other in _loops if other.is_closed()]:
            del _loops[closed]
        return _loops.setdefault(loop, entries)
    return entries


def acquire(
    key: Hashable, factory: Callable[[], S], loop: asyncio.AbstractEventLoop | None = None
) -> tuple[S, Callable[[], None]]:
    """Return the object of `loop`, or of the running loop, for `key`; `factory` makes it at need.

    Returns:
        The object, and a function that releases it (once; further calls do nothing).  When the last
        user has released it, the object is closed.
    """
    loop = loop or asyncio.get_running_loop()
    entries = getattr(loop, _ATTRIBUTE, None)
    if entries is None:
        entries = _entries_of(loop)
    with _lock:
        entry = entries.get(key)
        if entry is not None:
            entry.users += 1
            return entry.shared, _Release(entry)
    # No other thread makes an entry meanwhile: `acquire` is called in the loop's thread.
    entry = _Entry(factory(), key, entries)
    entry.users = 1
    entries[key] = entry
    return entry.shared, _Release(entry)


def retire(shared: object, loop: asyncio.AbstractEventLoop) -> None:
    """Have `acquire` make another object: this one has failed, and its users have yet to end.

    So have they those of an object that has this one as its `channel`.
    """
    with _lock:
        for entry in list(_entries_of(loop).values()):
            if entry.shared is shared or getattr(entry.shared, "channel", None) is shared:
                entry.retire()


def find(key: Hashable, loop: asyncio.AbstractEventLoop) -> object:
    """Return the object of `loop` for `key`, or None; in any thread, and without making it."""
    entries: dict[Hashable, _Entry] = getattr(loop, _ATTRIBUTE, None) or {}
    entry = entries.get(key)
    return None if entry is None else entry.shared


def lasting(key: Hashable, factory: Callable[[], T], loop: asyncio.AbstractEventLoop) -> T:
    """Return the object of `loop` for `key`, made at need; it lasts as long as the loop."""
    entries = _entries_of(loop)
    entry = entries.get(key)
    if entry is None:
        entry = entries[key] = _Entry(factory(), key, entries)
        entry.users = 1
    made: T = entry.shared
    return made


def keep(obj: object, loop: asyncio.AbstractEventLoop) -> None:
    """Keep `obj` alive until `let_go`, or as long as the loop; as a loop keeps its sockets."""
    kept: set[object] = lasting("kept", set, loop)
    kept.add(obj)


def let_go(obj: object, loop: asyncio.AbstractEventLoop) -> None:
    """Undo `keep`; harmless if there is nothing to undo.  In any thread."""
    kept = _entries_of(loop).get("kept")
    if kept is not None:
        kept.shared.discard(obj)
