"""The version of the package, without importing its public names."""

from __future__ import annotations

import importlib.metadata

__all__ = ["aiordma_version"]


def aiordma_version() -> str:
    """The installed version, or words if the sources run without being installed."""
    try:
        return importlib.metadata.version("aiordma")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
