"""Metrics of this process alone."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_other_connections() -> None:
    """Connections of other tests, which have no adapter, are in no snapshot."""
    gc.collect()
