"""The notebook, and the commands in the first lines of examples, run as they are written."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.running import LIMIT_S, ROOT
from tests.device.shared import IS_SIW, name_of_device

pytestmark = [pytest.mark.device, pytest.mark.program]

RUNNER = "python -m aiordma_softroce -- "
COMMANDS = {
    "kv.py": r"version 1\n\[0\.5 1\.  2\. \]\n",
    "parameter_server.py": r"(?s)worker .*round 1: .*largest error of a parameter: 0\.00\d\d\n.*",
    "copy_file.py": r"README\.md: \d+ bytes in .* s, sha256 [0-9a-f]{64}\n",
    "kv_rejoin.py": (
        r"(?s).*joined again .*\n\d+ blocks read, 16 regions of earlier lives refused\n.*"
    ),
    "kv_transfer.py": r"(?s)listening .*(request \d+: \d+ blocks .*){12}.*",
    "telemetry.py": r"subscribed\n4 readings, \d+ missed, none older than \d+\.\d{3} s\n"
    r"subscribed\n20 readings, \d+ missed, none older than \d+\.\d{3} s\n",
    "chat.py": r"\* here: ann, bob\n\* bob has come\nbob: hello\n\* bob has left\n",
}


def environment(address: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_of_the_first_lines(name: str, address: str, tmp_path: Path) -> None:
    text = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())) or ""
    (command,) = re.findall(rf"^    {RUNNER}(bash -c '\n.*?')$", text, re.M | re.S)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    (tmp_path / "there").mkdir()
    command = command.replace("10.80.0.1", address).replace("/tmp", "there")
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(address),
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        process.wait(LIMIT_S)  # its output fits into the pipe
    finally:
        with contextlib.suppress(ProcessLookupError):  # the runner does so with all that is left
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert re.fullmatch(COMMANDS[name], out), out


def test_the_notebook(address: str, tmp_path: Path) -> None:
    path = tmp_path / "notebook.ipynb"
    path.write_bytes((ROOT / "examples" / "notebook.ipynb").read_bytes())
    done = subprocess.run(
        ["jupyter", "execute", "--inplace", str(path)],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        # Jupyter looks at the folder of the user's settings; nothing of it belongs to the test.
        env={**environment(address), "HOME": str(tmp_path)},
        timeout=2 * LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    said = ["".join(cell["outputs"][-1]["data"]["text/plain"]) for cell in cells if cell["outputs"]]
    device, connection, hello, table, row, server = said
    name = name_of_device(IS_SIW)
    assert device == f"['{name}']"
    assert re.fullmatch(rf"<Connection #\d+ open peer=\(.*\) device={name}>", connection)
    assert hello == "b'HELLO'"
    assert "4.,  5.,  6.,  7." in table
    assert row == "array([ 800.,  900., 1000., 1100.])"
    assert server == "<Server closed, 0 connections>"


def test_each_program_is_on_the_page() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    programs = {*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")}
    assert {path.name for path in programs} == set(
        re.findall(r"`(\w+\.(?:py|ipynb))`", page.partition("## All programs")[2])
    )
