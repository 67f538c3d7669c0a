"""Printing: styled by rich on a terminal, the same text without styles elsewhere."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

__all__ = ["print_hint", "print_json", "print_line"]


def print_line(*parts: tuple[str, str]) -> None:
    """Print one line made of (text, style of rich) pairs.

    Never wraps: lines are for eyes and for grep alike.
    """
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        console.print(Text.assemble(*parts))
    else:
        print("".join(text for text, _ in parts))


def print_json(value: Any) -> None:
    """Print `value` for programs."""
    print(json.dumps(value, indent=2))


def print_hint(text: str) -> None:
    """Tell people something that is no part of the output."""
    print(text, file=sys.stderr)
