"""ProtectionDomain: which memory a queue pair may use, and which queue pairs may use memory."""

from __future__ import annotations

import os
from typing import Any

from aiordma._ffi import lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.arguments import check_kind
from aiordma.verbs.context import Context
from aiordma.verbs.resource import Resource

__all__ = ["ProtectionDomain"]

_MOST_EXPOSURES = (1 << 32) - 1  # then their numbers begin again


class ProtectionDomain(Resource):
    """A protection domain (`ibv_alloc_pd(3)`).

    By default each connection has its own: a key that leaks to another connection of the same
    process then opens nothing.

    Args:
        context: The device.

    Raises:
        OSError: The device's or the cgroup's limit is reached.
    """

    __slots__ = ("_exposures", "_identity", "context")

    def __init__(self, context: Context) -> None:
        if not isinstance(context, Context):
            check_kind("context", context, Context, none=False)
        handle = lib.ibv_alloc_pd(context._require())
        if not handle:
            check_pointer(handle, "ibv_alloc_pd")
        self.context: Context = context
        # What regions in it say of their owner, once a connection has told its peer; 0: nothing.
        self._identity = 0
        self._exposures = 0
        super().__init__(handle, (context,))

    def _identify(self) -> int:
        """The identity of the domain, for the peers of its connections: 64 random bits, not 0."""
        if not self._identity:
            self._identity = int.from_bytes(os.urandom(8)) or 1
        return self._identity

    def _next_exposure(self) -> int:
        """The number of an exposure of memory in the domain: 32 bits, not 0."""
        self._exposures = self._exposures % _MOST_EXPOSURES + 1
        return self._exposures

    def _destroy(self, handle: Any) -> None:
        check_errno(lib.ibv_dealloc_pd(handle), "ibv_dealloc_pd")
