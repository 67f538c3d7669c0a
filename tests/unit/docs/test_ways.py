"""The ways of docs/architecture.md: what they name is there, and a wrong step is found."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import aiordma
from tests.device import ways
from tests.device.ways import OF_ALL, WAYS, WHOLE, differences, files_of_all, of_page

LIBRARY = Path(aiordma.__file__).parent


def _functions(path: Path) -> set[str]:
    """The functions that a file defines, by qualified names."""
    text = path.read_text()
    if path.suffix == ".c":
        return set(re.findall(r"^\w[\w *]*?(\w+)\([^;{]*\)\n\{", text, re.MULTILINE))
    found = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{prefix}{node.name}")

    collect(ast.parse(text).body, "")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_each_step_is_a_function_of_its_file(way: str) -> None:
    for file, function in of_page(way):
        assert function in _functions(LIBRARY / file), f"{WAYS[way]}: {file}: {function}"


def test_each_file_of_every_object_is_there() -> None:
    missing = [name for name in files_of_all() if not (LIBRARY / name).exists()]
    assert not missing, f"{OF_ALL!r} names {missing}"


@pytest.mark.parametrize("way", WAYS)
def test_a_way_as_the_page_has_it(way: str) -> None:
    assert differences(way, of_page(way)) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_step_too_much_is_found(way: str) -> None:
    first, *rest = of_page(way)
    assert any("not entered" in each and first[1] in each for each in differences(way, rest))


@pytest.mark.parametrize("way", WAYS)
def test_another_order_is_found(way: str) -> None:
    first, second, *rest = of_page(way)
    assert differences(way, [second, first, *rest]) == [
        f"{first[0]}: {first[1]} stands where {second[0]}: {second[1]} is entered"
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_the_page_lacks_is_found(way: str) -> None:
    entries = [*of_page(way), ("datagram/port.py", "DatagramPort.open")]
    assert differences(way, entries) == ["not on the page: datagram/port.py"]
    of_all = [*of_page(way), ("loop/running.py", "running_loop")]
    assert bool(differences(way, of_all)) is (way in WHOLE)


def test_headers_are_no_files_of_a_way() -> None:
    entries = [("_core/core.h", "aio_x"), ("_core/drain.c", "Py_INCREF"), ("_core/drain.c", "take")]
    assert ways.own(entries) == [("_core/drain.c", "take")]
