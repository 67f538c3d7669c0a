"""Resource: what every object around a C handle has in common, above all how it ends.

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
    4. A finalizer warns and hands the object over in the same way.  In a forked child nothing
       is destroyed (see loop.fork).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import warnings
from concurrent.futures import Future
from enum import Enum
from typing import Any

from aiordma.errors import ForkedError, ResourceClosedError
from aiordma.loop import fork
from aiordma.loop.workers import reaper

__all__ = ["Resource", "ResourceState"]

_log = logging.getLogger("aiordma")
# One lock for all: taken for nanoseconds, at creation and destruction only.
_lock = threading.RLock()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that does not exist in the child may hold the old one


os.register_at_fork(after_in_child=_after_fork)


class ResourceState(Enum):
    """Life of a resource."""

    OPEN = "open"
    CLOSING = "closing"
    DESTROYING = "destroying"
    GONE = "gone"
    FORKED = "forked"


class Resource:
    """Base of all objects that own a C handle.

    Args:
        handle: The C object.
        parents: Resources that must not be destroyed before this one.
    """

    __slots__ = (
        "__weakref__", "_children", "_gone", "_handle", "_parents", "_state",
    )  # fmt: skip

    # True for objects whose C handle belongs to somebody else.
    _borrowed = False

    def __init__(self, handle: Any, parents: tuple[Resource, ...] = ()) -> None:
        self._handle = handle
        self._state = ResourceState.DESTROYING
        self._children = 0
        self._gone: Future[None] = Future()
        self._parents: tuple[Resource, ...] = ()
        try:
            for parent in parents:
                parent._retain()
                self._parents += (parent,)
        except BaseException:
            # A parent was closed meanwhile: the fresh C object has no right to be.
            self._finish()
            raise
        self._state = ResourceState.OPEN
        fork.guard(self)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called; the C object may live on for its children."""
        return self._state is not ResourceState.OPEN

    def _require(self) -> Any:
        """The C handle, for a call.

        Raises:
            ResourceClosedError: `close()` was called before.
            ForkedError: The process was forked after the object was made.
        """
        if self._state is not ResourceState.OPEN:
            self._refuse()
        return self._handle

    def _refuse(self) -> None:
        name = type(self).__name__
        if self._state is ResourceState.FORKED:
            msg = f"this {name} belongs to the parent process; open a new one after fork()"
            raise ForkedError(msg)
        msg = f"the {name} is closed"
        raise ResourceClosedError(msg)

    def _retain(self) -> None:
        """Count one more user that the C object has to outlive."""
        with _lock:
            if self._state is not ResourceState.OPEN:
                self._refuse()
            self._children += 1

    def _let_go(self) -> None:
        """One user less; destroys a closed object that was waiting for it.  Any thread."""
        with _lock:
            self._children -= 1
            if self._state is not ResourceState.CLOSING or self._children:
                return
            self._state = ResourceState.DESTROYING
        self._schedule()

    def close(self) -> None:
        """Shut the object for new use; destroy it as soon as nothing made from it is left.

        Idempotent, never blocks a running event loop.  `await wait_closed()` waits for the end.

        Raises:
            ResourceBusyError: Events handed out by it are not acknowledged; it stays open.
        """
        if self._state is not ResourceState.OPEN:
            return
        self._before_close()
        with _lock:
            if self._state is not ResourceState.OPEN:
                return
            self._state = ResourceState.CLOSING
            # Held by itself until its loop side is cleaned up: the last child may let go in
            # another thread at this very moment.
            self._children += 1
        self._on_close()
        self._let_go()

    def _schedule(self) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._finish()
        else:
            reaper.submit(self._finish)

    def _finish(self) -> None:
        handle, self._handle = self._handle, None
        try:
            if not self._borrowed:
                self._destroy(handle)
        except OSError as exc:
            _log.warning("destroying %s failed: %s", type(self).__name__, exc)
            outcome: OSError | None = exc
        else:
            outcome = None
        self._state = ResourceState.GONE
        parents, self._parents = self._parents, ()
        for parent in reversed(parents):
            parent._let_go()
        if outcome is None:
            self._gone.set_result(None)
        else:
            self._gone.set_exception(outcome)

    async def wait_closed(self, timeout: float = 60.0) -> None:
        """Wait until the C object is destroyed.

        Args:
            timeout: Seconds; an object whose children are still open waits for them.

        Raises:
            TimeoutError: It is not destroyed yet; the destroy goes on.
            OSError: The C library refused to destroy it.

        Cancellation: ends the wait only.
        """
        async with asyncio.timeout(timeout):
            await asyncio.shield(asyncio.wrap_future(self._gone))

    # What subclasses define.

    def _before_close(self) -> None:
        """Refuse to close, by raising, while that would lose or block something."""

    def _on_close(self) -> None:
        """Loop-side clean-up, before the C object may go: readers, waiters, tables."""

    def _destroy(self, handle: Any) -> None:
        """The C destroy call; runs in any thread.  Raises OSError when it fails."""
        raise NotImplementedError

    def poison_after_fork(self) -> None:
        """In a forked child: dead without a C call."""
        self._state = ResourceState.FORKED
        self._handle = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(
        self,
        _warn: Any = warnings.warn,
        _open: ResourceState = ResourceState.OPEN,
        _finalizing: Any = sys.is_finalizing,
    ) -> None:
        # Names are bound as defaults: at interpreter exit the module's own may be gone.
        if getattr(self, "_state", None) is not _open or self._borrowed or _finalizing():
            return
        _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        self._abandon()

    def _abandon(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.value}>"
