"""Figures of the structure: ``tools/house.py`` prints them.

The linter runs it.  A figure above its bound fails.  The sizes have no bound: they are printed to
be seen, and a mending is never cut short for them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checks import ROOT, repository_files

LIBRARY = "aiordma"
#: Folders that are programs beside the library.
PROGRAMS = ("cli", "testing")
#: The sections of docs/architecture.md that name each file that a byte of a message passes;
#: tests/device/test_four_ways.py holds them against the running library.
WAYS_OF_A_BYTE = ("A byte is sent", "A byte is received")

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: What is counted.
        value: Today.
        bound: The most that the linter takes; None: it is only printed.
        goal: What the design asks for.
        where: Where the value comes from.
    """

    name: str
    value: int
    bound: int | None
    goal: int
    where: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it is above its bound."""
        return self.bound is not None and self.value > self.bound


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


def lines_of_code() -> int:
    """Lines of Python and C that are neither blank, nor a comment, nor a docstring."""
    return sum(map(_code_of_python, library(".py"))) + sum(
        sum(bool(line.strip()) for line in _COMMENT.sub(_blank, path.read_text()).splitlines())
        for suffix in (".c", ".h")
        for path in library(suffix)
    )


def _blank(comment: re.Match[str]) -> str:
    return "\n" * comment.group().count("\n")


def _code_of_python(path: Path) -> int:
    text = path.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


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
    """Attributes of each class with those of its bases in the library, the most first.

    Those that its code sets: the fields of a dataclass, which is a record of data, do not count.
    """
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


#: The arguments of a call whose first string is the name of a capsule of DLPack.
_OF_DLPACK = r"""\([^;"()]*"dltensor(?:_versioned)?\""""


def function_pointers() -> dict[str, int]:
    """Places where a module gets a function of another one as a number, or makes one of it."""
    found = {}
    for path in (*library(".py"), *library(".c"), *library(".h")):
        text = path.read_text()
        count = len(re.findall(r"(?<!def )\bfunction_address\(", text))
        count += len(re.findall(r"\(\*\)\([^;]*?\)\)\s*\(uintptr_t\)", text))
        # DLPack's capsules, which have data in them, do not count: those of another library, which
        # ctypes asks, and those that a call in C names as the standard does.
        count += len(re.findall(rf"(?<!pythonapi\.)\bPyCapsule_\w+\b(?!{_OF_DLPACK})", text))
        if count:
            found[str(path.relative_to(ROOT))] = count
    return found


_DEFINE = re.compile(r"^#define[ \t]+(\w+)[ \t]+([^/\n]+)", re.MULTILINE)
_ENUM = re.compile(r"\benum\s*\w*\s*\{([^{}]*)\}")
#: A number with a comment that says where it stands once more.
_SAYS_WHERE = re.compile(
    r"^[ \t]*(?:#define[ \t]+\w+|\w+(?::[^=\n]+)?[ \t]*=)[ \t]*[-(\d].*(?:#|/\*).*\b[\w/]+\.[ch]\b",
    re.MULTILINE,
)


def constants_of_c() -> tuple[dict[str, int], list[str]]:
    """The numbers that C gives names, without AIO_; and the names that two files define."""
    values: dict[str, int] = {}
    where: dict[str, set[str]] = defaultdict(set)
    for path in (*library(".h"), *library(".c")):
        if path.name.endswith(".cdef.h"):
            continue  # cffi's: the compiler fills in what other headers say
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        pairs = _DEFINE.findall(text)
        for body in _ENUM.findall(text):
            for item in body.split(","):
                name, _, value = item.partition("=")
                pairs.append((name.strip(), value))
        for name, value in pairs:
            if not name.startswith("AIO_"):
                continue
            where[name].add(path.name)
            value = re.sub(r"\bUINT\d+_C\((\w+)\)", r"\1", value).replace("AIO_", "")
            number = _number(re.sub(r"\b(\d\w*?)[uUlL]+\b", r"\1", value), values)
            if number is not None:
                values[name.removeprefix("AIO_")] = number
    return values, [f"{name} in {', '.join(sorted(w))}" for name, w in where.items() if len(w) > 1]


def _number(text: str, names: dict[str, int]) -> int | None:
    """The value of an expression of numbers and known names."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        parts = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.operator,
                 ast.unaryop, ast.expr_context)  # fmt: skip
        if not all(isinstance(node, parts) for node in ast.walk(tree)):
            return None
        value = eval(compile(tree, "constant", "eval"), {"__builtins__": {}}, names)
    except (SyntaxError, NameError, TypeError, ZeroDivisionError):
        return None
    return value if isinstance(value, int) else None


def constants_twice() -> list[str]:
    """Constants of the data path that stand in two places."""
    values, found = constants_of_c()
    for path in (*library(".py"), *library(".c"), *library(".h")):
        text, name = path.read_text(), path.relative_to(ROOT / LIBRARY)
        if path.suffix != ".py":
            found += [f"{name}: {hit.split()[1]}" for hit in _SAYS_WHERE.findall(text)]
            continue
        hits = {hit.split()[0] for hit in _SAYS_WHERE.findall(text)}
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            own = node.targets[0].id
            # The same name, perhaps without the word for the group, and the same value.
            number, ending = _number(ast.unparse(node.value), {}), "_" + own.lstrip("_")
            if any(f"_{each}".endswith(ending) and values[each] == number for each in values):
                hits.add(own)
        found += [f"{name}: {hit}" for hit in sorted(hits)]
    return found


def files_of_a_byte() -> list[str]:
    """Files that a byte of a message passes, from send() to recv()."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    files: dict[str, None] = {}
    for heading in WAYS_OF_A_BYTE:
        section = page.split(f"\n### {heading}\n")[1].split("\n##")[0]
        files.update(dict.fromkeys(re.findall(r"`([\w/]+\.(?:py|c)): [\w.]+`", section)))
    return list(files)


#: A file that a text names; not one of another package, in pointed brackets.
_NAMED = re.compile(r"(?<![\w<./*}])((?:[\w-]+/)*[\w-]+\.(?:py|c|h))\b(?!\()")


def dead_references() -> list[str]:
    """Where the library names a file of the repository that is not there."""
    known = {f"/{path}" for path in repository_files()} | {"/Python.h"}
    found = []
    for path in (*library(".py"), *library(".c"), *library(".h")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {name}"
                for name in _NAMED.findall(line)
                if not any(each.endswith(f"/{name}") for each in known)
            ]
    return found


def _private(name: object) -> bool:
    return isinstance(name, str) and len(name) > 1 and name[0] == "_" and not name.endswith("__")


def _names_of(tree: ast.AST) -> set[str]:
    """The private names that a file defines: functions, classes, variables, attributes, slots."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found |= set(_on_self(node))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            found |= set(_strings(node.value))
    return {name for name in found if _private(name)}


def private_uses() -> dict[str, int]:
    """How often a file of tests/ uses a private name of aiordma: by a dot, an import, a string.

    A test asks by a function of tests/inside/, which has each of them once and does not count.
    """
    names: set[str] = set()
    for path in (*(ROOT / LIBRARY).rglob("*.py"), *library(".pyi")):
        names |= _names_of(ast.parse(path.read_text()))
    folders = [path.name for path in (ROOT / LIBRARY).iterdir() if path.is_dir()]
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.parent.name == "inside":
            continue
        tree = ast.parse(path.read_text())
        foreign, count = names - _names_of(tree), 0
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                count += node.attr in foreign and ast.unparse(node.value) not in ("self", "os")
            elif isinstance(node, ast.ImportFrom):
                ours = (node.module or "").split(".")[0] == LIBRARY
                count += sum(
                    ours and _private(each.name) for each in node.names if each.name not in folders
                )
            elif isinstance(node, ast.Call):  # monkeypatch.setattr(...), getattr(...)
                words = [each.value for each in node.args if isinstance(each, ast.Constant)]
                count += sum(str(word).split(".")[-1] in foreign for word in words)
        if count:
            found[str(path.relative_to(ROOT))] = count
    return found


def figures() -> list[Figure]:
    """All of them."""
    ends = ends_of_callbacks()
    most, largest = attributes()[0]
    rings = circles()
    pointers = function_pointers()
    twice = constants_twice()
    dead = dead_references()
    passed = files_of_a_byte()
    private = private_uses()
    return [
        Figure("lines of the library", lines(), None, 46_000),
        Figure("lines of code among them", lines_of_code(), None, 30_000),
        Figure("files in endpoint/", files_in("endpoint"), None, 15),
        Figure("files in streams/", files_in("streams"), None, 15),
        Figure("files in verbs/", files_in("verbs"), None, 24),
        Figure("most attributes of a class", most, None, 20, largest),
        Figure("callbacks overwritten at the end", sum(ends.values()), 0, 5, ", ".join(ends)),
        Figure("files that a byte passes", len(passed), 5, 5, ", ".join(passed)),
        Figure(
            "functions handed over as numbers", sum(pointers.values()), 0, 0, ", ".join(pointers)
        ),
        Figure("constants written twice", len(twice), 0, 0, "; ".join(twice)),
        Figure("names of files that are not there", len(dead), 0, 0, "; ".join(dead)),
        Figure("private names in tests", sum(private.values()), 1, 40),
        Figure("circles of imports", len(rings), 0, 0, "; ".join(map(" ".join, rings))),
    ]


def main() -> int:
    """Print the figures; 1 if one of them is above its bound."""
    failed = False
    for figure in figures():
        failed |= figure.is_bad
        mark = "FAIL" if figure.is_bad else "ok  "
        bound = "" if figure.bound is None else f"bound {figure.bound:,}, "
        print(
            f"{mark} {figure.name}: {figure.value:,} ({bound}goal {figure.goal:,}) {figure.where}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
