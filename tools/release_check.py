"""Prove that the sdist and the wheel can be published: ``make release-check``.

It builds them into ``dist`` and takes some minutes: each CPython of this machine installs both,
the sdist's own tests run, and so do clean installations of Debian, which need root.  The quick
checks of the same files are in tools/check_wheel.py, a stage of ``make test``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import check_wheel
import clean_roots
import pythons
import wheels
from checks import ROOT, CheckFailedError, Checks, call

_TAG = "manylinux_{}_{}_x86_64".format(*wheels.OLDEST_GLIBC)
#: Run by each CPython, from an empty folder: what works without a device.
_PROGRAM = """
import asyncio, pathlib, sys
import aiordma, aiordma.cm, aiordma.verbs, aiordma.testing.softroce
assert pathlib.Path(aiordma.__file__).is_relative_to(sys.prefix), aiordma.__file__
aiordma._ffi.lib.ibv_get_device_list
print(aiordma.__version__, "on", sys.version.split()[0], aiordma.why_unavailable() or "a device")
"""


class Release:
    """The files that are to be published; each method is one check."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.built = wheels.Built(scratch / "no.tar.gz", scratch / "no.whl")

    def build(self) -> None:
        """Build both into dist."""
        self.built = wheels.make(wheels.DIST)

    def check_again(self) -> None:
        """Another build, in another folder, makes the same bytes."""
        again = wheels.make(self._scratch / "again")
        for one, two in ((self.built.sdist, again.sdist), (self.built.wheel, again.wheel)):
            if one.name != two.name or one.read_bytes() != two.read_bytes():
                raise CheckFailedError(f"{one.name} is another file when it is built again")

    def check_twine(self) -> None:
        """The metadata is in order, and the README renders."""
        call(wheels.program("twine"), "check", "--strict", self.built.sdist, self.built.wheel)

    def check_forms(self) -> None:
        """The workflows and the citation have the form that their readers expect."""
        workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        check = (wheels.program("check-jsonschema"), "--builtin-schema")
        call(*check, "vendor.github-workflows", *workflows)
        call(*check, "vendor.citation-file-format", ROOT / "CITATION.cff")

    def check_contents(self) -> None:
        """No file is where it does not belong."""
        call(wheels.program("check-wheel-contents"), self.built.wheel)

    def check_abi(self) -> None:
        """No symbol of CPython is imported that the stable ABI of 3.11 does not have."""
        call(wheels.program("abi3audit"), "--strict", "--summary", self.built.wheel)

    def check_manylinux(self) -> None:
        """The name of the wheel has the tag, and auditwheel gives it the same one again."""
        if _TAG not in self.built.wheel.name:
            raise CheckFailedError(
                f"the tag of {self.built.wheel.name} is not {_TAG}: build it on an older system"
            )
        again = wheels.publishable(self.built, self._scratch)
        if again.wheel.name != self.built.wheel.name:
            raise CheckFailedError(f"auditwheel calls it {again.wheel.name}")
        said = json.loads(call(wheels.program("auditwheel"), "show", "--json", self.built.wheel))
        found = sorted(said["external_libs"])
        print(f"     {_TAG}, with these libraries of the system: {', '.join(found)}")
        # libibverbs itself needs those of netlink.
        others = {name for name in found if not name.startswith("libnl-")}
        if others != set(wheels.SYSTEM_LIBRARIES):
            raise CheckFailedError(f"the system's libraries are {sorted(others)}")

    def check_symbols(self) -> None:
        """The modules load with the oldest libraries that the documentation names."""
        modules = wheels.modules(self.built.wheel, self._scratch / "unpacked")
        wheels.check_glibc(modules)
        wheels.check_smallest_rdma_core(modules)

    def check_bill_of_materials(self) -> None:
        """It is valid CycloneDX."""
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator

        with zipfile.ZipFile(self.built.wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".cdx.json"))
            wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(
                archive.read(name).decode()
            )
        if wrong is not None:
            raise CheckFailedError(f"{name}: {wrong}")

    def check_types(self) -> None:
        """Pyright knows the type of every public name of the installed package."""
        python, empty = self._scratch / "types" / "bin" / "python", self._scratch / "nowhere"
        empty.mkdir()
        extras = "aiohttp,cli,httpx,uvloop"
        check_wheel.install(
            python, Path(sys.executable), f"aiordma[{extras}] @ {self.built.wheel.as_uri()}",
            "pytest",
        )  # fmt: skip
        # It looks for packages where the interpreter on the path does.
        path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
        call(
            *("env", f"PATH={path}", f"VIRTUAL_ENV={python.parents[1]}"),
            *(wheels.program("pyright"), "--verifytypes", "aiordma", "--ignoreexternal"),
            cwd=empty, limit_s=600,
        )  # fmt: skip

    def check_python(self, version: str, base: Path, *, sdist: bool) -> None:
        """A CPython of this machine installs it into an empty venv, and runs a program."""
        kind = "sdist" if sdist else "wheel"
        folder = self._scratch / f"{kind}-{version}"
        python = folder / "venv" / "bin" / "python"
        path = self.built.sdist if sdist else self.built.wheel
        check_wheel.install(python, base, str(path))
        print("    ", call(python, "-W", "error", "-c", _PROGRAM, cwd=folder, limit_s=60).strip())
        call(python.parent / "aiordma", "--version", cwd=folder, limit_s=60)

    def check_sdist_tests(self) -> None:
        """The unit tests run from the unpacked sdist, which they do not leave."""
        with tarfile.open(self.built.sdist) as archive:
            archive.extractall(self._scratch, filter="data")
        source = self._scratch / self.built.sdist.name.removesuffix(".tar.gz")
        call(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=source, limit_s=600)
        said = call(
            *("env", f"PYTHONPATH={source}", "PYTHONASYNCIODEBUG=1", sys.executable, "-m"),
            *("pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests/unit"),
            cwd=source, limit_s=1800,
        )  # fmt: skip
        print("    ", said.strip().splitlines()[-1])
        origin = call(
            *("env", f"PYTHONPATH={source}", sys.executable, "-c"),
            "import aiordma; print(aiordma.__file__)",
            cwd=self._scratch,
        )
        if not Path(origin.strip()).is_relative_to(source):
            raise CheckFailedError(f"the tests were of {origin.strip()}")


def check_roots(checks: Checks, built: wheels.Built, scratch: Path) -> None:
    """Install in a clean root of each release, if this machine can make one."""
    reason = clean_roots.why_not()
    for release in clean_roots.RELEASES:
        if reason:
            checks.skip(f"clean {release}", reason)
            continue
        root = clean_roots.Root(release, scratch, built)
        try:
            if checks.run(f"clean {release}: system", root.make):
                checks.run(f"clean {release}: wheel", root.check_wheel)
                checks.run(f"clean {release}: sdist", root.check_sdist)
        finally:
            root.remove()


def main() -> int:
    """Run the checks; those after a failed build would only repeat its failure."""
    parser = argparse.ArgumentParser(description="Build the sdist and the wheel, and check all.")
    parser.add_argument("--junit", type=Path, help="write the results to this file")
    options = parser.parse_args()
    checks = Checks("release", options.junit)
    with tempfile.TemporaryDirectory(prefix="aiordma-release-") as name:
        scratch = Path(name)
        release = Release(scratch)
        if checks.run("build", release.build):
            checks.run("built again", release.check_again)
            checks.run("twine check --strict", release.check_twine)
            checks.run("workflows and citation", release.check_forms)
            checks.run("check-wheel-contents", release.check_contents)
            checks.run("abi3audit --strict", release.check_abi)
            checks.run("auditwheel", release.check_manylinux)
            checks.run("smallest rdma-core and glibc", release.check_symbols)
            checks.run("bill of materials", release.check_bill_of_materials)
            checks.run("pyright --verifytypes", release.check_types)
            own = re.match(r"\d+\.\d+", sys.version)
            here = {own[0] if own else "?": Path(sys.executable)}
            for version, base in (here | pythons.found()).items():
                for sdist in (False, True):
                    kind = "sdist" if sdist else "wheel"
                    check = functools.partial(release.check_python, version, base, sdist=sdist)
                    checks.run(f"{kind} on CPython {version}", check)
            checks.run("tests of the sdist", release.check_sdist_tests)
            check_roots(checks, release.built, scratch)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
