"""The whole list: importing what fills it."""

from __future__ import annotations

import tests.programs.others
import tests.programs.web  # noqa: F401  # they fill it
from tests.programs.tried import Program, programs

__all__ = ["Program", "programs"]
