"""The made-up machine on which the commands run."""

from __future__ import annotations

from pathlib import Path

import pytest

from .machine import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without a device."""
    made = Machine(tmp_path)
    made.install(monkeypatch)
    return made
