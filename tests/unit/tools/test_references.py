"""The check of the references in comments and pages finds what it is for, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
FILES = [Path(name) for name in ("aiordma/loop/pump.py", "aiordma/_core/drain.c", "docs/limits.md")]
C = 'int aio_drain(void) { return say("aio_said /* aio_told */"); } /* aio_gone */'


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, "references", raising=False)
    return __import__("references")


def test_names_of_c_are_words_of_its_code(references: ModuleType) -> None:
    assert references.names_of_c([C]) == {"aio_drain"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see pump.py, loop/pump.py and aiordma/loop/pump.py (drain.c)", []),
        ("see pomp.py", ["pomp.py"]),
        ("see verbs/pump.py", ["verbs/pump.py"]),
        ("docs/limits.md and docs/gone.md", ["docs/gone.md"]),
        ("<infiniband/driver.h>, *.py, test_{name}.py and verbs.h", []),
        ("aio_drain calls aio_gone", ["aio_gone"]),
    ],
)
def test_references(references: ModuleType, text: str, found: list[str]) -> None:
    dead = references.dead([(Path("a.py"), f"\n{text}\n")], FILES, {"aio_drain"})
    assert list(dead) == [f"a.py:2: no {name}" for name in found]


def test_nothing_of_the_repository_leads_nowhere(references: ModuleType) -> None:
    assert references.problems() == []
