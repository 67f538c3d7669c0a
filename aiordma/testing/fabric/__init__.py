"""The fabric: RDMA in memory, for programs and tests on any machine.

`python -m aiordma.testing.fabric -- COMMAND` runs a command over it; `docs/fabric.md` is the
manual.  The launcher is the module `aiordma_fabric`, and starts quicker by that name.
"""

from __future__ import annotations

from aiordma_fabric import FabricError, main, profiles

__all__ = ["FabricError", "main", "profiles"]
