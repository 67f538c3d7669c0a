"""Options of a connection id: which values they take, and until when they have an effect.

The kernel takes most options at any time and any value that fits into the field, and quietly
ignores an option that comes too late.  Here both are errors.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma.cm.enums import Option
from aiordma.cm.step import Stage
from aiordma.errors import os_error
from aiordma.verbs.resource import Resource

__all__ = ["set_option"]

_UNBOUND = frozenset({Stage.IDLE})
_BOUND = _UNBOUND | {Stage.BOUND}
_ADDRESSED = _BOUND | {Stage.ADDRESS_RESOLVED}
_ROUTED = _ADDRESSED | {Stage.ROUTE_RESOLVED}


@dataclass(frozen=True, slots=True)
class _Rule:
    """The arguments of `rdma_set_option` for an option."""

    c_type: str
    high: int
    stages: frozenset[Stage]
    until: str


_RULES = {
    Option.ID_TOS: _Rule("uint8_t *", 255, _ADDRESSED, "before the route is resolved"),
    Option.ID_REUSEADDR: _Rule("int *", 1, _BOUND, "before another id takes the address"),
    Option.ID_AFONLY: _Rule("int *", 1, _BOUND, "before listen and resolve_addr"),
    Option.ID_ACK_TIMEOUT: _Rule(
        "uint8_t *", 31, _ROUTED | {Stage.REQUESTED}, "before connect or accept"
    ),
}


def set_option(cm_id: Resource, stage: Stage, option: Option, value: int) -> None:
    """`ConnectionId.set_option` for an id at this stage."""
    if not isinstance(option, Option):
        msg = f"not an Option: {option!r}"
        raise TypeError(msg)
    rule = _RULES.get(option)
    if rule is None:
        msg = f"there is no option {option!r}"
        raise ValueError(msg)
    if not isinstance(value, int) or (isinstance(value, bool) and rule.high != 1):
        msg = f"the value of {option.name} is an int, not {value!r}"
        raise TypeError(msg)
    if not 0 <= value <= rule.high:
        msg = f"{option.name} is {value}, not in 0..{rule.high}"
        raise ValueError(msg)
    handle = cm_id._require()
    if stage not in rule.stages:
        detail = f"({option.name} has to be set {rule.until}; the connection id is {stage.value})"
        raise os_error(errno.EINVAL, "rdma_set_option", detail=detail)
    raw = ffi.new(rule.c_type, int(value))
    size = ffi.sizeof(ffi.typeof(raw).item)
    code = lib.rdma_set_option(handle, lib.RDMA_OPTION_ID, int(option), raw, size)
    check_minus_one(code, "rdma_set_option")
