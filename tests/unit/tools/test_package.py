"""The files about the package agree with one another, and lead where they say."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import checks
import clean_roots
import pytest
import release_notes
import wheels
from checks import CheckFailedError, Checks, read_counts, write_page

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOB = "https://github.com/aiordma/aiordma/blob/main/"
PAGES = "https://aiordma.readthedocs.io/en/latest/"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md", "CHANGELOG.md", "softroce/README.md"])
def test_links_work_where_the_text_is_shown_without_the_repository(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.M)
    assert targets
    for target in targets:
        address = target.partition("#")[0]
        assert address.startswith("https://"), f"{name}: {target} is no absolute link"
        if address.startswith(BLOB):
            assert (ROOT / address.removeprefix(BLOB)).exists(), target
        elif address.startswith(PAGES):
            page = address.removeprefix(PAGES).removesuffix(".html")
            assert (ROOT / "docs" / f"{page}.md").is_file(), target


def test_the_metadata_names_authors_and_addresses() -> None:
    assert PROJECT["authors"] == [{"name": "aiordma developers"}]
    assert PROJECT["urls"]["Homepage"] == PROJECT["urls"]["Source"]
    assert PROJECT["urls"]["Changelog"] == BLOB + "CHANGELOG.md"
    assert PAGES.startswith(PROJECT["urls"]["Documentation"])


def test_the_classifiers_name_no_python_that_is_refused() -> None:
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    lowest = PROJECT["requires-python"].removeprefix(">=3.")
    assert min(map(int, named)) == int(lowest)
    assert not any("Free Threading" in each for each in PROJECT["classifiers"])


def test_the_pages_name_the_smallest_rdma_core_and_the_oldest_c_library() -> None:
    glibc = ".".join(map(str, wheels.OLDEST_GLIBC))
    page = (ROOT / "docs" / "versions.md").read_text()
    assert f"| rdma-core | {wheels.SMALLEST_RDMA_CORE} and later |" in page
    assert f"| C library | glibc {glibc} and later" in page
    readme = (ROOT / "README.md").read_text()
    assert f"rdma-core {wheels.SMALLEST_RDMA_CORE} or later" in readme
    said = (ROOT / "aiordma" / "_ffi" / "__init__.py").read_text()
    assert f'RDMA_CORE = "{wheels.SMALLEST_RDMA_CORE}"' in said
    assert f"older than {wheels.SMALLEST_RDMA_CORE}" in (ROOT / "setup.py").read_text()


def test_the_page_of_versions_has_the_commands_that_a_build_prints() -> None:
    needs = (ROOT / "setup.py").read_text().split('NEEDS = """')[1].split('"""')[0]
    commands = re.findall(r"  +((?:apt|dnf|zypper|pacman) .*)", needs)
    assert len(commands) == 4
    page = (ROOT / "docs" / "versions.md").read_text()
    assert all(f"`{command}`" in page for command in commands)


def fake_imports(monkeypatch: pytest.MonkeyPatch, **versions: str) -> list[Path]:
    found = {version: {symbol} for symbol, version in versions.items()}
    monkeypatch.setattr(wheels, "imported", lambda path: found)
    return [Path("module.abi3.so")]


def test_the_symbols_of_the_smallest_rdma_core_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = fake_imports(
        monkeypatch, ibv_open_device="IBVERBS_1.1", ibv_is_fork_initialized="IBVERBS_1.13",
        memcpy="GLIBC_2.14",
    )  # fmt: skip
    assert wheels.check_smallest_rdma_core(paths) == "ibv_is_fork_initialized (IBVERBS_1.13)"


@pytest.mark.parametrize(
    ("symbol", "version", "said"),
    [
        ("ibv_query_qp_data_in_order", "IBVERBS_1.14", "the modules need rdma-core 36, for"),
        ("ibv_of_tomorrow", "IBVERBS_9.9", "ibv_of_tomorrow of module.abi3.so need IBVERBS_9.9"),
        ("ibv_open_device", "IBVERBS_1.1", "the modules need rdma-core 1, for ibv_open_device"),
    ],
)
def test_another_smallest_rdma_core_is_said(
    monkeypatch: pytest.MonkeyPatch, symbol: str, version: str, said: str
) -> None:
    with pytest.raises(CheckFailedError, match=re.escape(said)):
        wheels.check_smallest_rdma_core(fake_imports(monkeypatch, **{symbol: version}))


def test_a_symbol_of_a_newer_c_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.check_glibc(fake_imports(monkeypatch, clock_gettime="GLIBC_2.17"))
    with pytest.raises(CheckFailedError, match=r"needs GLIBC_2\.34 for pthread_once"):
        wheels.check_glibc(fake_imports(monkeypatch, pthread_once="GLIBC_2.34"))


def test_the_packages_are_those_that_the_error_names(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "install rdma-core's libraries. Debian/Ubuntu: apt install libibverbs1 librdmacm1; "
        "Fedora/RHEL: dnf install libibverbs\n"
    )
    assert clean_roots.packages(said) == ["libibverbs1", "librdmacm1"]
    with pytest.raises(CheckFailedError, match="names no packages"):
        clean_roots.packages("dnf install libibverbs")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert clean_roots.why_not() == "only root can make one"


CHANGES = """\
# Changelog

## [Unreleased]

## [1.1.0] - 2027-01-02

### Fixed

- a thing

## [1.0.0] - 2026-12-24

### Added

- everything

[Unreleased]: https://example.org/
"""


def test_the_notes_of_a_release_are_its_part_of_the_changelog() -> None:
    assert release_notes.notes(CHANGES, "1.1.0") == "### Fixed\n\n- a thing"
    assert release_notes.notes(CHANGES, "1.0.0") == "### Added\n\n- everything"
    assert release_notes.notes(CHANGES, "2.0.0") == ""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("## [Unreleased]\n", "## [1.0]\n", "the first heading of CHANGELOG.md is not [Unrel"),
        ("2027-01-02", "soon", "a heading of CHANGELOG.md is not [VERSION] - DATE: ['1.1.0', "),
        ("### Fixed", "### Mended", "CHANGELOG.md: Mended is no kind of change"),
        ("[Unreleased]: ", "[another]: ", "CHANGELOG.md has no link for [Unreleased]"),
        ("# Changelog", "# Changelog", "the newest release in CHANGELOG.md is 1.1.0, not 0.1.0"),
        ("# Changelog", "# Changelog", "softroce/pyproject.toml has the version 0.0.9, and not 0."),
    ],
)
def test_a_changelog_that_breaks_its_form_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str, after: str, said: str
) -> None:
    (tmp_path / "CHANGELOG.md").write_text(CHANGES.replace(before, after))
    (tmp_path / "CITATION.cff").write_text("\nversion: 0.1.0\n")
    (tmp_path / "softroce").mkdir()
    for folder, version in ((".", "0.1.0"), ("softroce", "0.0.9")):
        text = f'[project]\nversion = "{version}"\n'
        (tmp_path / folder / "pyproject.toml").write_text(text)
    monkeypatch.setattr(release_notes, "ROOT", tmp_path)
    assert any(line.startswith(said) for line in release_notes.problems())


def test_the_files_of_the_repository_agree() -> None:
    assert release_notes.problems() == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_hold_no_secret_and_pin_what_they_use(path: Path) -> None:
    text = path.read_text()
    assert "secrets." not in text
    assert "password" not in text.replace("no password", "")
    uses = re.findall(r"uses: (\S+)", text)
    assert all(
        each.startswith("./") or re.search(r"@(v\d+|release/v\d+|[0-9a-f]{40})$", each)
        for each in uses
    )
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"run: make ([\w-]+)", text)
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_there_are_workflows_for_tests_and_releases() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


def test_a_check_that_cannot_run_is_named_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = Checks("some", tmp_path / "some.xml")
    some.run("one", lambda: None)
    some.skip("other", "no root here")
    assert some.finish() == 0
    assert "NOT CHECKED: other (no root here)" in capsys.readouterr().err
    counts = read_counts(tmp_path / "some.xml")
    assert counts is not None
    assert (counts.passed, counts.skipped) == (1, 1)


def test_a_page_is_written_or_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tools/some.py"])
    write_page(page, "new\n", "usage")
    assert page.read_text() == "new\n"
    monkeypatch.setattr(sys, "argv", ["tools/some.py", "--check"])
    write_page(page, "new\n", "usage")
    with pytest.raises(SystemExit, match=r"page\.md is out of date: tools/some\.py"):
        write_page(page, "newer\n", "usage")
    monkeypatch.setattr(sys, "argv", ["tools/some.py", "--chek"])
    with pytest.raises(SystemExit, match="usage"):
        write_page(page, "newer\n", "usage")
    assert page.read_text() == "new\n"


def test_the_setup_of_the_docs_has_each_extra_for_users() -> None:
    # Sphinx imports the modules of aiordma.contrib, and fails without the packages they need.
    profile = re.search(r"docs\) .*extras=\(([^)]*)\)", (ROOT / "tools" / "setup").read_text())
    assert profile is not None
    ours = {"bench", "dev", "release", "test"}
    assert set(profile[1].split()) == set(PROJECT["optional-dependencies"]) - ours
