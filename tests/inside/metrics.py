"""Private parts of aiordma/metrics/ that tests ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma.metrics import serving
from aiordma.metrics.serving import Service

if TYPE_CHECKING:
    import pytest


def descriptor_of(service: Service) -> int:
    """The descriptor of its socket; -1 if it is closed."""
    return service._socket.fileno()


def set_lock_s(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Wait so long for the lock of a folder."""
    monkeypatch.setattr(serving, "_LOCK_S", seconds)


def show_the_same_for(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the instruments of OpenTelemetry take no other snapshot for so many seconds."""
    from aiordma.contrib import opentelemetry  # not everywhere installed

    patch.setattr(opentelemetry, "_FRESH_S", seconds)
