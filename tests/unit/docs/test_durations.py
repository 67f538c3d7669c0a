"""docs/timeouts.md has every public name of a duration, and each docstring says its unit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import aiordma
import aiordma.cm
import aiordma.memory
import aiordma.metrics
import aiordma.verbs
from aiordma.contrib import aiohttp, dask, httpx
from aiordma.testing import faults, stream_conformance
from tests.pages import DOCS

MODULES = (
    aiordma, aiordma.cm, aiordma.memory, aiordma.metrics, aiordma.verbs,
    aiohttp, dask, faults, httpx, stream_conformance,
)  # fmt: skip
NAME = re.compile(
    r"(\w+_)?timeout(_s)?|\w+_(s|ms|us)|\w*timer|max_(idle|lifetime|pause)|happy_eyeballs_delay"
    r"|(milli)?seconds|deadline|remaining"
)
#: Seconds, or what libibverbs counts in.
UNIT = re.compile(
    r"\b(milli|micro)?seconds?\b|exponent e of .*timeout,? 4\.096 us|code of the delay",
    re.IGNORECASE,
)


def callables() -> Iterator[tuple[str, str, list[str]]]:
    """What a program calls or reads: its name, its docstring, and its names of durations."""
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                yield name, of_class(thing), durations(thing, attributes=True)
                for member, value in inspect.getmembers_static(thing):
                    function = getattr(value, "__func__", value)
                    # What is inherited from others has their words.
                    ours = str(getattr(function, "__module__", "")).startswith("aiordma")
                    if callable(function) and ours and not member.startswith("_"):
                        text = inspect.getdoc(function) or ""
                        yield f"{name}.{member}", text, durations(function)
            elif callable(thing):
                yield name, inspect.getdoc(thing) or "", durations(thing)


def of_class(kind: type[Any]) -> str:
    """The docstrings of a class and of those below it, with those of their `__init__`."""
    inits = (base.__dict__.get("__init__") for base in kind.__mro__)
    texts = (inspect.getdoc(each) for each in (*kind.__mro__, *filter(None, inits)))
    return "\n".join(text for text in texts if text)


def durations(thing: Any, *, attributes: bool = False) -> list[str]:
    """The names of durations among the parameters, and among the attributes with a type."""
    try:
        names = list(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        names = []
    if (inspect.getdoc(thing) or "").startswith("The result of "):
        names = []  # the library makes it, and the call has the words
    if attributes:
        names += [name for base in thing.__mro__ for name in inspect.get_annotations(base)]
    return [name for name in dict.fromkeys(names) if NAME.fullmatch(name) and name[0] != "_"]


def said_of(text: str, name: str) -> str:
    """What an entry of a docstring says."""
    found = re.search(rf"^( +){name}: (.*(?:\n\1 +.*)*)", text, re.MULTILINE)
    return " ".join(found[2].split()) if found else ""


ALL = [(where, text, name) for where, text, names in callables() for name in names]


@pytest.mark.parametrize(("where", "text", "name"), ALL, ids=lambda value: str(value)[:60])
def test_a_docstring_says_the_unit(where: str, text: str, name: str) -> None:
    assert UNIT.search(said_of(text, name)), f"{where}: {name}: {said_of(text, name)!r}"


def test_every_name_is_on_the_page() -> None:
    page = (DOCS / "timeouts.md").read_text()
    section = page.partition("\n## Names and units\n")[2].partition("\n## ")[0]
    names = {name for _, _, name in ALL} | {"remaining", "deadline"}
    assert len(names) > 25
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", section))))
    assert names - told == set()
    # And no name that is gone, but for those of calls and modules.
    others = {"alt_timeout", "rnr_timer", "set_min_rnr_timer"}
    assert {name for name in told if NAME.fullmatch(name)} - names == others
