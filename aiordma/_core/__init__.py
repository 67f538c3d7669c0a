"""The compiled types of the data path, and the constants of protocol.h; see core.h and module.c."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from aiordma._core._compiled import *  # noqa: F403
except ImportError as error:
    if "subinterpreter" in str(error):  # of CPython's own text, and of module.c's
        raise ImportError(
            "aiordma cannot be used in a subinterpreter: its compiled types belong to the main "
            "interpreter. Use a thread, or a process of its own"
        ) from error
    # Not built, or rdma-core's libraries are missing.  Then the module that binds the libraries
    # cannot be loaded either: aiordma can be imported, and its calls raise LibraryMissingError.
    if not TYPE_CHECKING:

        def __getattr__(name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            if name in {"PeerRequest", "RequestTable"}:  # bases of classes of Python
                return object
            return 0 if name.isupper() else None
