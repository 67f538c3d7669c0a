"""This version and an older one talk to each other.

The older one is built from the repository's history, with the C compiler that built this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from aiordma import RemoteRegion
from aiordma.verbs import Access
from tests.fabric.launching import ROOT, launch

#: Its names of memory have no identity, and it knows no notes.
OLDER = "0262212"
_TALK = str(Path(__file__).with_name("older_talk.py"))
_PORT = "18600"
_LIMIT_S = 120


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ("git", "-C", str(ROOT), *words), capture_output=True, check=False, timeout=_LIMIT_S
    )


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an older version."""
    archive = _git("archive", OLDER, "aiordma", "setup.py", "build_ffi.py", "pyproject.toml")
    if archive.returncode:
        pytest.skip(f"this clone has no commit {OLDER}: {archive.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp(OLDER)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    done = subprocess.run(
        (sys.executable, "setup.py", "-q", "build_ext", "--inplace"),
        cwd=folder, capture_output=True, text=True, check=False, timeout=_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return str(folder)


@pytest.mark.parametrize("profile", ["standard", "irdma"])
@pytest.mark.parametrize("is_older", ["server", "client"])
def test_both_talk(older: str, is_older: str, profile: str) -> None:
    def words(side: str, role: str) -> list[str]:
        tree = older if side == is_older else str(ROOT)
        return ["env", f"PYTHONPATH={tree}", sys.executable, "-W", "error", _TALK, role, _PORT]

    plan = {
        "server": words("server", "serve"), "client": words("client", "call"), "ready": "ready",
        "endless": True, "again": "", "limit_s": _LIMIT_S - 10,
    }  # fmt: skip
    done = launch(
        f"--profile={profile}", "--", sys.executable, "-m", "tests.fabric.pair", json.dumps(plan),
        cwd=ROOT, limit_s=_LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ends = json.loads(done.stdout)
    assert ends["client"]["status"] == 0, ends
    trees = {side: ends[side]["said"].splitlines()[0] for side in ends}
    assert [trees[side].startswith(older + os.sep) for side in ("server", "client")] == [
        is_older == "server", is_older == "client",
    ]  # fmt: skip
    # In debug mode asyncio tells of slow steps, too.
    steps = ["echo", "expose", "use", "say", "fail", "requests", "streams", "keys"]
    said = ends["client"]["said"].splitlines()[1:]
    assert [line for line in said if line in steps] == steps


def test_an_older_version_refuses_a_name_with_an_owner_by_its_size(older: str) -> None:
    """A program that forgets `version=1` hears of it at the first name."""
    name = RemoteRegion(4096, 8, 1, Access.REMOTE_READ, 2, 3)
    parse = (
        "import sys, aiordma\n"
        "try: print(aiordma.RemoteRegion.from_bytes(bytes.fromhex(sys.argv[1])))\n"
        "except ValueError as error: print(error)"
    )
    for data, said in (
        (name.to_bytes(), "a remote region travels as 24 bytes, not 36"),
        (name.to_bytes(version=1), "<RemoteRegion 8 bytes, read>"),
    ):
        done = subprocess.run(
            (sys.executable, "-c", parse, data.hex()),
            cwd=older,
            env={**os.environ, "PYTHONPATH": older},
            capture_output=True, text=True, check=True, timeout=_LIMIT_S,
        )  # fmt: skip
        assert done.stdout.strip() == said
