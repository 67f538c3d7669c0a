"""The references of comments and docstrings: ``tools/words.py`` prints those that lead nowhere.

The linter runs it.  A file that is named, and a name in backticks, must exist.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import io
import itertools
import keyword
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from checks import ROOT, repository_files

LIBRARY = "aiordma"
PYTHON, C = (".py", ".pyi"), (".c", ".h")
#: Pages whose references to files and names are checked, too.
REFERRING = "docs/adr/"
#: Names of other programs and libraries: comments mention them, and no code here uses them.
OTHERS = frozenset(
    {
        "AsyncConnectionPool", "InterpreterPoolExecutor", "PR_SET_PDEATHSIG", "Py_mod_gil",
        "Python.h", "ServerRunner", "close_notify", "cq_event", "disjoint_base", "exploded",
        "mlx5_0", "print_call_graph", "pstree", "riounmap", "riowrite", "rpoll", "tp_dealloc",
        "uds", "verbs.h",
    }
)  # fmt: skip

_FILE = re.compile(
    r"(?<![\w/.<~$*-])(?:[\w-]+/)*[\w-]+(?:\.cdef)?\.(?:py|pyi|c|h|md|toml)\b(?![\w/(])"
)
_NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`\n]*\))?`|\b(aio_\w+)")
_C_TEXT = re.compile(r"""'(?:\\.|[^\\])'|"(?:\\.|[^"\\\n])*"|/\*(.*?)\*/|//([^\n]*)""", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")


@cache
def texts(source: str, suffix: str) -> list[tuple[int, str]]:
    """The comments and docstrings of a file, each with its first line.

    Comments in lines that follow one another are one text.
    """
    if suffix == ".md":
        return [(1, source)]
    if suffix in C:
        return list(_texts_of_c(source))
    return [*_docstrings(source).items(), *_comments(source)]


def _texts_of_c(source: str) -> Iterator[tuple[int, str]]:
    for found in _C_TEXT.finditer(source):
        if (text := found[1] or found[2]) is not None:
            lines = (line.strip().removeprefix("*").strip() for line in text.split("\n"))
            yield source.count("\n", 0, found.start()) + 1, "\n".join(lines)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    lines = list[str]()
    first = 0
    after = 0  # the line that goes on with the comment
    for token in _tokens(source):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            if lines and number != after:
                yield first, "\n".join(lines)
                lines = []
            first = first if lines else number
            lines.append(token.string.lstrip("#:").strip())
            after = 0 if token.line[:column].strip() else number + 1
    if lines:
        yield first, "\n".join(lines)


@cache
def _docstrings(source: str) -> dict[int, str]:
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                found[node.body[0].lineno] = text
    return found


@cache
def _tokens(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


class Known:
    """The files, words and classes of the repository, to which a text may refer.

    Args:
        sources: The text of each file of Python and C, by its path.
        files: The paths of all files.
    """

    def __init__(self, sources: Mapping[Path, str], files: list[Path]) -> None:
        self._tails = {"/".join(path.parts[n:]) for path in files for n in range(len(path.parts))}
        of_loops = dir(asyncio.AbstractEventLoop)
        self._words = {*dir(builtins), *dir(asyncio), *of_loops, *keyword.kwlist, *OTHERS}
        self._words.update(*(_WORD.findall(path.as_posix()) for path in files))
        self._members: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, set[str]] = defaultdict(set)
        # "loop" is in most places asyncio's.
        self._folders: dict[str, set[str]] = defaultdict(set)
        self._folders["loop"].update(of_loops)
        for path, source in sources.items():
            words = set(_words_of_code(source, path.suffix))
            self._words |= words
            if path.parts[0] == LIBRARY:
                self._folders[path.parent.name] |= words if path.stem == "__init__" else {path.stem}
                self._folders[path.parent.parent.name].add(path.parent.name)
                if path.suffix in PYTHON:
                    self._take_classes(source)

    def _take_classes(self, source: str) -> None:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                self._members[node.name].update(_names(node))
                self._bases[node.name].update(_WORD.findall(" ".join(map(ast.unparse, node.bases))))

    def stale(self, text: str) -> Iterator[tuple[int, str]]:
        """Each reference that leads nowhere, with the number of lines in front of it."""
        for found in _FILE.finditer(text):
            if found[0] not in self._tails and found[0] not in OTHERS:
                yield text.count("\n", 0, found.start()), found[0]
        for found in _NAME.finditer(text):
            name = found[1] or found[2]
            if not _FILE.fullmatch(name) and not self._exists(name):
                yield text.count("\n", 0, found.start()), name

    def _exists(self, name: str) -> bool:
        """Whether each part of a name is a word of the code, and is where the part before it says.

        The part before it may be a class of the library or a folder.
        """
        parts = name.removeprefix(f"{LIBRARY}.").split(".")
        if not self._words.issuperset(parts):
            return False
        for owner, part in itertools.pairwise(parts):
            if owner in self._members and not self._has_member(owner, part, set()):
                return False
        folder = self._folders.get(parts[0])
        return folder is None or len(parts) == 1 or parts[1] in folder

    def _has_member(self, name: str, member: str, seen: set[str]) -> bool:
        if name in seen or name in ("object", "Protocol", "Generic", "Any"):
            return False
        seen.add(name)
        if name not in self._members:
            return True  # it has a base from elsewhere, of which nothing is known
        return member in self._members[name] or any(
            self._has_member(base, member, seen) for base in self._bases[name]
        )


def _names(node: ast.ClassDef) -> Iterator[str]:
    """The names in a class, with those of its slots."""
    for each in ast.walk(node):
        for key in ("name", "attr", "id", "value"):
            if isinstance(name := getattr(each, key, None), str):
                yield name


def _words_of_code(source: str, suffix: str) -> Iterator[str]:
    """The words of a file without its comments and docstrings."""
    if suffix in C:
        yield from _WORD.findall(
            _C_TEXT.sub(lambda found: " " if found[0][0] == "/" else found[0], source)
        )
        return
    docstrings = _docstrings(source)
    for token in _tokens(source):
        of_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type != tokenize.COMMENT and not of_docstring:
            yield from _WORD.findall(token.string)


def stale(sources: Mapping[Path, str], files: list[Path]) -> list[str]:
    """The references of comments, docstrings and pages that lead nowhere."""
    code = {path: source for path, source in sources.items() if path.suffix != ".md"}
    known = Known(code, files)
    return [
        f"{path}:{line + offset}: no {name}"
        for path, source in sources.items()
        for line, text in texts(source, path.suffix)
        for offset, name in known.stale(text)
    ]


def read() -> tuple[dict[Path, str], list[Path]]:
    """The text of each file that is checked, and the paths of all files."""
    files = repository_files()
    sources = {
        path: (ROOT / path).read_text()
        for path in files
        if path.suffix in (*PYTHON, *C) or path.as_posix().startswith(REFERRING)
    }
    return sources, files


def problems() -> list[str]:
    """What the linter refuses."""
    return stale(*read())


def main() -> int:
    """Print the stale references."""
    found = problems()
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
