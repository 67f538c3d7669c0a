"""Resource: the base of every object around a C handle; above all it rules how the object ends.

Theory of operation
    C demands an order: queue pair before completion queue before protection domain, and it
    answers a wrong order with EBUSY or, worse, by blocking.  Python programs close in whatever
    order their `with` blocks and exceptions dictate.  Both are satisfied by counting: `close()`
    shuts an object for new use at once, and the C destroy happens when its last child has been
    destroyed.

    1. A child holds its parents strongly and is counted by each.
    2. `close()` is idempotent and never blocks the loop: under a running loop the C destroy is
       done by a reaper thread; without one it is done before `close()` returns.
    3. A destroyed child lets go of its parents in the same thread, which destroys those that
       were only waiting for it.
    4. A finalizer warns and closes the object in the same way.  In a forked child nothing is
       destroyed (see loop.fork).  Finalizers run in any thread; readers, waiters and tables
       belong to the thread of the loop, which is then asked to do its part.
    5. `destroy()` is the form with C's strictness: it raises instead of waiting for children.  A
       child that was closed, and waits for nothing but the reaper, is not in its way: the order
       of the calls is judged, not the speed of a thread.
"""

from __future__ import annotations

import asyncio
import errno
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, Self

from aiordma._core import Owner
from aiordma.errors import ResourceBusyError, ResourceClosedError
from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.job import Job
from aiordma.loop.limit import Limit
from aiordma.loop.running import running_loop
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.workers import reaper

__all__ = ["Resource", "ResourceState"]

_log = log_of()
_STILL_THERE = "something that was made from it is still open, or its device is slow: it goes on"
# One lock for all: taken for nanoseconds, at creation and destruction only.
_lock = fork.new_lock()


class ResourceState(Enum):
    """Life of a resource."""

    OPEN = "open"
    CLOSING = "closing"
    DESTROYING = "destroying"
    GONE = "gone"
    FORKED = "forked"


Owner._set_rules(
    ResourceState.OPEN, ResourceState.CLOSING, ResourceState.DESTROYING,
    _lock.acquire, _lock.release, fork.guard,
)  # fmt: skip


class Resource(Uncopied, Owner):
    """Base of all objects that own a C handle.

    `with` closes it at the end of the block; `async with` also waits until the C object is
    destroyed, unless something made from it is still open.

    Args:
        handle: The C object.
        parents: Resources that must not be destroyed before this resource.

    Raises:
        ResourceClosedError: A parent was closed meanwhile; the C object is destroyed.
    """

    __slots__ = ("__weakref__",)

    # True for objects that do not own their C handle.
    _borrowed = False
    # The word for a use by anything but a child.
    _use = "unfinished operation"

    def _refuse(self) -> None:
        name = type(self).__name__
        if self._state is ResourceState.FORKED:
            raise fork.forked_error(name)
        msg = f"the {name} is closed"
        raise ResourceClosedError(msg)

    def _add(self, child: Resource | None) -> None:
        self._children += 1
        if child is not None:
            self._made[id(child)] = weakref.ref(child)

    def _hold(self, resources: Iterable[Resource]) -> None:
        """Have further resources, in use already, outlive the C object of this resource."""
        with _lock:
            for resource in dict.fromkeys(resources):
                if resource not in self._parents:
                    resource._add(self)
                    self._parents += (resource,)

    def _release(self, resources: Iterable[Resource]) -> None:
        """Undo `_hold`: these need not outlive this resource any more."""
        released = list(dict.fromkeys(resources))
        with _lock:
            held = [resource for resource in released if resource in self._parents]
            self._parents = tuple(parent for parent in self._parents if parent not in held)
        for resource in held:
            resource._let_go(self)

    def close(self) -> None:
        """Shut the object for new use; destroy it as soon as nothing made from it is left.

        The form for programs, whose `with` blocks and exceptions close in any order.  Idempotent,
        never blocks a running event loop.  `await wait_closed()` waits for the end.

        Raises:
            ResourceBusyError: Events that it has returned are not acknowledged; it stays open.
        """
        self._shut(strict=False)

    def destroy(self) -> None:
        """Destroy the object as C does it: only if nothing that was made from it is left.

        The form for programs that want an error for a wrong order, as jVerbs and C have it, where
        `close` waits.  A child that was closed or destroyed before is no obstacle, even if a thread
        is still busy with it.  Otherwise like `close()`: idempotent, never blocks a running event
        loop, and `await wait_closed()` waits for the end.

        Raises:
            ResourceBusyError: EBUSY; the text names the obstacle: something made from it
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
            raise ResourceBusyError(errno.EBUSY, msg)

    def _living(self) -> list[Resource]:
        """The children, without those that are being finalized: their references are dead."""
        found = (reference() for reference in list(self._made.values()))
        return [child for child in found if child is not None]

    def _in_the_way(self) -> Iterator[Resource]:
        """The children that are open, or wait for more than a thread; under the lock."""
        return (child for child in self._living() if not child._leaving)

    @property
    def _leaving(self) -> bool:
        """Whether the destroy waits for nothing but threads of this library."""
        if self._state is ResourceState.CLOSING:
            return self._children == len(self._made) and not any(True for _ in self._in_the_way())
        return self._state is not ResourceState.OPEN

    def _schedule(self) -> None:
        if running_loop() is None:
            self._finish()
        else:
            try:
                reaper.submit(self._finish)
            except MemoryError:  # the reaper has not taken it
                self._finish()

    def _finish(self) -> None:
        handle, self._handle = self._handle, None
        outcome: OSError | MemoryError | None = None
        try:
            if not self._borrowed:
                self._destroy(handle)
        except (OSError, MemoryError) as exc:
            # EIO: the device was taken away, and the kernel has destroyed everything made from it.
            if not isinstance(exc, OSError) or exc.errno != errno.EIO:
                outcome = exc
                _log.warning("destroying %s failed: %s", type(self).__name__, exc)
        self._state = ResourceState.GONE
        parents, self._parents = self._parents, ()
        for parent in reversed(parents):
            parent._let_go(self)
        with _lock:
            self._outcome = outcome or True
            end = self._ending
        if end is not None:
            self._settle(end)

    @property
    def _gone(self) -> Job[None]:
        """A job that is done when the C object is destroyed.

        Made at need: a connection has a handful of resources, of which one or two are waited for.
        """
        with _lock:
            end, done = self._ending, self._outcome is not None
            if end is None:
                end = self._ending = Job()
            else:
                done = False
        if done:
            self._settle(end)
        return end

    def _settle(self, end: Job[None]) -> None:
        end.finish(self._outcome if isinstance(self._outcome, BaseException) else None)

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
            # Awaited even if the object is gone: callbacks that were added before run first.
            with Limit(timeout, "destroying the " + type(self).__name__, _STILL_THERE):
                await self._gone.future()
        elif isinstance(self._outcome, BaseException):
            raise self._outcome

    # For subclasses to define.

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
        """Loop-side clean-up, before the C object may go: readers, waiters, tables."""

    def _destroy(self, handle: Any) -> None:
        """The C destroy call; runs in any thread.  Raises OSError when it fails."""
        raise NotImplementedError

    def poison_after_fork(self) -> None:
        """In a forked child: end it without a C call, and everything that was made from it."""
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
        _warn(text, ResourceWarning, source=self, stacklevel=1)
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.value}>"
