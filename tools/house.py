"""Figures of the structure, each with a bound: ``tools/house.py`` prints them.

The linter runs it.  A figure above its bound fails; a bound is lowered when a figure falls, and not
raised again, so that the structure does not get worse between two redesigns.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "aiordma"
#: Folders that are programs beside the library.
PROGRAMS = ("cli", "testing")


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: What is counted.
        value: Today.
        bound: The most that the linter takes.
        goal: What the design asks for.
        where: Where the value comes from.
    """

    name: str
    value: int
    bound: int
    goal: int
    where: str = ""


@dataclass
class Class:
    """A class as its source has it."""

    bases: list[str]
    attributes: set[str] = field(default_factory=set)


def library(suffix: str) -> Iterator[Path]:
    """The files of the library itself."""
    for path in sorted((ROOT / LIBRARY).rglob(f"*{suffix}")):
        parts = path.relative_to(ROOT / LIBRARY).parts
        if parts[0] not in PROGRAMS and path.name not in ("_rdma.c", "_rdma.pyi"):
            yield path


def lines() -> int:
    """Lines of Python and C."""
    return sum(
        path.read_bytes().count(b"\n") for suffix in (".py", ".c", ".h") for path in library(suffix)
    )


def files_in(folder: str) -> int:
    """Files of Python in a folder of the library."""
    return len(list((ROOT / LIBRARY / folder).glob("*.py")))


def ends_of_callbacks() -> dict[str, int]:
    """How many callbacks a file overwrites with the stand-in at the end of an object."""
    found = {}
    for path in library(".py"):
        matches = re.findall(r"^\s+((?:[\w.]+ = )+)nobody$", path.read_text(), re.MULTILINE)
        if count := sum(match.count("=") for match in matches):
            found[str(path.relative_to(ROOT))] = count
    return found


def _own_attributes(node: ast.ClassDef) -> set[str]:
    found: set[str] = set()
    for item in ast.walk(node):
        target: ast.expr | None = None
        if isinstance(item, ast.Assign):
            for each in item.targets:
                found |= set(_on_self(each))
                if isinstance(each, ast.Name) and each.id == "__slots__":
                    found |= set(_strings(item.value))
            continue
        if isinstance(item, ast.AnnAssign | ast.AugAssign):
            target = item.target
            found |= set(_on_self(target))
    return {name for name in found if not name.startswith("__")}


def _on_self(target: ast.expr) -> Iterator[str]:
    for each in ast.walk(target):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        ):
            yield each.attr


def _strings(value: ast.expr) -> Iterator[str]:
    for each in ast.walk(value):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def attributes() -> list[tuple[int, str]]:
    """Attributes of each class with those of its bases in the library, the most first."""
    classes: dict[str, Class] = {}
    for path in library(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases]
                classes[node.name] = Class(bases, _own_attributes(node))

    def all_of(name: str) -> set[str]:
        found = set(classes[name].attributes)
        for base in classes[name].bases:
            if base in classes and base != name:
                found |= all_of(base)
        return found

    return sorted(((len(all_of(name)), name) for name in classes), reverse=True)


def circles() -> list[list[str]]:
    """Groups of files of a folder that import one another when they are loaded."""
    graph: dict[str, set[str]] = defaultdict(set)
    for path in library(".py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                graph[name].add(node.module)
                graph[name] |= {f"{node.module}.{each.name}" for each in node.names}
    names = set(graph)
    found, done = [], set()
    for name in sorted(names):
        if name in done:
            continue
        group = {name} | (_reached(name, graph) & {n for n in names if name in _reached(n, graph)})
        done |= group
        if len(group) > 1:
            found.append(sorted(group))
    return found


def _reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for each in graph.get(todo.pop(), ()):
            if each in graph and each not in seen:
                seen.add(each)
                todo.append(each)
    return seen


def figures() -> list[Figure]:
    """All of them."""
    ends = ends_of_callbacks()
    most, largest = attributes()[0]
    rings = circles()
    return [
        Figure("lines of the library", lines(), 39_100, 27_000),
        Figure("files in endpoint/", files_in("endpoint"), 24, 15),
        Figure("files in streams/", files_in("streams"), 19, 15),
        Figure("most attributes of a class", most, 47, 20, largest),
        Figure("callbacks overwritten at the end", sum(ends.values()), 31, 5, ", ".join(ends)),
        Figure("circles of imports", len(rings), 0, 0, "; ".join(map(" ".join, rings))),
    ]


def main() -> int:
    """Print the figures; 1 if one of them is above its bound."""
    failed = False
    for figure in figures():
        bad = figure.value > figure.bound
        failed |= bad
        mark = "FAIL" if bad else "ok  "
        print(f"{mark} {figure.name}: {figure.value:,} (bound {figure.bound:,}, "
              f"goal {figure.goal:,}) {figure.where}")  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
