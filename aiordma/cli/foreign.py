"""Values that another program has sent as JSON, any of which may be wrong.

A command that talks to another program must not end with a traceback because of what that program
says.  So it takes each value by one of these functions, and has a single exception to catch.
"""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["parsed", "real", "shown", "whole"]

#: The largest number that a counter may have.
MOST = (1 << 64) - 1


def _no_number(word: str) -> float:
    msg = f"JSON has no number {word}"
    raise ValueError(msg)


def _finite(word: str) -> float:
    number = float(word)
    return number if math.isfinite(number) else _no_number(word)


def parsed(text: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is not JSON, or is nested too deeply.  NaN and Infinity, which `json` accepts
            by default, are not JSON.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        msg = "the JSON is nested too deeply"
        raise ValueError(msg) from None


def whole(value: Any, least: int = 0, most: int = MOST) -> int:
    """A whole number within bounds.

    Raises:
        ValueError: The value is something else.
    """
    if type(value) is not int or not least <= value <= most:  # bool is an int for isinstance
        msg = f"not a whole number from {least} to {most}: {shown(value)}"
        raise ValueError(msg)
    return value


def real(value: Any, least: float, most: float) -> float:
    """A number within bounds.

    Raises:
        ValueError: The value is something else.
    """
    if type(value) not in (int, float) or not least <= value <= most:
        msg = f"not a number from {least:g} to {most:g}: {shown(value)}"
        raise ValueError(msg)
    return float(value)


def shown(value: Any) -> str:
    """The beginning of a value, for the text of an error."""
    return repr(value)[:80]
