"""Reader, which drains a completion channel; see reader.c."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Reader"]

if TYPE_CHECKING:
    from aiordma._ffi._reader import Reader
else:
    try:
        from aiordma._ffi._reader import Reader
    except ImportError:
        # Not built.  Then neither is the module that binds the RDMA libraries, and no stream will
        # ever be made; but aiordma can be imported, and tells why.
        Reader = None
