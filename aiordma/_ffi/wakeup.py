"""Wakeup, whose C has nothing to do with RDMA; see wakeup.c."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Wakeup"]

if TYPE_CHECKING:
    from aiordma._ffi._wakeup import Wakeup
else:
    try:
        from aiordma._ffi._wakeup import Wakeup
    except ImportError:
        # Not built.  Then neither is the module that binds the RDMA libraries, and nothing will
        # ever wait; but aiordma can be imported, and tells why.
        Wakeup = None
