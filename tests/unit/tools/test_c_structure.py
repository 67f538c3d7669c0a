"""The check of the structure of C finds what it is for, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
NONE: frozenset[str] = frozenset()
HEADER = """
static inline int shared(int a) { return a + 1; }
int first(int a);
int second(int a);
"""
FIRST = """
#include "both.h"
static int add(int a) { return shared(a); }
int first(int a) { return a ? second(add(a)) : 0; }
"""
SECOND = """
#include "both.h"
int second(int a) { return shared(a); }
"""


@pytest.fixture
def c_structure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, "c_structure", raising=False)
    return __import__("c_structure")


def write(folder: Path, **files: str) -> Path:
    (folder / "both.h").write_text(HEADER)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_files_in_order(c_structure: ModuleType, tmp_path: Path) -> None:
    folder = write(tmp_path, first_c=FIRST, second_c=SECOND)
    assert c_structure.problems(folder, NONE, NONE) == []


def test_a_static_function_has_the_name_of_another_one(
    c_structure: ModuleType, tmp_path: Path
) -> None:
    other = SECOND + "static int add(int a) { return a; }\nint third(void) { return add(1); }\n"
    folder = write(tmp_path, first_c=FIRST, second_c=other)
    assert c_structure.problems(folder, NONE, NONE) == [
        "add is a function of first.c and of second.c"
    ]
    assert c_structure.problems(folder, frozenset({"second.c"}), NONE) == []


def test_files_that_call_one_another(c_structure: ModuleType, tmp_path: Path) -> None:
    folder = write(
        tmp_path, first_c=FIRST, second_c=SECOND.replace("return shared", "return first")
    )
    assert c_structure.problems(folder, NONE, NONE) == [
        "first.c second.c: they call or include one another in a circle"
    ]
    assert c_structure.problems(folder, NONE, frozenset({"first.c", "second.c"})) == []


def test_a_function_that_was_given(c_structure: ModuleType, tmp_path: Path) -> None:
    given = SECOND + "int (*given)(int) = first;\nint third(int a) { return given(a); }\n"
    folder = write(tmp_path, first_c=FIRST, second_c=given)
    assert c_structure.problems(folder, NONE, NONE) == []


def test_headers_that_include_one_another(c_structure: ModuleType, tmp_path: Path) -> None:
    folder = write(tmp_path, first_c=FIRST, second_c=SECOND)
    (folder / "one.h").write_text('#pragma once\n#include "two.h"\n')
    (folder / "two.h").write_text('#pragma once\n#include "one.h"\n')
    assert c_structure.problems(folder, NONE, NONE) == [
        "one.h two.h: they call or include one another in a circle"
    ]


def test_a_file_that_is_finished_leaves_its_list(c_structure: ModuleType, tmp_path: Path) -> None:
    folder = write(tmp_path, first_c=FIRST, second_c=SECOND)
    finished = "first.c is finished: take it out of the list in tools/c_structure.py"
    assert c_structure.problems(folder, frozenset({"first.c"}), NONE) == [finished]
    assert c_structure.problems(folder, NONE, frozenset({"first.c"})) == [finished]
