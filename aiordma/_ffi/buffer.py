"""BufferExporter, whose C has nothing to do with RDMA; see exporter.c."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["BufferExporter"]

if TYPE_CHECKING:
    from aiordma._ffi._exporter import BufferExporter
else:
    try:
        from aiordma._ffi._exporter import BufferExporter
    except ImportError:
        # Not built.  Then neither is the module that binds the RDMA libraries, so that no message
        # will ever arrive; but aiordma can be imported, and tells why.
        class BufferExporter:
            """Stands in for the compiled class; Python 3.12 and later call `__buffer__`."""

            __slots__ = ()

            def __buffer__(self, flags: int, /) -> memoryview:
                return self._exported()
