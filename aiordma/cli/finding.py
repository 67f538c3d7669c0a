"""Finding: the result of a check of `aiordma doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Status", "fail", "ok", "skip", "warn"]


class Status(Enum):
    """How a check ended: WARN leaves RDMA usable, SKIP was not made."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        status: Whether it is good.
        seen: The fact.
        advice: The remedy, or an empty text.
    """

    status: Status
    seen: str
    advice: str = ""


def ok(seen: str, advice: str = "") -> Finding:
    """The check has passed."""
    return Finding(Status.OK, seen, advice)


def warn(seen: str, advice: str = "") -> Finding:
    """The check has found a possible fault."""
    return Finding(Status.WARN, seen, advice)


def skip(why: str, advice: str = "") -> Finding:
    """The check was not made: something that it needs is missing, as another check reports."""
    return Finding(Status.SKIP, f"not checked: {why}", advice)


def fail(seen: str, advice: str = "") -> Finding:
    """RDMA cannot be used like this."""
    return Finding(Status.FAIL, seen, advice)
