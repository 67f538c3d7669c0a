"""The references of comments, docstrings and pages: ``tools/references.py`` prints the dead ones.

A file that is named has to exist, and so has a name that begins as those of `_core` do (`aio_`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from checks import ROOT, repository_files

#: Where a reader goes by them.
READ = (
    "aiordma/", "docs/adr/", "docs/architecture.md", "docs/contributing/", "softroce/src/",
    "CONTRIBUTING.md",
)  # fmt: skip
_SUFFIXES = (".py", ".pyi", ".c", ".h", ".md")
#: A file that a text names: not a pattern, nor one of another package, in pointed brackets.
_FILE = re.compile(r"(?<![\w/.<~$*{}-])(?:[\w-]+/)*[\w-]+\.(?:pyi?|c|cdef\.h|h|md)\b(?![\w/(])")
_NAME = re.compile(r"\baio_\w+")
_COMMENT = re.compile(r"/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
#: Files of Python, libibverbs and the kernel.
OTHERS = frozenset({"Python.h", "arch/x86/um/user-offsets.c", "user-offsets.c", "verbs.h"})


def dead(texts: Iterable[tuple[Path, str]], files: list[Path], known: set[str]) -> Iterator[str]:
    """Each reference that leads nowhere, and its place.

    Args:
        texts: Files that are read, with their paths.
        files: The paths of all files.
        known: The names of C.
    """
    tails = {"/".join(path.parts[n:]) for path in files for n in range(len(path.parts))} | OTHERS
    for path, text in texts:
        for number, line in enumerate(text.splitlines(), 1):
            names = {each for each in _FILE.findall(line) if each not in tails}
            names.update(each for each in _NAME.findall(line) if each not in known)
            yield from (f"{path}:{number}: no {name}" for name in sorted(names))


def names_of_c(sources: Iterable[str]) -> set[str]:
    """The words of C that begin as the names of `_core` do, outside of comments."""
    return {name for source in sources for name in _NAME.findall(_COMMENT.sub("", source))}


def problems() -> list[str]:
    """What the linter refuses."""
    files = repository_files()
    read = [path for path in files if path.as_posix().startswith(READ)]
    texts = [(path, (ROOT / path).read_text()) for path in read if path.suffix in _SUFFIXES]
    known = names_of_c(text for path, text in texts if path.suffix in (".c", ".h"))
    return list(dead(texts, files, known))


def main() -> int:
    """Print them; 1 if there are any."""
    found = problems()
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
