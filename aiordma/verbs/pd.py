"""ProtectionDomain: which memory a queue pair may touch, and which queue pairs memory trusts."""

from __future__ import annotations

from typing import Any

from aiordma._ffi import lib
from aiordma._ffi.check import check_errno, check_pointer
from aiordma.arguments import check_kind
from aiordma.verbs.context import Context
from aiordma.verbs.resource import Resource

__all__ = ["ProtectionDomain"]


class ProtectionDomain(Resource):
    """A protection domain (`ibv_alloc_pd(3)`).

    A connection has one of its own by default: a key that leaks to another connection of the same
    process then opens nothing.

    Args:
        context: The device.

    Raises:
        OSError: The device's or the cgroup's limit is reached.
    """

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        if not isinstance(context, Context):
            check_kind("context", context, Context, none=False)
        handle = lib.ibv_alloc_pd(context._require())
        if not handle:
            check_pointer(handle, "ibv_alloc_pd")
        self.context: Context = context
        super().__init__(handle, (context,))

    def _destroy(self, handle: Any) -> None:
        check_errno(lib.ibv_dealloc_pd(handle), "ibv_dealloc_pd")
