"""Printing: styled by rich on a terminal, the same text without styles elsewhere.

Names of files, texts of peers and the kernel's names of devices always go through `printable`: a
terminal obeys escape sequences, and a log entry has to stay on one line.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

__all__ = ["print_hint", "print_json", "print_line", "printable", "rate_words"]

_MEBI = 1 << 20


def printable(text: str) -> str:
    r"""The text with each character that does not show as itself as an escape, such as `\x1b`.

    Those are control characters, ends of lines, changes of the direction of writing, and lone
    surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def print_line(*parts: tuple[str, str]) -> None:
    """Print one line made of (text, style of rich) pairs.

    Never wraps: lines are for eyes and for grep alike.
    """
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        console.print(Text.assemble(*((printable(text), style) for text, style in parts)))
    else:
        print("".join(printable(text) for text, _ in parts))


def print_json(value: Any) -> None:
    """Print `value` for programs."""
    print(json.dumps(value, indent=2))


def print_hint(*lines: str) -> None:
    """Print a hint to standard error: it is not part of the output."""
    for line in lines:
        print(printable(line), file=sys.stderr)


def rate_words(bytes_per_s: float) -> str:
    """A rate in the unit that all commands have, MiB/s."""
    return f"{bytes_per_s / _MEBI:.1f} MiB/s"
