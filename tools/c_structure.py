"""The structure of ``aiordma/_core``: ``tools/c_structure.py`` prints what the linter refuses.

Two rules that no compiler checks:

- The name of a function is unique in the folder, also if the function is static, so that one search
  finds it.
- The files of the folder can be put in an order in which each calls, and includes, only files
  before it.  A call by a pointer does not count: the caller does not know the other file.

gcc says who calls whom (-fcallgraph-info), before it inlines anything.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

from checks import ROOT, call

CORE = ROOT / "aiordma" / "_core"
#: Files whose functions may still have the name of another file's function: to become empty.
NAMES_NOT_YET_UNIQUE: frozenset[str] = frozenset()
#: The files that still call one another in a circle: to become empty.
CIRCLE_NOT_YET_BROKEN: frozenset[str] = frozenset()

#: A function, with its file, and a call, with the file of the caller.  Files of other folders, such
#: as the headers of Python, have a slash.
_NODE = re.compile(r'node: \{ title: "([^"]+)" label: "(\w+)\\n([\w.]+):\d+:\d+[^"]*" \}')
_EDGE = re.compile(r'targetname: "([^"]+)" label: "([\w.]+):\d+:\d+"')
_INCLUDE = re.compile(r'^#include "(\w+\.h)"', re.MULTILINE)

Graph = dict[str, set[str]]


def call_graphs(folder: Path) -> list[str]:
    """What gcc says about each C file of a folder."""
    include = f"-isystem{sysconfig.get_path('include')}"
    options = ("-std=gnu11", "-w", "-DPy_LIMITED_API=0x030B0000", include, "-fcallgraph-info", "-c")
    with tempfile.TemporaryDirectory() as objects:
        for path in folder.glob("*.c"):
            call("gcc", *options, path.name, "-o", f"{objects}/{path.stem}.o", cwd=folder)
        return [path.read_text() for path in sorted(Path(objects).glob("*.ci"))]


def read(texts: list[str]) -> tuple[Graph, Graph]:
    """The files that define a function of a name, and the files whose functions a file calls."""
    functions = [node for text in texts for node in _NODE.findall(text)]
    places = {title: place for title, _, place in functions}
    files: Graph = defaultdict(set)
    for _, name, place in functions:
        files[name].add(place)
    calls: Graph = defaultdict(set)
    for text in texts:
        for target, caller in _EDGE.findall(text):
            if target in places:
                calls[caller].add(places[target])
    return files, calls


def includes(folder: Path) -> Graph:
    """The headers of a folder that its files include."""
    return {path.name: set(_INCLUDE.findall(path.read_text())) for path in folder.glob("*.[ch]")}


def circles(graph: Graph) -> list[list[str]]:
    """The groups of files of which each one leads to each other one."""
    reached = {name: _reached(name, graph) for name in graph}
    groups = {frozenset(n for n in reached[name] if name in reached.get(n, ())) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(start: str, graph: Graph) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = graph.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def problems(
    folder: Path = CORE,
    names_open: frozenset[str] = NAMES_NOT_YET_UNIQUE,
    circle_open: frozenset[str] = CIRCLE_NOT_YET_BROKEN,
) -> list[str]:
    """What the linter refuses."""
    files, calls = read(call_graphs(folder))
    twice = {name: places for name, places in files.items() if len(places) > 1}
    groups = circles(calls) + circles(includes(folder))
    return [
        *(
            f"{name} is a function of {' and of '.join(sorted(places))}"
            for name, places in sorted(twice.items())
            if not places & names_open
        ),
        *(
            f"{' '.join(group)}: they call or include one another in a circle"
            for group in groups
            if not circle_open.issuperset(group)
        ),
        *(
            f"{name} is finished: take it out of the list in tools/c_structure.py"
            for name in sorted(
                names_open.difference(*twice.values()) | circle_open.difference(*groups)
            )
        ),
    ]


def main() -> int:
    """Print the problems."""
    found = problems()
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
