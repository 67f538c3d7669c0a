"""docs/pytest.md names the options, fixtures and packages that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiordma_softroce import kernel_build

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/pytest.md").read_text()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says about options, settings, fixtures and markers."""
    folder = tmp_path_factory.mktemp("empty")
    texts = []
    for words in (["--help"], ["--fixtures"], ["--markers"]):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", *words],
            cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stderr
        texts.append(done.stdout)
    return "\n".join(texts)


def test_options_and_settings(told: str) -> None:
    table = PAGE.partition("## Options")[2].partition("\n\n`--softroce` starts")[0]
    options = set(re.findall(r"`(--[\w-]+)", table))
    assert options == set(
        re.findall(r"^  (--(?:(?:no-)?(?:softroce|fabric)|rdma)[\w-]*)", told, re.M)
    )
    settings = set(re.findall(r"`((?:softroce|fabric|rdma)_\w+)`", table)) | {"softroce", "fabric"}
    assert settings == set(re.findall(r"^  ((?:softroce|fabric|rdma)\w*) \(", told, re.M))


def test_fixtures_and_markers(told: str) -> None:
    table = PAGE.partition("## Fixtures")[2].partition("\n\nA test that asks")[0]
    names = set(re.findall(r"^\| `(\w+)`", table, re.M))
    assert names == set(re.findall(r"^(rdma_\w+)", told, re.M))
    for marker in set(re.findall(r"@pytest.mark.(rdma\w*)", told)) or {"none"}:
        assert f"`{marker}`" in PAGE


def test_the_packages_of_a_build() -> None:
    words = PAGE.partition("$ sudo apt-get install ")[2].partition("```")[0].split()
    for package in (*kernel_build.RUNTIME_PACKAGES, *kernel_build.BUILD_PACKAGES):
        assert package in words


def test_the_packages_that_the_setup_installs_for_it() -> None:
    table = (ROOT / "tools/packages.sh").read_text()
    for group, packages in (
        ("device", kernel_build.RUNTIME_PACKAGES),
        ("uml", kernel_build.BUILD_PACKAGES),
    ):
        rows = re.findall(rf"^{group} +\| pkg: +\| ([\w-]+)$", table, re.M)
        assert sorted(rows) == sorted(packages), group
