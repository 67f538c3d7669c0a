"""examples/benchmarks.ipynb runs, and says what docs/benchmarks.json says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[3]
LIMIT_S = 100


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cells of code, executed by a kernel of its own beside a copy of what is recorded."""
    # Jupyter and matplotlib look at the folder of the user's settings.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "benchmarks.json", tmp_path / "docs")
    notebook = nbformat.read(ROOT / "examples" / "benchmarks.ipynb", as_version=4)
    folder = tmp_path / "examples"
    folder.mkdir()
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=LIMIT_S, resources=resources).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell: Any) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream")


def test_it_runs_and_says_what_was_recorded(cells: list[Any]) -> None:
    recorded = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    goals = {(row["figure"], row["beside"]): row for row in recorded["goals"]}
    _, messages, requests, bulk = cells
    for cell in (messages, requests, bulk):
        assert [out for out in cell.outputs if "image/png" in out.get("data", {})]
    sizes = {"64": "64 B", "4,096": "4 KiB", "1,048,576": "1 MiB"}
    for size, name in sizes.items():
        goal = goals[f"echo, {name}, half round trip", "ib_send_lat -e"]
        line = rf"{size} bytes: +{goal['ours']:.1f} us, {goal['value']:.2f} of C"
        assert re.search(line, said(messages))
    goal = goals["a request, 100 callers", "TCP"]
    of_100 = {
        kind.strip(): float(us.split()[1])
        for kind, us in re.findall(r"(.*): (.*) us", said(requests))
    }
    ratio = of_100["requests"] / of_100["TCP, numbered by hand"]
    assert ratio == pytest.approx(goal["value"], rel=0.01)
    goal = goals["SEND bandwidth, 64 KiB", "ib_send_bw -e"]
    assert f"messages:  {goal['ours']:.1f} MiB/s, {goal['value']:.2f} of C" in said(bulk)


def test_it_is_kept_without_what_it_prints() -> None:
    notebook = nbformat.read(ROOT / "examples" / "benchmarks.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
