"""Every public name says what a caller has to know.

The rules are checked on the source, so that a new function cannot forget them:

- a docstring on every public class, function, method and property;
- every parameter is named in the function's docstring or in its class's;
- what raises says so; a coroutine says what a cancellation does;
- what calls the C libraries directly names the man page, itself or in its class.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

PACKAGES = (
    "aiordma", "aiordma.cm", "aiordma.memory", "aiordma.metrics", "aiordma.verbs", "aiordma.errors",
)  # fmt: skip
_OPERATORS = frozenset(
    {
        "__aiter__", "__anext__", "__aenter__", "__aexit__", "__enter__", "__exit__", "__len__",
        "__bytes__", "__contains__", "__eq__", "__hash__", "__repr__", "__str__", "__bool__",
        "__iter__", "__buffer__", "__release_buffer__", "__getitem__", "__init__", "__await__",
        "__del__",
        "__post_init__", "__getattr__", "__getnewargs__", "__getstate__", "__new__", "__replace__",
        "__reduce_ex__",  # refuses a copy and a pickle
        "__subclasshook__",  # of every Protocol
        "__annotate_func__", "__annotate__",  # the annotations of a class, since Python 3.14
    }
)  # fmt: skip


_REFERENCE = Path(__file__).parents[2] / "docs/api"


def public_names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            found[f"{thing.__module__}.{thing.__qualname__}"] = thing
    # Types of results have no name in a package, and are in the reference all the same.
    pages = "".join(page.read_text() for page in sorted(_REFERENCE.glob("*.md")))
    for path in re.findall(r"^\.\. autoclass:: (aiordma\.[\w.]+)$", pages, re.M):
        module, _, name = path.rpartition(".")
        if not path.startswith(("aiordma.contrib", "aiordma.testing", "aiordma.endpoint.connect")):
            thing = getattr(importlib.import_module(module), name)
            found.setdefault(f"{thing.__module__}.{thing.__qualname__}", thing)
    return found


def callables() -> Iterator[tuple[str, Any, type | None]]:
    """(path, function, class) of everything that a program can call."""
    for path, thing in public_names().items():
        if not inspect.isclass(thing):
            yield path, thing, None
            continue
        for base in thing.__mro__:
            if not base.__module__.startswith("aiordma"):
                continue
            for name, member in vars(base).items():
                if name.startswith("_"):
                    continue
                if isinstance(member, property):
                    member = member.fget
                elif isinstance(member, classmethod | staticmethod):
                    member = member.__func__
                if inspect.isfunction(member):
                    yield f"{path}.{name}", member, thing


NAMES = public_names()
CALLABLES = {path: (function, owner) for path, function, owner in callables()}


def text_of(function: Any, owner: type | None) -> str:
    """Its docstring and its class's."""
    return f"{inspect.getdoc(function) or ''}\n{inspect.getdoc(owner) if owner else ''}"


def source_of(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


@pytest.mark.parametrize("path", NAMES)
def test_a_docstring(path: str) -> None:
    assert NAMES[path].__doc__, path


@pytest.mark.parametrize("path", CALLABLES)
def test_a_docstring_with_all_parameters(path: str) -> None:
    function, owner = CALLABLES[path]
    assert inspect.getdoc(function), path
    text = text_of(function, owner)
    for name in inspect.signature(function).parameters:
        if name not in {"self", "cls"} and not name.startswith("_"):
            assert re.search(rf"\b{re.escape(name)}\b", text), f"{path}: nothing about {name}"


@pytest.mark.parametrize("path", CALLABLES)
def test_what_raises_says_so(path: str) -> None:
    function, owner = CALLABLES[path]
    raises = any(
        (isinstance(node, ast.Raise) and node.exc is not None)
        or (isinstance(node, ast.Call) and "check_" in ast.unparse(node.func))
        for node in ast.walk(source_of(function))
    )
    if raises:
        assert re.search(r"[Rr]aise", text_of(function, owner)), path


@pytest.mark.parametrize("path", CALLABLES)
def test_a_coroutine_says_what_a_cancellation_does(path: str) -> None:
    function, _ = CALLABLES[path]
    if inspect.iscoroutinefunction(function):
        assert re.search(r"[Cc]ancel", inspect.getdoc(function) or ""), path


@pytest.mark.parametrize("path", CALLABLES)
def test_a_c_call_names_its_man_page(path: str) -> None:
    function, owner = CALLABLES[path]
    calls = re.findall(r"\blib\.(?:ibv|rdma)_\w+", inspect.getsource(function))
    if calls:
        assert re.search(r"\w+\(3\)", text_of(function, owner)), f"{path}: {calls}"


def sections(function: Any) -> dict[str, list[str]]:
    """The lines of `Returns:` and `Raises:`, as Sphinx takes them."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (inspect.getdoc(function) or "").splitlines():
        if line and not line.startswith(" "):
            lines = found.setdefault(line.rstrip(":"), []) if line.endswith(":") else []
        elif line:
            lines.append(line.removeprefix("    "))
    return found


@pytest.mark.parametrize("path", CALLABLES)
def test_sphinx_does_not_cut_a_docstring_at_a_colon(path: str) -> None:
    """What stands before the first colon becomes a type, or the name of an exception."""
    function, owner = CALLABLES[path]
    if owner is not None and isinstance(getattr(owner, path.rpartition(".")[2], None), property):
        first = (inspect.getdoc(function) or "").partition("\n")[0]
        assert ":" not in first, f"{path}: {first}"
    found = sections(function)
    for line in found.get("Returns", [])[:1]:
        assert ":" not in line, f"{path}: {line}"
    for line in found.get("Raises", []):
        text = line
        if not line.startswith(" "):
            names, _, text = line.partition(": ")
            assert re.fullmatch(r"[\w.]+(, [\w.]+)*", names), f"{path}: {line}"
        assert not re.search(r"(Error|Exception)`?: ", text), f"{path}: one line each: {line}"


def test_operators_are_the_known_ones() -> None:
    """A new operator has to be looked at: most need words of their own."""
    for path, thing in NAMES.items():
        if inspect.isclass(thing) and not issubclass(thing, Enum | Exception):
            for base in thing.__mro__:
                if base.__module__.startswith("aiordma") and "__dataclass_fields__" not in vars(
                    base
                ):
                    operators = {n for n, m in vars(base).items() if inspect.isfunction(m)}
                    unknown = {n for n in operators if n.startswith("__")} - _OPERATORS
                    assert not unknown, f"{path}: {unknown}"
