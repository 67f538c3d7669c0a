"""The public names, and what importing them does not do."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import aiordma
import aiordma.cm
import aiordma.verbs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [aiordma, aiordma.cm, aiordma.verbs], ids=lambda m: m.__name__)
def test_every_public_name_is_there_once_and_documented(module: ModuleType) -> None:
    names = module.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(module, name).__doc__, name


def test_the_modules_of_the_library_itself_are_not_shown() -> None:
    """In a new process, in which no test has imported others."""
    code = (
        "import aiordma\n"
        "shown = {name for name in dir(aiordma) if not name.startswith('_')}\n"
        "assert all(hasattr(aiordma, name) for name in dir(aiordma))\n"
        "print(*sorted(shown - set(aiordma.__all__)))\n"
        "assert not set(aiordma.__all__) - shown\n"
    )
    assert run(code).split() == ["cm", "memory", "streams", "verbs"]


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert aiordma.__version__ == project["version"]


def run(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", code],
        capture_output=True, check=False, cwd=ROOT, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_starts_no_thread_and_opens_no_descriptor() -> None:
    code = (
        # ctypes, or libffi below it, opens a file of its own: where libffi has its trampolines in
        # its own file, it keeps that open from the first callback on.
        "import ctypes, os, threading\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "import aiordma\n"
        "print(threading.active_count(), len(os.listdir('/proc/self/fd')) - before)\n"
    )
    assert run(code) == "1 0"


def test_importing_needs_none_of_the_extras() -> None:
    code = (
        "import sys\n"
        "for name in ('uvloop', 'click', 'rich', 'pytest', 'hypothesis'):\n"
        "    sys.modules[name] = None\n"
        "import aiordma, aiordma.cm, aiordma.verbs\n"
        "print('imported')\n"
    )
    assert run(code) == "imported"


def test_it_works_without_docstrings_and_assertions() -> None:
    assert run("import aiordma; print(aiordma.connect.__name__)", "-OO") == "connect"


def test_where_there_is_no_device_the_answer_is_a_sentence() -> None:
    code = "import aiordma; print(aiordma.is_available(), aiordma.why_unavailable())"
    available, _, reason = run(code).partition(" ")
    assert (available == "True") == (reason == "None")
    assert reason


@pytest.mark.skipif(sys.version_info < (3, 15), reason="lazy imports came with Python 3.15")
def test_a_lazy_import_loads_it_at_its_first_use() -> None:
    code = (
        "import sys\n"
        "lazy import aiordma\n"
        "lazy from aiordma import verbs\n"
        "print('aiordma' in sys.modules)\n"
        "print(aiordma.connect.__name__, verbs.Context.__name__, 'aiordma' in sys.modules)\n"
    )
    assert run(code).splitlines() == ["False", "connect Context True"]


@pytest.mark.skipif(sys.version_info < (3, 15), reason="lazy imports came with Python 3.15")
def test_its_names_are_all_there_when_every_import_is_lazy() -> None:
    code = (
        "import asyncio\n"
        "import aiordma, aiordma.cm, aiordma.verbs\n"
        "for module in (aiordma, aiordma.cm, aiordma.verbs):\n"
        "    for name in module.__all__:\n"
        "        getattr(module, name)\n"
        "async def main():\n"
        "    try:\n"
        "        await aiordma.connect('127.0.0.1', 1)\n"
        "    except aiordma.RdmaError:\n"
        "        print('told')\n"
        "asyncio.run(main())\n"
    )
    assert run(code, "-X", "lazy_imports=all") == "told"
