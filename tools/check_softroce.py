"""Prove that the sdist and the wheel of aiordma-softroce can be published; for release_check.py."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import check_wheel
import softroce_wheel
import wheels
from checks import ROOT, CheckFailedError, Checks, call, repository_files

from aiordma_softroce import SoftroceError

#: Run from an empty folder: it stands alone.
_PROGRAM = """
import importlib.util
import aiordma_softroce, aiordma_softroce.cli
assert importlib.util.find_spec("aiordma") is None
print(aiordma_softroce.__file__)
"""


class Softroce:
    """The files of aiordma-softroce, and their checks.

    Args:
        checks: Runs them.
        scratch: A folder for what is made on the way.

    Attributes:
        built: The files, once they are built; None if that failed.
    """

    def __init__(self, checks: Checks, scratch: Path) -> None:
        self._checks = checks
        self._scratch = scratch
        self.built: softroce_wheel.Built | None = None

    def check(
        self, folder: Path, kernels: Sequence[str] = softroce_wheel.KERNELS, *, again: bool = True
    ) -> None:
        """Build them into a folder, and run all checks but those in clean systems.

        Args:
            folder: Where they are kept.
            kernels: Those of the wheel.
            again: Build the wheel twice, and compare.
        """
        run = self._checks.run

        def build() -> None:
            self.built = _make(folder, kernels)

        if not run("softroce: build", build) or (built := self.built) is None:
            return
        if again:
            run("softroce: built again", lambda: self._check_again(built, kernels))
        twine = (wheels.program("twine"), "check", "--strict")
        run("softroce: twine check --strict", lambda: call(*twine, built.sdist, built.wheel))
        run("softroce: contents", lambda: _check_contents(built))
        run("softroce: wheel in an empty venv", lambda: self._check_install(built.wheel))
        run("softroce: sdist in an empty venv", lambda: self._check_install(built.sdist))
        run("softroce: its tests, without aiordma", self._check_tests)
        run("softroce: pyright --verifytypes", self._check_types)

    def _check_again(self, built: softroce_wheel.Built, kernels: Sequence[str]) -> None:
        other = _make(self._scratch / "softroce-again", kernels)
        if built.wheel.read_bytes() != other.wheel.read_bytes():
            raise CheckFailedError(f"{built.wheel.name} is another file when it is built again")

    def _check_install(self, path: Path) -> None:
        """It stands alone, its command runs, and pytest has the plugin."""
        folder = self._scratch / f"softroce-{path.suffix[1:]}"
        python = folder / "venv" / "bin" / "python"
        check_wheel.make_venv(python, Path(sys.executable), f"{path}[test]")
        origin = call(python, "-W", "error", "-c", _PROGRAM, cwd=folder, limit_s=60).strip()
        if not Path(origin).is_relative_to(folder):
            raise CheckFailedError(f"it imported {origin}, which is not in {folder}")
        for words in ((python.with_name("softroce"),), (python, "-m", "aiordma_softroce")):
            if "--kernel X.Y" not in call(*words, "--help", cwd=folder, limit_s=60):
                raise CheckFailedError(f"the help of {words[-1]} does not name the option --kernel")
        if "--softroce-args" not in call(python, "-m", "pytest", "--help", cwd=folder, limit_s=60):
            raise CheckFailedError("pytest does not know --softroce-args")

    def _check_types(self) -> None:
        """Pyright knows the type of every public name, where the wheel is installed."""
        check_wheel.check_types(self._scratch / "softroce-whl" / "venv", softroce_wheel.NAME)

    def _check_tests(self) -> None:
        """Those that need no guest, by its own configuration, where the sdist is installed."""
        python = self._scratch / "softroce-gz" / "venv" / "bin" / "python"
        said = call(
            *(python, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"),
            *("-m", "not uml and not qemu and not kernels"),
            cwd=ROOT / softroce_wheel.PACKAGE.name, limit_s=900,
        )  # fmt: skip
        print("    ", said.strip().splitlines()[-1])


def _make(folder: Path, kernels: Sequence[str]) -> softroce_wheel.Built:
    try:
        return softroce_wheel.make(folder, kernels)
    except SoftroceError as error:
        raise CheckFailedError(str(error)) from None


def _check_contents(built: softroce_wheel.Built) -> None:
    """Each file of the package is in both, and nothing else but the kernels in the wheel."""
    top = softroce_wheel.PACKAGE.name
    files = {path.relative_to(top) for path in repository_files() if path.is_relative_to(top)}
    wanted = {str(path) for path in files if path.parts[0] != "tests"} - {".gitignore"}
    with tarfile.open(built.sdist) as archive:
        inside = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    extra = {name for name in inside - wanted if ".egg-info/" not in name}
    if missing := wanted - inside:
        raise CheckFailedError(f"the sdist lacks {sorted(missing)}")
    if extra - {"PKG-INFO", "setup.cfg"}:
        raise CheckFailedError(f"the repository does not have {sorted(extra)}")
    code = {name.removeprefix("src/") for name in wanted if name.startswith("src/")}
    with zipfile.ZipFile(built.wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
    if missing := code - inside:
        raise CheckFailedError(f"the wheel lacks {sorted(missing)}")
    system = f"{softroce_wheel.NAME}/system/"
    others = {name for name in inside - code if not name.startswith(system)}
    if wrong := {name for name in others if ".dist-info/" not in name}:
        raise CheckFailedError(f"the wheel has {sorted(wrong)}, too")
