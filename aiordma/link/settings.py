"""The checks of settings: each field of a configuration has its bounds in its annotation.

    @suggesting
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        depth: Annotated[int, Between(1, 255)] = 8
        tos: Annotated[int | None, Between(0, 255)] = None
        close_timeout_s: Annotated[float, SECONDS] = 5.0

        def __post_init__(self) -> None:
            check_settings(self)

So a new setting is one line of its class, and one of the docstring; only rules about two settings
are checked elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

__all__ = [
    "RETRIES",
    "SECONDS",
    "WAITS",
    "Between",
    "OneOf",
    "Seconds",
    "Waiting",
    "check_settings",
    "suggesting",
]

Config = TypeVar("Config")

#: How a wait for completions begins.
WAITS = ("event", "adaptive", "spin")
#: Retries of an adapter that gets no acknowledgement.  7, which is meant to be one more, means
#: forever on Soft-RoCE.
RETRIES = 6


class Waiting(Protocol):
    """A configuration that says how a wait for completions begins."""

    @property
    def wait(self) -> str:
        """One of `WAITS`."""

    @property
    def spin_us(self) -> float:
        """Microseconds of polling, at most."""


@dataclass(frozen=True, slots=True)
class Between:
    """A number from `low` to `high`, both included."""

    low: int
    high: int

    def check(self, name: str, value: Any, kind: type) -> None:
        """Check the `value` of the setting `name`, whose type is `kind`."""
        _check_kind(name, value, kind)
        if not self.low <= value <= self.high:
            msg = f"{name} is {value}, not in {self.low}..{self.high}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A positive and finite number of seconds; 0, too, if `zero`."""

    zero: bool = False

    def check(self, name: str, value: Any, kind: type) -> None:
        """Check the `value` of the setting `name`, whose type is `kind`."""
        _check_kind(name, value, kind)
        if not (0 < value < math.inf or (self.zero and value == 0)):
            msg = f"{name} is {value!r}, not a positive number of seconds"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these `words`."""

    words: tuple[str, ...]

    def check(self, name: str, value: Any, kind: type) -> None:
        """Check the `value` of the setting `name`, whose type is `kind`."""
        _check_kind(name, value, kind)
        if value not in self.words:
            msg = f"{name} is {value!r}, not one of {', '.join(map(repr, self.words))}"
            raise ValueError(msg)


SECONDS = Seconds()


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is known of a field: its type, whether it may be None, and its bounds."""

    name: str
    kind: type
    optional: bool
    bounds: Between | Seconds | OneOf | None


@functools.cache
def _rules_of(config: type[Any]) -> tuple[_Rule, ...]:
    hints = get_type_hints(config, include_extras=True)
    return tuple(_rule_of(field.name, hints[field.name]) for field in dataclasses.fields(config))


def _rule_of(name: str, hint: Any) -> _Rule:
    bounds = None
    if hasattr(hint, "__metadata__"):
        hint, bounds = get_args(hint)[:2]
    kinds = get_args(hint) if get_origin(hint) is types.UnionType else (hint,)
    optional = types.NoneType in kinds
    (kind,) = (each for each in kinds if each is not types.NoneType)
    return _Rule(name, kind, optional, bounds)


def _check_kind(name: str, value: Any, kind: type) -> None:
    """Check that the value is of the type; an int is a float, too, but a bool is no number."""
    kinds = (int, float) if kind is float else kind
    if isinstance(value, kinds) and (kind is bool or not isinstance(value, bool)):
        return
    word = "number" if kind is float else kind.__name__
    msg = f"{name} has to be {'an' if word == 'int' else 'a'} {word}, not {value!r}"
    raise TypeError(msg)


def check_settings(config: object) -> None:
    """Check each field of the dataclass `config` by its annotation.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is out of its bounds.
    """
    kind: Any = type(config)
    for rule in _rules_of(kind):
        value = getattr(config, rule.name)
        if value is None and rule.optional:
            continue
        if rule.bounds is None:
            _check_kind(rule.name, value, rule.kind)
        else:
            rule.bounds.check(rule.name, value, rule.kind)


def suggesting(config: type[Config]) -> type[Config]:
    """Have a dataclass suggest a similar name if it is given an argument that it does not have.

    Python itself does so from 3.13 on.
    """
    if sys.version_info >= (3, 13):
        return config
    init: Any = config.__init__
    known = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def suggest(self: Config, *args: Any, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                raise TypeError(_unexpected(config.__name__, name, known))
        init(self, *args, **settings)

    config.__init__ = suggest  # type: ignore[assignment]
    return config


def _unexpected(config: str, name: str, known: list[str]) -> str:
    import difflib  # not at each start of a program

    # A name that lacks a whole word is another one: `timeout` is not meant as `ack_timeout`.
    near = difflib.get_close_matches(name, known, 1, cutoff=0.8)
    suggestion = f". Did you mean {near[0]!r}?" if near else ""
    return f"{config}.__init__() got an unexpected keyword argument {name!r}{suggestion}"
