"""Print the requirements of extras in pyproject.toml, one a line, for ``pip install -r``.

``build`` stands for what the build itself and the package's own core need. Installing them apart
from the package lets ``tools/setup`` do it beside other work and without building twice.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(groups: list[str]) -> list[str]:
    """Return the sorted requirements of ``groups``.

    Raises:
        KeyError: pyproject.toml has no such extra.
    """
    data = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    extras = dict(data["project"]["optional-dependencies"])
    extras["build"] = data["build-system"]["requires"] + data["project"]["dependencies"]
    return sorted({line for group in groups for line in extras[group]})


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
