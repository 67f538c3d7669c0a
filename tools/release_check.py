"""Prove that sdist and wheel of both distributions can be published: ``make release-check``.

It builds them into ``dist``, runs the checks of tools/check_wheel.py, a stage of ``make test``, and
then those that take minutes: each CPython of this machine installs both, the sdist's own tests run,
and so do clean installations of Debian, which need root.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import tarfile
from pathlib import Path

import check_softroce
import check_wheel
import clean_roots
import pythons
import wheels
from checks import ROOT, CheckFailedError, call

_TAG = "manylinux_{}_{}_x86_64".format(*wheels.OLDEST_GLIBC)
#: Run by each CPython, from an empty folder: what works without a device.
_PROGRAM = """
import sys
import aiordma, aiordma.cm, aiordma.verbs
aiordma._ffi.lib.ibv_get_device_list
print(aiordma.__version__, "on", sys.version.split()[0], aiordma.why_unavailable() or "a device")
"""
#: The extras for programs; their packages are needed to know all types.
_EXTRAS = "aiohttp,cli,dask,httpx,numpy,opentelemetry,prometheus,pytest,uvloop"
#: The help of the command says this where the extra `cli` is not installed.
_WITHOUT_CLI = "click is not installed; all commands: pip install 'aiordma[cli]'"


class Release(check_wheel.Package):
    """The files that are to be published."""

    def build(self) -> None:
        """Build both into dist."""
        self.built = wheels.make(wheels.DIST)

    def check(self) -> None:
        """Run all checks of what is built."""
        super().check()
        run = self.checks.run
        run("built again", self.check_again)
        run("twine check --strict", self.check_twine)
        run("workflows and citation", self.check_forms)
        run("check-wheel-contents", self.check_top_level)
        run("abi3audit --strict", self.check_abi)
        run("auditwheel", self.check_manylinux)
        run("oldest C library", lambda: wheels.check_glibc(self.modules))
        run("form of the bill of materials", self.check_form_of_bill)
        for package in check_wheel.PACKAGES:
            run(f"pyright --verifytypes {package}", functools.partial(self.check_types, package))
        own = re.match(r"\d+\.\d+", sys.version)
        here = {own[0] if own else "?": Path(sys.executable)}
        for version, base in (here | pythons.found()).items():
            for check, kind in ((self.check_wheel_on, "wheel"), (self.check_sdist_on, "sdist")):
                run(f"{kind} on CPython {version}", functools.partial(check, version, base))
        run("tests of the sdist", self.check_sdist_tests)
        softroce = check_softroce.Softroce(self.checks, self.scratch)
        softroce.check(wheels.DIST)
        self.check_roots(softroce)

    def check_again(self) -> None:
        """Another build, in another folder, makes the same bytes."""
        again = wheels.make(self.scratch / "again")
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

    def check_top_level(self) -> None:
        """No file is where it does not belong."""
        names = ",".join(check_wheel.TOP)
        call(
            wheels.program("check-wheel-contents"), "--no-config", "--toplevel", names,
            self.built.wheel,
        )  # fmt: skip

    def check_abi(self) -> None:
        """No symbol of CPython is imported that the stable ABI of 3.11 does not have."""
        call(wheels.program("abi3audit"), "--strict", "--summary", self.built.wheel)

    def check_manylinux(self) -> None:
        """The name of the wheel has the tag, and auditwheel gives it the same one again."""
        if _TAG not in self.built.wheel.name:
            raise CheckFailedError(
                f"the tag of {self.built.wheel.name} is not {_TAG}: build it on an older system"
            )
        again = wheels.publishable(self.built, self.scratch)
        if again.wheel.name != self.built.wheel.name:
            raise CheckFailedError(f"auditwheel calls it {again.wheel.name}")
        said = json.loads(call(wheels.program("auditwheel"), "show", "--json", self.built.wheel))
        found = sorted(said["external_libs"])
        print(f"     {_TAG}, with these libraries of the system: {', '.join(found)}")
        # libibverbs itself needs those of netlink.
        others = {name for name in found if not name.startswith("libnl-")}
        if others != set(wheels.SYSTEM_LIBRARIES):
            raise CheckFailedError(f"the system's libraries are {sorted(others)}")

    def check_form_of_bill(self) -> None:
        """It is valid CycloneDX."""
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator

        validator = JsonStrictValidator(SchemaVersion.V1_6)
        if (wrong := validator.validate_str(self.bill_of_materials())) is not None:
            raise CheckFailedError(str(wrong))

    def check_types(self, package: str) -> None:
        """Pyright knows the type of every public name of an installed package."""
        folder = self.scratch / "types"
        python = folder / "bin" / "python"
        if not python.exists():
            check_wheel.make_venv(python, Path(sys.executable), self._with(_EXTRAS))
        check_wheel.check_types(folder, package)

    def check_wheel_on(self, version: str, base: Path) -> None:
        """A CPython of this machine takes the wheel; its command needs no extra, and takes it."""
        python = self._check_on(f"wheel-{version}", base, self.built.wheel)
        check_wheel.install(python, self._with("cli"))
        self._check_commands(python, ("ping", "cp", "doctor"), without="click is not installed")

    def check_sdist_on(self, version: str, base: Path) -> None:
        """A CPython of this machine builds and takes the sdist."""
        self._check_on(f"sdist-{version}", base, self.built.sdist)

    def _check_on(self, name: str, base: Path, path: Path) -> Path:
        """Install a file into an empty venv, and run programs; return its interpreter."""
        folder = self.scratch / name
        python = folder / "venv" / "bin" / "python"
        check_wheel.make_venv(python, base, str(path))
        check_wheel.check_origin(folder, folder, python)
        print("    ", call(python, "-W", "error", "-c", _PROGRAM, cwd=folder, limit_s=60).strip())
        self._check_commands(python, (_WITHOUT_CLI, "doctor"), without="ping")
        return python

    def _check_commands(self, python: Path, names: tuple[str, ...], without: str) -> None:
        """The help of the command has words, and not another, however it is started."""
        for words in ((python.parent / "aiordma",), (python, "-W", "error", "-m", "aiordma")):
            shown = " ".join(call(*words, "--help", cwd=python.parents[2], limit_s=60).split())
            wrong = [name for name in names if name not in shown]
            if wrong or without in shown:
                raise CheckFailedError(f"the help lacks {wrong}, or has {without!r}: {shown}")

    def _with(self, extras: str) -> str:
        """The requirement of the wheel with these extras, for `pip install`."""
        return f"aiordma[{extras}] @ {self.built.wheel.as_uri()}"

    def check_sdist_tests(self) -> None:
        """The unit tests run from the unpacked sdist, which they do not leave."""
        with tarfile.open(self.built.sdist) as archive:
            archive.extractall(self.scratch, filter="data")
        source = self.scratch / self.built.sdist.name.removesuffix(".tar.gz")
        call(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=source, limit_s=600)
        python = ("env", f"PYTHONPATH={source}", "PYTHONASYNCIODEBUG=1", sys.executable)
        check_wheel.check_origin(source, self.scratch, *python)
        said = call(
            *(*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "tests/unit"),
            cwd=source, limit_s=1800,
        )  # fmt: skip
        print("    ", said.strip().splitlines()[-1])

    def check_roots(self, softroce: check_softroce.Softroce) -> None:
        """Install both in a clean root of each release, if this machine can make one."""
        reason = clean_roots.why_not()
        for release in clean_roots.RELEASES:
            if reason:
                self.checks.skip(f"clean {release}", reason)
                continue
            root = clean_roots.Root(release, self.scratch, self.built)
            try:
                if self.checks.run(f"clean {release}: system", root.make):
                    if (built := softroce.built) is not None:
                        self.checks.run(
                            f"clean {release}: aiordma-softroce",
                            functools.partial(root.check_softroce, built.wheel),
                        )
                    self.checks.run(f"clean {release}: wheel", root.check_wheel)
                    self.checks.run(f"clean {release}: sdist", root.check_sdist)
            finally:
                root.remove()


if __name__ == "__main__":
    words = "Build the sdist and the wheel, and check whether they can be published."
    sys.exit(check_wheel.main(Release, "release", words))
