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

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [aiordma, aiordma.cm, aiordma.verbs], ids=lambda m: m.__name__)
def test_every_public_name_is_there_once_and_documented(module: ModuleType) -> None:
    names = module.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(module, name).__doc__, name


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert aiordma.__version__ == project["version"]


def run(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", code],
        capture_output=True, check=False, cwd=ROOT, text=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_starts_no_thread_and_opens_no_descriptor() -> None:
    code = (
        "import os, threading\n"
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
