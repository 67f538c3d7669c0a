"""tools/links.py finds the links that lead nowhere, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(folder: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/links.py", folder],
        capture_output=True, check=False, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


def test_links_that_lead_somewhere(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(
        '<p id="here"><a href="#here">x</a><a href="b/a%20c.html#there">x</a>'
        '<a href="https://example.org/none">x</a><img src="b/p.png">'
    )
    (tmp_path / "b/a c.html").write_text('<p id="there"><a href="../index.html">x</a>')
    (tmp_path / "b/p.png").write_bytes(b"")
    assert run(tmp_path) == (0, [])


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<a href="#none">x</a><a href="none.html">x</a><a href="b.html#none">x</a>'
    )
    (tmp_path / "b.html").write_text("<p>")
    status, lines = run(tmp_path)
    assert status == 1
    assert lines == ["index.html: #none", "index.html: none.html", "index.html: b.html#none"]


def test_a_folder_without_pages_is_an_error(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == 1
