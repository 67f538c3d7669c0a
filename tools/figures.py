"""The size of the project: ``tools/figures.py`` prints it.

Nothing fails: a figure that steers is met where it is counted.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections import Counter
from pathlib import Path

from checks import ROOT, repository_files

#: Folders of `aiordma` that are programs beside the library.
PROGRAMS = ("aiordma/cli/", "aiordma/testing/")
CODE = (".py", ".c", ".h")


def lines(paths: list[Path]) -> int:
    """Lines of files."""
    return sum((ROOT / path).read_bytes().count(b"\n") for path in paths)


def files_of_a_byte() -> list[str]:
    """The files that the architecture names for the way of a message, from send() to recv()."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    sections = [
        page.split(f"\n### A byte is {way}\n")[1].split("\n##")[0] for way in ("sent", "received")
    ]
    return sorted(set(re.findall(r"`([\w/]+\.(?:py|c)): [\w.]+`", "".join(sections))))


def public_names() -> tuple[int, int, int]:
    """Names at the top of `aiordma`, in its packages with theirs, and fields of configurations."""
    sys.path.insert(0, str(ROOT))
    import aiordma

    values = [getattr(aiordma, name) for name in aiordma.__all__]
    packages = [each.name for each in pkgutil.iter_modules(aiordma.__path__) if each.ispkg]
    found = [
        importlib.import_module(f"aiordma.{name}") for name in packages if not name.startswith("_")
    ]
    below = sum(len(getattr(package, "__all__", ())) for package in found)
    configs = [
        value
        for value in values
        if inspect.isclass(value)
        and dataclasses.is_dataclass(value)
        and value.__name__.endswith("Config")
    ]
    settings = sum(len(dataclasses.fields(config)) for config in configs)
    return len(values), len(values) + below, settings


def main() -> None:
    """Print the figures."""
    code = [path for path in repository_files() if path.suffix in CODE]
    library = [
        path for path in code
        if path.as_posix().startswith("aiordma/") and not path.as_posix().startswith(PROGRAMS)
    ]  # fmt: skip
    tests = [path for path in code if path.parts[0] == "tests"]
    top, names, settings = public_names()
    byte = files_of_a_byte()
    print(f"lines of the library, without cli and testing: {lines(library):,}")
    print(f"lines of its tests: {lines(tests):,}")
    print(f"public names: {names}, {top} of them at the top; settings: {settings}")
    print(f"files that a byte passes: {len(byte)} ({', '.join(byte)})")
    folders = Counter(str(path.parent) for path in library)
    print(
        "files of a folder:", ", ".join(f"{n} in {folder}" for folder, n in sorted(folders.items()))
    )
    longest = sorted(library, key=lambda path: -lines([path]))[:8]
    print("longest files:", ", ".join(f"{path} ({lines([path])})" for path in longest))


if __name__ == "__main__":
    main()
