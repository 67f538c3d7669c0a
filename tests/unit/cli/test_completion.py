"""Completion in shells, by the lines of docs/commands.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "commands.md").read_text()
LIMIT_S = 60
ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

# As bash does it when the tab key is pressed.
PRESS_TAB = """
COMP_WORDS=({words}); COMP_CWORD={last}; COMP_LINE="{words}"; COMP_POINT=${{#COMP_LINE}}
"$(complete -p aiordma | sed 's/.*-F \\([^ ]*\\).*/\\1/')" aiordma
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def line_of(shell: str) -> str:
    """The line that the page has for a shell."""
    (line,) = re.findall(rf"^\$ (.*_AIORDMA_COMPLETE={shell}_source.*)$", PAGE, re.M)
    return str(line)


def bash(script: str) -> str:
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True, check=True, env=ENV, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["aiordma", "p"], {"perf", "ping"}),
        (["aiordma", "ping", "--co"], {"--connect", "--count"}),
        (["aiordma", "perf", "s"], {"send", "stream"}),
    ],
)
def test_bash_completes(words: list[str], wanted: set[str], tmp_path: Path) -> None:
    line = line_of("bash")
    assert line.endswith(" >> ~/.bashrc")
    press = PRESS_TAB.format(words=" ".join(words), last=len(words) - 1)
    script = f"export HOME={tmp_path}; {line}; . ~/.bashrc\n{press}"
    assert set(bash(script).split()) == wanted


@pytest.mark.parametrize(
    ("shell", "words"), [("zsh", "compdef"), ("fish", "complete --no-files --command aiordma")]
)
def test_other_shells_get_their_script(shell: str, words: str) -> None:
    script = bash(f"_AIORDMA_COMPLETE={shell}_source aiordma")
    assert words in script
    assert f"_AIORDMA_COMPLETE={shell}_complete" in script
    assert line_of(shell)
