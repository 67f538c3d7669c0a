"""Run any command with an RDMA device, on a machine that has none.

The command line is ``python -m aiordma_softroce [options] -- COMMAND...``, or ``softroce``; from
Python it is `run`. Needs nothing but the standard library, and installs or builds the rest on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import InfrastructureError, SoftroceError, UsageError

if TYPE_CHECKING:
    from .runner import run

__all__ = ["InfrastructureError", "SoftroceError", "UsageError", "run"]


def __getattr__(name: str) -> Any:
    # pytest imports the plugin, and with it this module, in each project of an environment: the
    # engines, which take many times as long, are for those that use them.
    if name == "run":
        from .runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
