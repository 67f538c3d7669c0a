"""Resource: the base class of every object around a C handle, which decides when it is destroyed.

Theory of operation
    The C libraries require an order of destruction: queue pair before completion queue before
    protection domain.  They respond to a wrong order with EBUSY or, worse, by blocking.  Python
    programs close objects in the order of their `with` blocks and exceptions.  To satisfy both,
    children are counted: `close()` only prevents new use of an object, and the C object is
    destroyed when its last child has been destroyed.

    1. A child has strong references to its parents, and is counted by each.
    2. `close()` is idempotent and never blocks the event loop.  If a loop is running, a worker
       thread destroys the C object; otherwise it is destroyed before `close()` returns.
    3. When a child has been destroyed, the same thread releases its parents, and destroys those
       that were only waiting for this child.
    4. A finalizer warns, and closes the object in the same way.  In a forked child nothing is
       destroyed (see loop.fork).  As finalizers run in any thread, and readers, waiting tasks and
       tables belong to the thread of the loop, the loop is asked to do its part there.
    5. `destroy()` is as strict as C: it raises instead of waiting for children.  A child that was
       closed, and is only waiting for the worker thread, does not count, so that the result depends
       on the order of the calls and not on the speed of a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NoReturn, Self

from aiordma.errors import ResourceClosedError, busy_error
from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.limit import Limit
from aiordma.loop.running import running_loop
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.weak import living
from aiordma.loop.workers import reaper

__all__ = ["Resource", "ResourceState"]

_log = log_of()
_STILL_THERE = "something that was made from it is still open, or its device is slow: it goes on"
# One lock for all: taken for nanoseconds, at creation and destruction only.
_lock = fork.new_lock()


class ResourceState(Enum):
    """The state of a resource."""

    OPEN = "open"
    CLOSING = "closing"
    DESTROYING = "destroying"
    GONE = "gone"
    FORKED = "forked"


# A look into an enumeration costs more than the rest of `_require`.
_OPEN, _DESTROYING = ResourceState.OPEN, ResourceState.DESTROYING
_reference = weakref.ref
#: Instead of a dictionary of its own, for each object from which nothing was made yet.
_NOTHING_MADE: dict[int, weakref.ref[Resource]] = {}


def _end_soon(loop: asyncio.AbstractEventLoop, wait: asyncio.Future[None]) -> None:
    """Have the loop end a wait.  In any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
        loop.call_soon_threadsafe(_end, wait)


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)


class Resource(Uncopied):
    """Base of all objects that own a C handle.

    `with` closes it at the end of the block; `async with` also waits until the C object is
    destroyed, unless something made from it is still open.

    Args:
        handle: The C object.  None while the call that makes it is still to come, in a thread
            perhaps: the parents outlive the call then.
        parents: Resources that must not be destroyed before this resource.

    Raises:
        ResourceClosedError: A parent was closed meanwhile; the C object is destroyed.
    """

    __slots__ = (
        "__weakref__", "_children", "_ending", "_handle", "_made", "_outcome", "_parents", "_state",
    )  # fmt: skip

    # True for objects that do not own their C handle.
    _borrowed = False
    # The word for a use by anything but a child.
    _use = "unfinished operation"

    def __init__(self, handle: Any, parents: tuple[Resource, ...] = ()) -> None:
        self._handle: Any = handle
        self._state = _DESTROYING
        self._parents: tuple[Resource, ...] = ()
        #: Children and uses under way; of the children weak references, by identity.
        self._children = 0
        self._made = _NOTHING_MADE
        self._ending: list[Callable[[], object]] | None = None
        self._outcome: Exception | bool | None = None
        if not parents:
            self._state = _OPEN
            fork.guard(self)  # its children are found through it
            return
        key, reference, counted = id(self), _reference(self), 0
        try:
            with _lock:
                # As `_add`, which takes twice as long for two parents: a connection has four
                # resources, with seven parents.
                for parent in parents:
                    if parent._state is not _OPEN:
                        parent._refuse()
                    made = parent._made
                    if made is _NOTHING_MADE:
                        parent._made = {key: reference}
                    # A weak reference is the same each time, and an identity is not: that may be
                    # of an object that has gone without its end.
                    elif key in made and made[key] is reference:
                        continue  # it was named twice
                    else:
                        made[key] = reference
                    parent._children += 1
                    counted += 1
                once = counted == len(parents)
                self._parents = parents if once else tuple(dict.fromkeys(parents))
                self._state = _OPEN
        except BaseException:
            # The fresh C object has no right to be, and its parents are not to wait for it.
            self._parents = tuple(dict.fromkeys(parents))[:counted]
            self._finish()
            raise

    @property
    def closed(self) -> bool:
        """Whether `close()` was called; the C object may live on for its children."""
        return self._state is not _OPEN

    def _require(self) -> Any:
        """The C handle, for a call."""
        if self._state is not _OPEN:
            self._refuse()
        return self._handle

    def _refuse(self) -> NoReturn:
        name = type(self).__name__
        if self._state is ResourceState.FORKED:
            raise fork.forked_error(name)
        msg = f"the {name} is closed"
        raise ResourceClosedError(msg)

    def _add(self, child: Resource | None) -> None:
        if child is not None:
            if self._made is _NOTHING_MADE:
                self._made = {}
            self._made[id(child)] = weakref.ref(child)
        self._children += 1

    def _retain(self, child: Resource | None = None) -> None:
        """Count one more user that the C object has to outlive: a child, or a work request."""
        with _lock:
            if self._state is not _OPEN:
                self._refuse()
            self._add(child)

    def _let_go(self, child: Resource | None = None) -> None:
        """Count one user less, and destroy a closed object after its last one.  In any thread."""
        with _lock:
            if child is not None:
                del self._made[id(child)]
            self._children -= 1
            last = self._state is ResourceState.CLOSING and not self._children
            if last:
                self._state = ResourceState.DESTROYING
        if last:
            self._schedule()

    def _hold(self, resources: Iterable[Resource]) -> None:
        """Add parents: resources that must not be destroyed before this one."""
        with _lock:
            for resource in dict.fromkeys(resources):
                if resource not in self._parents:
                    resource._add(self)
                    self._parents += (resource,)

    def _release(self, resources: Iterable[Resource]) -> None:
        """Undo `_hold` for these resources."""
        released = list(dict.fromkeys(resources))
        with _lock:
            held = [resource for resource in released if resource in self._parents]
            self._parents = tuple(parent for parent in self._parents if parent not in held)
        for resource in held:
            resource._let_go(self)

    def close(self) -> None:
        """Prevent new use of the object, and destroy it once nothing made from it is left.

        This suits programs that close objects in the order of `with` blocks and exceptions.  It is
        idempotent, and never blocks a running event loop.  `await wait_closed()` waits for the end.

        Raises:
            RdmaOSError: EBUSY, events that it has returned were not acknowledged; it stays open.
        """
        self._shut(strict=False)

    def destroy(self) -> None:
        """Destroy the object, but only if nothing that was made from it is left, as C does.

        This suits programs that want an error for a wrong order, as in C and jVerbs, where `close`
        waits.  A child that was closed or destroyed before is no obstacle, even if a thread is
        still destroying it.  Otherwise it is like `close()`: idempotent, never blocks a running
        event loop, and `await wait_closed()` waits for the end.

        Raises:
            RdmaOSError: EBUSY; the text names the obstacle: something made from it
                that is still open, work under way, events that are not acknowledged.  The object
                stays as it was, and can be used.
            ForkedError: The process was forked after the object was made.
        """
        self._shut(strict=True)

    def _shut(self, *, strict: bool) -> None:
        if self._state is not ResourceState.OPEN:
            if strict:
                self._refuse_unless_leaving()
            return
        self._before_close()
        if strict:
            self._before_destroy()
        with _lock:
            if self._state is not ResourceState.OPEN:
                return
            if strict:
                self._refuse_with_users()
            self._state = ResourceState.CLOSING
            # Held by itself until its loop side is cleaned up: the last child may let go in
            # another thread at this very moment.
            self._children += 1
            self._stay()
        loop = self._home
        if loop is None or loop is running_loop() or not loop.is_running():
            self._leave_loop()
            return
        try:
            loop.call_soon_threadsafe(self._leave_loop)
        except RuntimeError:  # the loop was closed in this moment
            self._leave_loop()

    # Uses that are not counted here; see MemoryRegion.

    @property
    def _transfers(self) -> int:
        return 0

    def _stay(self) -> None:
        """Called by a close, under the lock: count `_transfers`, if any, as one user."""

    def _leave_loop(self) -> None:
        self._on_close()
        for child in self._living():
            child._parent_closing(self)
        self._let_go()

    def _refuse_unless_leaving(self) -> None:
        if self._state is ResourceState.FORKED:
            self._refuse()
        with _lock:
            if self._state is ResourceState.CLOSING:
                self._refuse_with_users()

    def _refuse_with_users(self) -> None:
        """Raise if a child or a use forbids a strict destroy; under the lock."""
        parts = [
            f"{count} {name} made from it is still open"
            if count == 1
            else f"{count} {name}s made from it are still open"
            for name, count in Counter(type(child).__name__ for child in self._in_the_way()).items()
        ]
        if uses := self._children - len(self._made) + self._transfers:
            parts.append(f"{uses} {self._use}{'s' * (uses > 1)}")
        if parts:
            msg = f"the {type(self).__name__} cannot be destroyed: {', '.join(parts)}"
            raise busy_error(msg)

    def _living(self) -> list[Resource]:
        """The children, except those that are being finalized, whose weak references are dead."""
        return living(list(self._made.values()))

    def _in_the_way(self) -> Iterator[Resource]:
        """The children that are open, or wait for more than a thread; under the lock."""
        return (child for child in self._living() if not child._leaving)

    @property
    def _leaving(self) -> bool:
        """Whether destruction is only waiting for threads of this library."""
        if self._state is ResourceState.CLOSING:
            return self._children == len(self._made) and not any(True for _ in self._in_the_way())
        return self._state is not ResourceState.OPEN

    def _schedule(self) -> None:
        if running_loop() is None:
            self._finish()
        else:
            reaper.submit(self._finish)

    def _finish(self) -> None:
        handle, self._handle = self._handle, None
        outcome: Exception | None = None
        try:
            if not (handle is None or self._borrowed):
                self._destroy(handle)
        except Exception as exc:
            # EIO: the device was taken away, and the kernel has destroyed everything made from it.
            if not isinstance(exc, OSError) or exc.errno != errno.EIO:
                outcome = exc
                if isinstance(exc, OSError | MemoryError):
                    _log.warning("destroying %s failed: %s", type(self).__name__, exc)
                else:
                    _log.exception("destroying %s failed", type(self).__name__)
        self._state = ResourceState.GONE
        parents, self._parents = self._parents, ()
        for parent in reversed(parents):
            parent._let_go(self)
        with _lock:
            self._outcome = outcome or True
        while (function := self._next_waiting()) is not None:
            try:
                function()
            except Exception:
                _log.exception("what follows the end of a %s failed", type(self).__name__)

    def _next_waiting(self) -> Callable[[], object] | None:
        with _lock:
            if self._ending:
                return self._ending.pop(0)
            self._ending = None
            return None

    def _when_gone(self, function: Callable[[], object]) -> None:
        """Call `function` when the C object is destroyed, in that thread; now if it is already."""
        with _lock:
            if self._outcome is None or self._ending is not None:
                # A list if needed: a connection has several resources, and waits for one or two.
                self._ending = [*(self._ending or ()), function]
                return
        function()

    def _until_gone(self) -> asyncio.Future[None]:
        """A future of the running loop that is done when the C object is destroyed."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        self._when_gone(functools.partial(_end_soon, loop, gone))
        return gone

    async def wait_closed(self, timeout: float = 60.0) -> None:
        """Wait until the C object is destroyed.

        Args:
            timeout: Seconds; an object whose children are still open waits for them.

        Raises:
            TimeoutError: It is not destroyed yet; the destroy goes on.
            OSError: The C library refused to destroy it.
            MemoryError: There was no memory for the call; the C object may exist still.

        Cancellation: ends the wait only.
        """
        if self._outcome is None or self._ending is not None:
            # Awaited even if the object is gone: functions of `_when_gone` run first.
            gone = self._until_gone()
            with Limit(timeout, "destroying the " + type(self).__name__, _STILL_THERE):
                await gone
        if isinstance(self._outcome, BaseException):
            raise self._outcome

    # For subclasses to define

    @property
    def _home(self) -> asyncio.AbstractEventLoop | None:
        """The loop whose thread has to run `_on_close`, or None for any thread."""
        return None

    def _parent_closing(self, parent: Resource) -> None:
        """A parent was closed; by default the child stays open until its maker closes it."""

    def _before_close(self) -> None:
        """Refuse to close, by raising, while that would lose or block something."""

    def _before_destroy(self) -> None:
        """Refuse the strict destroy, by raising, for a reason other than children."""

    def _on_close(self) -> None:
        """Clean up what belongs to the loop, before the C object goes: readers, waiters, tables."""

    def _destroy(self, handle: Any) -> None:
        """The C destroy call; runs in any thread.  Raises OSError when it fails."""
        raise NotImplementedError

    def poison_after_fork(self) -> None:
        """In a forked child: end this object, and all that was made from it, without a C call."""
        if self._state is ResourceState.FORKED:
            return
        self._state = ResourceState.FORKED
        self._handle = None
        fork.become_stand_in(self)
        for child in self._living():
            child.poison_after_fork()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
        # A child of an outer block may still be open: then the destroy follows the child's close.
        with _lock:
            ends_now = self._leaving
        if ends_now:
            await self.wait_closed()

    def __del__(
        self,
        _warn: Any = warnings.warn,
        _open: ResourceState = ResourceState.OPEN,
        _finalizing: Any = sys.is_finalizing,
    ) -> None:
        # Names are bound as defaults: at interpreter exit the module's own may be gone.
        if getattr(self, "_state", None) is not _open or self._borrowed or _finalizing():
            return
        text = f"unclosed {self!r}: use `async with`, or close()"
        try:
            _warn(text, ResourceWarning, source=self, stacklevel=1)
        finally:
            self.close()  # also where warnings are errors

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.value}>"
