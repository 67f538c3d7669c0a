"""The check of the words in comments and docstrings finds what it is for, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
FILES = [
    "aiordma/__init__.py",
    "aiordma/errors.py",
    "aiordma/loop/__init__.py",
    "aiordma/loop/pump.py",
    "aiordma/_ffi/glue.c",
    "aiordma/_ffi/glue.cdef.h",
    "docs/limits.md",
]
PYTHON = '''"""`Deleted` and `Pump` in loop/pump.py."""
from asyncio import Protocol


class Base(Protocol):
    def drain(self): ...


class Pump(Base):
    """A pump."""

    __slots__ = ("_owner",)

    def kick(self):
        self.kicked = True


class Foreign(SomethingElse):
    pass
'''
C = 'int aio_drain(void) { return say("aio_said // no comment"); } /* aio_gone */'


@pytest.fixture(scope="module")
def words() -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location("words", TOOLS / "words.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # A dataclass looks for its module here.
        sys.modules["words"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TOOLS))
    return module


def test_texts_of_python(words: ModuleType) -> None:
    source = (
        '"""Head.\n\nMore."""\n'
        "x = 1  # beside\n"
        "# first\n"
        "# second\n"
        "\n"
        "#: third\n"
        "def f() -> str:\n"
        '    """Doc."""\n'
        '    return "# no comment"\n'
    )
    assert sorted(words.texts(source, ".py")) == [
        (1, "Head.\n\nMore."),
        (4, "beside"),
        (5, "first\nsecond"),
        (8, "third"),
        (10, "Doc."),
    ]


def test_texts_of_c(words: ModuleType) -> None:
    source = '/*\n * One\n * two.\n */\nchar c = \'"\', *s = "/* no */"; // three\n'
    assert words.texts(source, ".c") == [(1, "\nOne\ntwo.\n"), (5, "three")]


@pytest.fixture(scope="module")
def known(words: ModuleType) -> Any:
    sources = {Path("aiordma/loop/pump.py"): PYTHON, Path("aiordma/_ffi/glue.c"): C}
    return words.Known(sources, [Path(name) for name in FILES])


@pytest.mark.parametrize(
    "text",
    [
        "loop/pump.py, `pump.py`, _ffi/glue.c, `glue.cdef.h`, docs/limits.md, aiordma/errors.py",
        "<rdma/rdma_cma.h>, /proc/self/x.c, tests/*.toml, x.python",
        "`Pump`, `Pump.kick()`, `Pump._owner`, `Pump.kicked`, `Pump.drain`, `Foreign.drain`",
        "`aio_drain`, aio_drain(x), `aio_said`",
        "`loop.pump`, `aiordma.loop.pump`, `loop.call_soon(f, *args)`, `asyncio.timeout`, `None`",
        "`self.kicked`, `len(x)`, `a + b`, `mlx5_0`, ``Pump``",
    ],
)
def test_references_that_exist(known: Any, text: str) -> None:
    assert not list(known.stale(text))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("see loop/lane.py", "loop/lane.py"),
        ("(`lane.py`)", "lane.py"),
        ("docs/limit.md.", "docs/limit.md"),
        ("other/pump.py", "other/pump.py"),
        ("`Deleted` is named in a docstring only", "Deleted"),
        ("by aio_gone", "aio_gone"),
        ("`Pump.kick_off()`", "Pump.kick_off"),
        ("`Pump.say`", "Pump.say"),
        ("`loop.glue`", "loop.glue"),
    ],
)
def test_references_that_are_stale(known: Any, text: str, name: str) -> None:
    assert list(known.stale(f"\n{text}")) == [(1, name)]


def test_a_stale_reference_is_told_with_its_line(words: ModuleType) -> None:
    sources = {Path("aiordma/errors.py"): "# fine\n\n# and\n# see loop/lane.py\n"}
    found = words.stale(sources, [Path("aiordma/errors.py")])
    assert found == ["aiordma/errors.py:4: no loop/lane.py"]
