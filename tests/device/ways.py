"""The ways of docs/architecture.md, and those that the running library takes.

The library runs in a copy whose `_core` is compiled with a call at the entry of each function
(entries.c); walking.py is the client that notes them, with Python's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import aiordma

#: (file below aiordma/, function)
Entry = tuple[str, str]

HERE = Path(__file__).parent
LIBRARY = Path(aiordma.__file__).parent
LIMIT_S = 120.0
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"

#: Headings of the page.  Of the first four each file that is entered is named, and no other.
WAYS = {
    "send": "A byte is sent",
    "receive": "A byte is received",
    "write": "A byte is written to a stream",
    "read": "A byte is read from a stream",
    "connect": "A connect",
    "close": "A close",
}
WHOLE = ("send", "receive", "write", "read")
OF_ALL = "On every path"
_STEP = re.compile(r"`([\w/]+\.(?:py|c)): ([\w.]+)`")
_FILE = re.compile(r"`([\w/]+(?:/|\.py|\.c))`")


def traced_copy(folder: Path) -> Path:
    """Make a package in `folder` that is the library, with a `_core` that notes its entries.

    Returns:
        The compiled module.
    """
    package = folder / LIBRARY.name
    core = package / "_core"
    core.mkdir(parents=True)
    for each in LIBRARY.iterdir():
        if each.name not in ("_core", "__pycache__"):
            (package / each.name).symlink_to(each)
    (core / "__init__.py").symlink_to(LIBRARY / "_core" / "__init__.py")
    module = core / "_compiled.abi3.so"
    sources = sorted(str(path) for path in (LIBRARY / "_core").glob("*.c"))
    subprocess.run(
        [
            *("gcc", "-shared", "-fPIC", "-O0", "-g", "-std=gnu11", "-fvisibility=hidden"),
            *("-finstrument-functions", "-DPy_LIMITED_API=0x030B0000"),
            *(f"-I{sysconfig.get_path(kind)}" for kind in ("include", "platinclude")),
            *(str(HERE / "entries.c"), *sources, "-o", str(module), "-lrdmacm", "-libverbs"),
        ],
        check=True,
        timeout=LIMIT_S,
    )
    return module


def _named(module: Path, addresses: list[int]) -> dict[int, Entry]:
    """File and function of addresses in the compiled module."""
    done = subprocess.run(
        ["addr2line", "-f", "-e", str(module), *map(hex, addresses)],
        check=True, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    found = {}
    for address, function, place in zip(addresses, lines[::2], lines[1::2], strict=True):
        file = Path(place.split(":")[0])
        found[address] = (f"_core/{file.name}", function)
    return found


def walk(module: Path, kind: str, address: str, port: int) -> dict[str, list[Entry]]:
    """Run the client, and return the entries of each way in order."""
    program = [str(HERE / "walking.py"), kind, address, str(port), str(module)]
    done = subprocess.run(
        [sys.executable, "-P", *program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(module.parents[2])},
    )
    ways: dict[str, list[list[str] | int]] = json.loads(done.stdout)
    addresses = sorted({each for way in ways.values() for each in way if isinstance(each, int)})
    named = _named(module, addresses)
    return {
        name: own([named[each] if isinstance(each, int) else (each[0], each[1]) for each in way])
        for name, way in ways.items()
    }


def own(entries: list[Entry]) -> list[Entry]:
    """Without what headers of Python and of verbs define, which is compiled into each file."""
    return [
        (file, function)
        for file, function in entries
        if not file.endswith(".h") and not function.lstrip("_").startswith(("Py", "ibv_"))
    ]


def _section(heading: str) -> str:
    text = PAGE.read_text()
    found = re.search(rf"^### {heading}\n(.*?)^##", text, re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE.name} has no section {heading!r}"
    return found[1]


def of_page(way: str) -> list[Entry]:
    """The steps that the page has for a way."""
    return [(file, function) for file, function in _STEP.findall(_section(WAYS[way]))]


def files_of_all() -> list[str]:
    """The files and folders that the page has for every object."""
    return _FILE.findall(_section(OF_ALL))


def differences(way: str, entries: list[Entry]) -> list[str]:
    """What the page says about a way that is not so, one sentence each."""
    page = of_page(way)
    assert page, f"no steps for {way!r}"
    found = [f"not entered: {': '.join(entry)}" for entry in page if entry not in entries]
    there = [entry for entry in page if entry in entries]
    order = sorted(there, key=entries.index)
    found += [
        f"{': '.join(said)} stands where {': '.join(real)} is entered"
        for said, real in zip(there, order, strict=True)
        if said != real
    ][:1]
    named = {file for file, _ in page}
    if way == "close":
        named |= {file for file, _ in of_page("connect")}
    if way not in WHOLE:
        named.update(files_of_all())
    found += [
        f"not on the page: {file}"
        for file in dict.fromkeys(file for file, _ in entries)
        if file not in named and f"{file.rpartition('/')[0]}/" not in named
    ]
    return found


def told(entries: list[Entry]) -> str:
    """A way as the page has it, for the message of a test that fails."""
    return "\n".join(f"`{file}: {function}`" for file, function in entries)
