"""Build the sdist and from it the wheel, and prove that they can be installed.

The wheel has to carry the stable-ABI tag, bundle no library, contain every file of the package but
the C that it is compiled from, and import from an empty directory in a venv that has nothing else,
on a machine without rdma-core, too.  The parts that take long are in tools/release_check.py.
"""

from __future__ import annotations

import argparse
import json
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

#: The compiled modules.
MODULES = ("aiordma/_core/_compiled", "aiordma/_ffi/_rdma")
#: The folders whose C is compiled, and not in the wheel.
COMPILED = ("aiordma/_core", "aiordma/_ffi")

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
    """The sdist and the wheel under test; each method is one check, in this order."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._python = scratch / "venv" / "bin" / "python"
        self._built = wheels.Built(scratch / "no.tar.gz", scratch / "no.whl")
        self._modules: list[Path] = []

    def build(self) -> None:
        """Build both from a clean copy."""
        self._built = wheels.build(self._scratch)

    def check_sdist(self) -> None:
        """Every file that git knows is inside, and nothing else but the metadata."""
        with tarfile.open(self._built.sdist) as archive:
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
        tag = self._built.wheel.stem.split("-", 2)[2]
        if not re.match(r"cp311-abi3-(many|musl)?linux", tag):
            raise CheckFailedError(f"the tag is {tag}, expected cp311-abi3-linux_...")

    def check_contents(self) -> None:
        """The files of the package are inside, but no C, and nothing of other folders."""
        inside = {
            name
            for name in zipfile.ZipFile(self._built.wheel).namelist()
            if ".dist-info/" not in name and not name.endswith(".so")
        }
        wanted = {
            str(path)
            for path in repository_files()
            if path.parts[0] in PACKAGES
            and not (str(path.parent) in COMPILED and path.suffix in (".c", ".h"))
        }
        if missing := wanted - inside:
            raise CheckFailedError(f"missing: {sorted(missing)}")
        if foreign := inside - wanted:
            raise CheckFailedError(f"not of the package: {sorted(foreign)}")

    def check_libraries(self) -> None:
        """The compiled modules need no library but those of `ALLOWED_NEEDED`; none is bundled."""
        folder = self._scratch / "unpacked"
        self._modules = wheels.modules(self._built.wheel, folder)
        found = sorted(str(path.relative_to(folder)).partition(".")[0] for path in self._modules)
        if found != sorted(MODULES):
            raise CheckFailedError(f"expected {', '.join(MODULES)}, found {found}")
        for module in self._modules:
            name = module.name
            if ".abi3." not in name:
                raise CheckFailedError(f"{name} is not built for the stable ABI")
            needed = re.findall(
                r"\(NEEDED\).*\[(.+)\]", call("readelf", "--dynamic", "--wide", module)
            )
            print(f"     {name} needs {', '.join(needed) or 'nothing'}")
            others = [library for library in needed if not ALLOWED_NEEDED.fullmatch(library)]
            if others:
                raise CheckFailedError(f"{name} needs {', '.join(others)}")

    def check_stripped(self) -> None:
        """The compiled modules have no table of symbols for a debugger."""
        for module in self._modules:
            sections = call("readelf", "--section-headers", "--wide", module)
            if left := re.findall(r"\.(?:symtab|debug_\w+)\b", sections):
                raise CheckFailedError(f"{module.name} is not stripped: {', '.join(left)}")

    def check_rdma_core(self) -> None:
        """The modules run with the oldest rdma-core that the documentation names."""
        reason = wheels.check_smallest_rdma_core(self._modules)
        print(f"     rdma-core {wheels.SMALLEST_RDMA_CORE} is for {reason}")

    def check_bill_of_materials(self) -> None:
        """It lists the wheel itself, and the software of others of which code is inside."""
        with zipfile.ZipFile(self._built.wheel) as archive:
            names = [name for name in archive.namelist() if ".dist-info/sboms/" in name]
            if not names:
                raise CheckFailedError("there is no bill of materials in .dist-info/sboms/")
            bill = json.loads(archive.read(names[0]))
        version = self._built.wheel.name.split("-")[1]
        if bill["metadata"]["component"]["purl"] != f"pkg:pypi/aiordma@{version}":
            raise CheckFailedError(f"it is of {bill['metadata']['component']['purl']}")
        listed = {part["name"] for part in bill["components"]}
        if listed != {"cffi", "rdma-core"}:
            raise CheckFailedError(f"it lists {sorted(listed)}")

    def check_import(self) -> None:
        """It installs into an empty venv and imports from an empty directory."""
        empty = self._scratch / "empty"
        empty.mkdir()
        install(self._python, Path(sys.executable), str(self._built.wheel))
        code = "import aiordma; print(aiordma.__file__)"
        origin = call(self._python, "-W", "error", "-c", code, cwd=empty, limit_s=60).strip()
        if not Path(origin).is_relative_to(self._scratch / "venv"):
            raise CheckFailedError(f"it imported {origin}, not the installed package")

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
        said = call(self._python, *code, cwd=self._scratch / "empty", limit_s=60)
        check_missing(said)


def check_missing(said: str) -> None:
    """Fail if the error of a program without rdma-core does not name the packages."""
    for command in ("apt install", "dnf install", "zypper install", "pacman -S"):
        if command not in said:
            raise CheckFailedError(f"LibraryMissingError does not say {command!r}: {said!r}")
    if "No such file or directory" not in said:
        raise CheckFailedError(f"LibraryMissingError does not say what is missing: {said!r}")


def install(python: Path, base: Path, *what: str) -> None:
    """Make a venv, whose interpreter is to be `python`, and install packages into it.

    Args:
        python: In the folder `bin` of the venv, which is made anew.
        base: The interpreter that makes it.
        what: Words for ``pip install``.
    """
    folder = python.parents[1]
    shutil.rmtree(folder, ignore_errors=True)
    call(base, "-m", "venv", folder)
    options = ("-q", "--disable-pip-version-check", "--no-input")
    call(python, "-m", "pip", "install", *options, *what, limit_s=600)


def main() -> int:
    """Run the checks; those after a failed build would only repeat its failure."""
    parser = argparse.ArgumentParser(description="Build the sdist and the wheel, and check them.")
    parser.add_argument("--junit", type=Path, help="write the results to this file")
    options = parser.parse_args()
    checks = Checks("wheel", options.junit)
    with tempfile.TemporaryDirectory(prefix="aiordma-wheel-") as scratch:
        package = Package(Path(scratch))
        if checks.run("build", package.build):
            checks.run("sdist", package.check_sdist)
            checks.run("abi3 tag", package.check_tag)
            checks.run("contents", package.check_contents)
            checks.run("libraries", package.check_libraries)
            checks.run("stripped", package.check_stripped)
            checks.run("smallest rdma-core", package.check_rdma_core)
            checks.run("bill of materials", package.check_bill_of_materials)
            checks.run("import in an empty venv", package.check_import)
            checks.run("import without rdma-core", package.check_without_rdma_core)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
