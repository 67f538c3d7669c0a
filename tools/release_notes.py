"""Print the notes of a release, and refuse a tag that the files of the repository contradict.

Usage: ``tools/release_notes.py --tag v1.2.3``.  The version stands in both files
pyproject.toml, in CITATION.cff and in CHANGELOG.md; the linter compares those, and this the tag.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib

from checks import ROOT

#: The heading of a release in the changelog, with its date.
_HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", re.MULTILINE)
_ANY_HEADING = re.compile(r"^## \[([^\]]+)\](.*)$", re.MULTILINE)
_KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def project_version(folder: str = ".") -> str:
    """The version in pyproject.toml, that of the repository or of a folder of it."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def notes(changelog: str, version: str) -> str:
    """The part of a changelog about a version, without its heading; empty if there is none."""
    for found in _HEADING.finditer(changelog):
        if found[1] == version:
            rest = changelog[found.end() :]
            return re.split(r"^(?:## |\[[^\]]+\]: )", rest, maxsplit=1, flags=re.MULTILINE)[
                0
            ].strip()
    return ""


def problems() -> list[str]:
    """Where the changelog, the citation and pyproject.toml differ, or break their forms."""
    changelog, version = (ROOT / "CHANGELOG.md").read_text(), project_version()
    citation = (ROOT / "CITATION.cff").read_text()
    found = []
    if (other := project_version("softroce")) != version:
        found.append(f"softroce/pyproject.toml has the version {other}, and not {version}")
    if f"\nversion: {version}\n" not in citation:
        found.append(f"CITATION.cff does not have the version of pyproject.toml, {version}")
    headings = [each[1] for each in _ANY_HEADING.finditer(changelog)]
    if headings[:1] != ["Unreleased"]:
        found.append("the first heading of CHANGELOG.md is not [Unreleased]")
    releases = [each[1] for each in _HEADING.finditer(changelog)]
    if releases != headings[1:]:
        found.append(f"a heading of CHANGELOG.md is not [VERSION] - DATE: {headings[1:]}")
    if releases and releases[0] != version:
        found.append(f"the newest release in CHANGELOG.md is {releases[0]}, not {version}")
    found += [f"CHANGELOG.md has no link for [{each}]" for each in headings
              if f"\n[{each}]: https://" not in changelog]  # fmt: skip
    found += [f"CHANGELOG.md: {each} is no kind of change: {', '.join(_KINDS)}"
              for each in re.findall(r"^### (.*)$", changelog, re.MULTILINE)
              if each not in _KINDS]  # fmt: skip
    return found


def main() -> int:
    """Print the notes; 1 if the tag cannot be published."""
    parser = argparse.ArgumentParser(description="Print the notes of a release.")
    parser.add_argument("--tag", required=True, help="the tag: v and the version")
    tag = parser.parse_args().tag
    found = problems()
    if tag != f"v{project_version()}":
        found.append(f"the tag is {tag}, and pyproject.toml has {project_version()}")
    text = notes((ROOT / "CHANGELOG.md").read_text(), tag.removeprefix("v"))
    if not text:
        found.append(f"CHANGELOG.md has no changes of {tag}")
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
