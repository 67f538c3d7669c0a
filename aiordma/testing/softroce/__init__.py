"""Run any command where a real RDMA device is, on a machine that has none.

The command line is ``python -m aiordma.testing.softroce [options] -- COMMAND...``; from Python it
is `run`. Needs nothing but the standard library, and installs or builds the rest on first use.
"""

from __future__ import annotations

from .errors import InfrastructureError, SoftroceError, UsageError
from .runner import run

__all__ = ["InfrastructureError", "SoftroceError", "UsageError", "run"]
