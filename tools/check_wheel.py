"""Build the sdist and from it the wheel, and prove that they can be installed.

The wheel has to carry the stable-ABI tag, bundle no library, contain every file of the package but
the C that it is compiled from, and import from an empty directory in a venv that has nothing else,
on a machine without rdma-core, too.  tools/release_check.py runs the same checks of the files that
are published, and those that take long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import wheels
from checks import CheckFailedError, Checks, call, repository_files

#: The libraries that a compiled module may ask the dynamic linker for. Those of RDMA come from the
#: system, never from the wheel: a bundled libibverbs finds no provider.
ALLOWED_NEEDED = re.compile(
    r"(libc|libdl|libpthread|ld-linux[\w-]*|libibverbs|librdmacm)\.so\.\d+|libc\.musl-\w+\.so\.1"
)

#: The library, and its plugin for pytest.
PACKAGES = ("aiordma", "aiordma_pytest")

#: What is at the top of the wheel: the two, and the launcher of the fabric.
TOP = (*PACKAGES, "aiordma_fabric.py")

#: The compiled modules, and the libraries of the fabric and of faults, which are none.
MODULES = ("aiordma/_core/_compiled", "aiordma/_ffi/_rdma")
FABRIC = "aiordma/testing/fabric/_fabric"
SHIM = "aiordma/testing/faults/_shim"
#: The folders whose C is compiled, and not in the wheel.
COMPILED = (
    "aiordma/_core", "aiordma/_ffi", "aiordma/testing/fabric/lib", "aiordma/testing/faults"
)  # fmt: skip

#: Prints the error that a program without rdma-core gets.
WITHOUT_RDMA_CORE = """
import asyncio
import aiordma

async def main():
    try:
        await aiordma.connect("127.0.0.1", 18515)
    except aiordma.LibraryMissingError as error:
        print(error)

asyncio.run(main())
assert not aiordma.is_available()
assert "cannot load rdma-core's libraries" in aiordma.why_unavailable()
"""


class Package:
    """The sdist and the wheel under test; each method `check_` is a check.

    Args:
        checks: Runs them.
        scratch: An empty folder.

    Attributes:
        checks: The same.
        scratch: The same.
        built: The files, once they are built.
        modules: The compiled modules of the wheel, once they are unpacked.
    """

    def __init__(self, checks: Checks, scratch: Path) -> None:
        self.checks = checks
        self.scratch = scratch
        self.built = wheels.Built(scratch / "no.tar.gz", scratch / "no.whl")
        self.modules: list[Path] = []
        self._python = scratch / "venv" / "bin" / "python"

    def build(self) -> None:
        """Build both from a clean copy."""
        self.built = wheels.build(self.scratch)

    def check(self) -> None:
        """Run all checks of what is built."""
        run = self.checks.run
        run("sdist", self.check_sdist)
        run("abi3 tag", self.check_tag)
        run("contents", self.check_contents)
        run("libraries", self.check_libraries)
        run("stripped", self.check_stripped)
        run("smallest rdma-core", self.check_rdma_core)
        run("bill of materials", self.check_bill_of_materials)
        run("import in an empty venv", self.check_import)
        run("import without rdma-core", self.check_without_rdma_core)

    def check_sdist(self) -> None:
        """Every file that git knows is inside, and nothing else but the metadata."""
        with tarfile.open(self.built.sdist) as archive:
            inside = {
                name.partition("/")[2]
                for name in archive.getnames()
                if archive.getmember(name).isfile()
            }
        wanted = set(map(str, repository_files()))
        foreign = {name for name in inside - wanted if not name.startswith("aiordma.egg-info/")}
        foreign -= {"PKG-INFO", "setup.cfg"}
        if missing := wanted - inside:
            raise CheckFailedError(f"MANIFEST.in leaves out {sorted(missing)}")
        if foreign:
            raise CheckFailedError(f"the repository does not have {sorted(foreign)}")

    def check_tag(self) -> None:
        """The name says cp311-abi3."""
        tag = self.built.wheel.stem.split("-", 2)[2]
        if not re.match(r"cp311-abi3-(many|musl)?linux", tag):
            raise CheckFailedError(f"the tag is {tag}, expected cp311-abi3-linux_...")

    def check_contents(self) -> None:
        """The files of the package are inside, but no C, and nothing of other folders."""
        inside = {
            name
            for name in wheels.files(self.built.wheel)
            if ".dist-info/" not in name and not name.endswith(".so")
        }
        wanted = {
            str(path)
            for path in repository_files()
            if path.parts[0] in TOP
            and not (str(path.parent) in COMPILED and path.suffix in (".c", ".h", ".map"))
        }
        if missing := wanted - inside:
            raise CheckFailedError(f"missing: {sorted(missing)}")
        if foreign := inside - wanted:
            raise CheckFailedError(f"not of the package: {sorted(foreign)}")

    def check_libraries(self) -> None:
        """What is compiled needs no library but those of `ALLOWED_NEEDED`; none is bundled."""
        folder = self.scratch / "unpacked"
        self.modules = wheels.modules(self.built.wheel, folder)
        found = sorted(str(path.relative_to(folder)).partition(".")[0] for path in self.modules)
        if found != sorted((*MODULES, FABRIC, SHIM)):
            expected = ", ".join((*MODULES, FABRIC, SHIM))
            raise CheckFailedError(f"expected {expected}, found {found}")
        for module in self.modules:
            name = module.name
            plain = {f"{Path(each).name}.so" for each in (FABRIC, SHIM)}
            if ".abi3." not in name and name not in plain:
                raise CheckFailedError(f"{name} is not built for the stable ABI")
            needed = re.findall(
                r"\(NEEDED\).*\[(.+)\]", call("readelf", "--dynamic", "--wide", module)
            )
            print(f"     {name} needs {', '.join(needed) or 'nothing'}")
            others = [library for library in needed if not ALLOWED_NEEDED.fullmatch(library)]
            if name == f"{Path(FABRIC).name}.so":  # it is itself what the others ask for
                others += sorted(set(needed) & set(wheels.SYSTEM_LIBRARIES))
            if others:
                raise CheckFailedError(f"{name} needs {', '.join(others)}")

    def check_stripped(self) -> None:
        """The compiled modules have no table of symbols for a debugger."""
        for module in self.modules:
            sections = call("readelf", "--section-headers", "--wide", module)
            if left := re.findall(r"\.(?:symtab|debug_\w+)\b", sections):
                raise CheckFailedError(f"{module.name} is not stripped: {', '.join(left)}")

    def check_rdma_core(self) -> None:
        """The modules run with the oldest rdma-core that the documentation names."""
        reason = wheels.check_smallest_rdma_core(self.modules)
        print(f"     rdma-core {wheels.SMALLEST_RDMA_CORE} is for {reason}")

    def bill_of_materials(self) -> str:
        """The text of the bill of materials in the wheel.

        Raises:
            CheckFailedError: There is none.
        """
        names = [name for name in wheels.files(self.built.wheel) if ".dist-info/sboms/" in name]
        if not names:
            raise CheckFailedError("there is no bill of materials in .dist-info/sboms/")
        with zipfile.ZipFile(self.built.wheel) as archive:
            return archive.read(names[0]).decode()

    def check_bill_of_materials(self) -> None:
        """It lists the wheel itself, and the software of others of which code is inside."""
        bill = json.loads(self.bill_of_materials())
        version = self.built.wheel.name.split("-")[1]
        if bill["metadata"]["component"]["purl"] != f"pkg:pypi/aiordma@{version}":
            raise CheckFailedError(f"it is of {bill['metadata']['component']['purl']}")
        listed = {part["name"] for part in bill["components"]}
        if listed != {"cffi", "rdma-core"}:
            raise CheckFailedError(f"it lists {sorted(listed)}")

    def check_import(self) -> None:
        """It installs into an empty venv and imports from an empty directory."""
        empty = self.scratch / "empty"
        empty.mkdir()
        make_venv(self._python, Path(sys.executable), str(self.built.wheel))
        check_origin(self.scratch / "venv", empty, self._python)

    def check_without_rdma_core(self) -> None:
        """Without the libraries it imports, and its calls name the packages to install."""
        package = next(self._python.parents[1].glob("lib/python*/site-packages/aiordma"))
        for module in package.glob("_*/*.so"):
            # The name of a library that is nowhere, of the same length: the dynamic linker then
            # says what it says where rdma-core is not installed.
            content = module.read_bytes()
            for name in wheels.SYSTEM_LIBRARIES:
                content = content.replace(name.encode(), name.replace("lib", "not", 1).encode())
            module.write_bytes(content)
        code = ("-W", "error", "-c", WITHOUT_RDMA_CORE)
        said = call(self._python, *code, cwd=self.scratch / "empty", limit_s=60)
        check_missing(said)


def check_missing(said: str) -> None:
    """Fail if the error of a program without rdma-core does not name the packages."""
    for command in ("apt install", "dnf install", "zypper install", "pacman -S"):
        if command not in said:
            raise CheckFailedError(f"LibraryMissingError does not say {command!r}: {said!r}")
    if "No such file or directory" not in said:
        raise CheckFailedError(f"LibraryMissingError does not say what is missing: {said!r}")


def check_origin(folder: Path, cwd: Path, *python: str | Path) -> None:
    """Fail if an interpreter, started in `cwd`, imports the package from outside of `folder`."""
    code = "import aiordma; print(aiordma.__file__)"
    origin = call(*python, "-W", "error", "-c", code, cwd=cwd, limit_s=60).strip()
    if not Path(origin).is_relative_to(folder):
        raise CheckFailedError(f"it imported {origin}, which is not in {folder}")


def check_types(venv: Path, package: str) -> None:
    """Fail if pyright does not know the type of every public name of a package in a venv."""
    # It looks for packages where the interpreter on the path does.
    path = os.pathsep.join((str(venv / "bin"), os.environ["PATH"]))
    call(
        *("env", f"PATH={path}", f"VIRTUAL_ENV={venv}"),
        *(wheels.program("pyright"), "--verifytypes", package, "--ignoreexternal"),
        cwd=venv, limit_s=600,
    )  # fmt: skip


def make_venv(python: Path, base: Path, *what: str) -> None:
    """Make a venv, whose interpreter is to be `python`, and install packages into it.

    Args:
        python: In the folder `bin` of the venv, which is made anew.
        base: The interpreter that makes it.
        what: Words for ``pip install``.
    """
    folder = python.parents[1]
    shutil.rmtree(folder, ignore_errors=True)
    call(base, "-m", "venv", folder)
    install(python, *what)


def install(python: Path, *what: str) -> None:
    """Install packages, named as for ``pip install``, for an interpreter."""
    options = ("-q", "--disable-pip-version-check", "--no-input")
    call(python, "-m", "pip", "install", *options, *what, limit_s=600)


def main(kind: type[Package], name: str, description: str) -> int:
    """Read the command line, build, run the checks, and return the exit status.

    Args:
        kind: Of the checks; those after a failed build would only repeat its failure.
        name: Of the report.
        description: Of the tool.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--junit", type=Path, help="write the results to this file")
    options = parser.parse_args()
    checks = Checks(name, options.junit)
    with tempfile.TemporaryDirectory(prefix=f"aiordma-{name}-") as scratch:
        package = kind(checks, Path(scratch))
        if checks.run("build", package.build):
            package.check()
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main(Package, "wheel", "Build the sdist and the wheel, and check them."))
