"""pyverbs' own tests over the fabric: none fails, and each that is left out has a reason."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.fabric.launching import launched, outside
from tests.fabric.pyverbs_left_out import LEFT_OUT, MACHINE, PASSED, VERSION

#: Debian's package python3-pyverbs has them here, some of them packed.
DELIVERED = Path("/usr/share/doc/rdma-core/tests")
SUITE = Path(__file__).with_name("pyverbs_suite.py")
# Debian's python3-pyverbs is for Debian's Python.
PYTHON = "/usr/bin/python3"
LIMIT_S = 240


def unpack(folder: Path) -> None:
    """Copy the tests there."""
    package = folder / "tests"
    package.mkdir()
    for path in sorted(DELIVERED.iterdir()):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        (package / path.name.removesuffix(".gz")).write_bytes(content)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What became of each test: its outcome, and why."""
    folder = tmp_path_factory.mktemp("pyverbs")
    unpack(folder)
    file = folder / "outcomes.json"
    done = subprocess.run(
        launched("--", PYTHON, str(SUITE), str(folder), str(file)),
        env=outside(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return {name: (what, why) for name, (what, why) in json.loads(file.read_text()).items()}


@pytest.mark.timeout(LIMIT_S + 30)
def test_none_fails(outcomes: dict[str, tuple[str, str]]) -> None:
    failed = {name: why for name, (what, why) in outcomes.items() if what == "failed"}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())


def test_each_that_is_left_out_has_a_reason(outcomes: dict[str, tuple[str, str]]) -> None:
    reasons = [why for what, why in outcomes.values() if what == "skipped"]
    patterns = [each.says for each in (*LEFT_OUT, *MACHINE)]
    assert not [why for why in reasons if sum(bool(re.fullmatch(p, why)) for p in patterns) != 1]


def test_the_counts(outcomes: dict[str, tuple[str, str]]) -> None:
    assert pyverbs_version().startswith(VERSION), "the table is of another rdma-core"
    counts: Counter[str] = Counter()
    for what, why in outcomes.values():
        if what == "skipped":
            counts[next(e.says for e in (*LEFT_OUT, *MACHINE) if re.fullmatch(e.says, why))] += 1
    assert {each.says: counts[each.says] for each in LEFT_OUT} == {
        each.says: each.count for each in LEFT_OUT
    }
    # A machine that has huge pages, a GPU or a graphics device runs more of them.
    for each in MACHINE:
        assert counts[each.says] <= each.count
    total = PASSED + sum(each.count for each in (*LEFT_OUT, *MACHINE))
    assert len(outcomes) == total
    more = sum(each.count - counts[each.says] for each in MACHINE)
    assert sum(what == "passed" for what, _ in outcomes.values()) == PASSED + more


def test_the_connection_manager_is_among_them(outcomes: dict[str, tuple[str, str]]) -> None:
    """What pyverbs_suite.py replaces has its effect."""
    ours = {name: what for name, (what, _) in outcomes.items() if ".CMTestCase." in name}
    assert len(ours) == 10
    assert set(ours.values()) == {"passed"}


def pyverbs_version() -> str:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", "python3-pyverbs"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout
