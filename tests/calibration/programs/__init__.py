"""The programs of the calibration, by topic: each is about one rule, which its docstring says."""

from __future__ import annotations

from tests.calibration.programs import (
    access,
    connecting,
    datagrams,
    memory,
    messages,
    queues,
    refusals,
    states,
)
from tests.calibration.scene import PROGRAMS

__all__ = [
    "PROGRAMS",
    "access",
    "connecting",
    "datagrams",
    "memory",
    "messages",
    "queues",
    "refusals",
    "states",
]
