"""C calls that the oldest supported rdma-core does not have: looked up when they are called.

A module that is linked to such a call would not load with an older library.
"""

from __future__ import annotations

import ctypes
import errno
from typing import Any

from aiordma._ffi import ffi
from aiordma.errors import os_error

__all__ = ["CALLS", "newer"]

_LIBRDMACM, _LIBIBVERBS = "librdmacm.so.1", "libibverbs.so.1"
#: Name, the library, the release of rdma-core that it came with, its type.
CALLS = {
    "rdma_resolve_addrinfo": (
        _LIBRDMACM,
        "60",
        "int (*)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *)",
    ),
    "rdma_query_addrinfo": (
        _LIBRDMACM,
        "60",
        "int (*)(struct rdma_cm_id *, struct rdma_addrinfo **)",
    ),
    "ibv_query_port_speed": (
        _LIBIBVERBS,
        "62",
        "int (*)(struct ibv_context *, uint32_t, uint64_t *)",
    ),
}


def newer(name: str) -> Any:
    """The C function, out of the library that is loaded.

    Args:
        name: A call of `CALLS`.

    Raises:
        NotSupportedError: The library does not have it.
    """
    library, release, kind = CALLS[name]
    # The loader returns the library that the module has loaded: the name is the same.
    function: Any = getattr(ctypes.CDLL(library), name, None)
    if function is None:
        title = library.partition(".")[0]
        detail = f"(the installed {title} has no {name}: it came with rdma-core {release})"
        raise os_error(errno.EOPNOTSUPP, name, detail=detail)
    return ffi.cast(kind, ctypes.cast(function, ctypes.c_void_p).value)
