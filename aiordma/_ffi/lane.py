"""Lane, through which a stream calls its C; see lane.c."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Lane"]

if TYPE_CHECKING:
    from aiordma._ffi._lane import Lane
else:
    try:
        from aiordma._ffi._lane import Lane
    except ImportError:
        # Not built.  Then neither is the module that binds the RDMA libraries, and no stream will
        # ever be made; but aiordma can be imported, and tells why.
        Lane = None
