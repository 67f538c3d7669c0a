"""The fabric: RDMA in memory, for programs and tests on any machine.

`aiordma-fabric -- COMMAND` runs a command over it; `docs/fabric.md` is the manual.  The launcher is
the module `aiordma_fabric`; `python -m aiordma.testing.fabric` starts it, too, more slowly.
"""

from __future__ import annotations

from aiordma_fabric import FabricError, main, profiles

__all__ = ["FabricError", "main", "profiles"]
