"""The README's first steps, word for word, as a reader has them after `make demo`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import steps

pytestmark = pytest.mark.uml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LIMIT_S = 300
#: With the virtual environment active.
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.M | re.S)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip


def test_the_first_program(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(blocks("python")[0])
    [step] = [
        each for block in blocks("console") for each in steps(block) if "echo.py" in each.command
    ]
    done = run(step.command, tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, step.lines), done.stderr


def test_the_environment_is_where_the_readme_says() -> None:
    [first] = [block for block in blocks("console") if "make demo" in block]
    assert [each.command.split("  ")[0] for each in steps(first)][1:] == [
        "make demo", "source .venv/bin/activate",
    ]  # fmt: skip
