"""The wheels of aiordma and of aiordma-softroce, for tests of both as their users have them."""

from __future__ import annotations

import sys
from pathlib import Path

from softroce.tests.building import BUILD_S, call_tool
from softroce.tests.conftest import LIMIT, REPOSITORY


def build_wheels(folder: Path) -> tuple[Path, Path]:
    """Build the wheels of a clean copy of the repository in `folder`; the second has no kernels."""
    source, wheels = folder / "source", folder / "wheels"
    copy = "import sys; from pathlib import Path; from checks import copy_repository; "
    copy += "copy_repository(Path(sys.argv[1]))"
    call_tool(sys.executable, "-c", copy, source, cwd=REPOSITORY / "tools", seconds=LIMIT)
    build = ("wheel", "-q", "--no-build-isolation", "--no-deps", "-w", wheels)
    what = (source, source / "softroce")
    call_tool(sys.executable, "-m", "pip", *build, *what, cwd=folder, seconds=BUILD_S)
    (wheel,) = wheels.glob("aiordma-*.whl")
    (softroce,) = wheels.glob("aiordma_softroce-*.whl")
    return wheel, softroce
