"""Tests of aiordma and of its pages that start guests, with the runner's own helpers."""

from __future__ import annotations

from softroce.tests.conftest import signals, softroce

__all__ = ["signals", "softroce"]
