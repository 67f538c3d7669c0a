"""Build the sdist and from it the wheel, and prove that it is what a user can install.

The wheel has to carry the stable-ABI tag, bundle no library, contain every file of the package, and
import from an empty directory in a venv that has nothing else.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import zipfile
from pathlib import Path

from checks import CheckFailedError, Checks, call, copy_repository, repository_files

#: What a compiled module may ask the dynamic linker for. The RDMA libraries come from the
#: system, never from the wheel: a bundled libibverbs finds no provider.
ALLOWED_NEEDED = re.compile(
    r"(libc|libdl|libpthread|ld-linux[\w-]*|libibverbs|librdmacm)\.so\.\d+|libc\.musl-\w+\.so\.1"
)

#: The library, and its plugin for pytest.
PACKAGES = ("aiordma", "aiordma_pytest")

#: The compiled modules.
MODULES = ("aiordma/_core/_compiled", "aiordma/_ffi/_rdma")


class Wheel:
    """The wheel under test; each method is one check, in this order."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._path = scratch / "not-built.whl"

    def build(self) -> None:
        """Build from a clean copy, with the tools installed here, not those of an index today."""
        source, out = self._scratch / "source", self._scratch / "dist"
        # A copy, since leftovers of earlier builds in the tree would end up in the wheel.
        copy_repository(source)
        call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, limit_s=600)
        wheels = list(out.glob("*.whl"))
        if len(wheels) != 1:
            raise CheckFailedError(f"expected one wheel, found {[path.name for path in wheels]}")
        self._path = wheels[0]

    def check_tag(self) -> None:
        """The name says cp311-abi3."""
        tag = self._path.stem.split("-", 2)[2]
        if not re.match(r"cp311-abi3-(many|musl)?linux", tag):
            raise CheckFailedError(f"the tag is {tag}, expected cp311-abi3-linux_...")

    def check_contents(self) -> None:
        """Every file of the package that git knows is inside, and nothing of other folders."""
        inside = {
            name for name in zipfile.ZipFile(self._path).namelist() if ".dist-info/" not in name
        }
        wanted = {str(path) for path in repository_files() if path.parts[0] in PACKAGES}
        missing = sorted(wanted - inside)
        foreign = sorted(name for name in inside if name.partition("/")[0] not in PACKAGES)
        if missing or foreign:
            raise CheckFailedError(f"missing: {missing}; not of the package: {foreign}")

    def check_libraries(self) -> None:
        """The compiled modules need no library but those of `ALLOWED_NEEDED`; none is bundled."""
        with zipfile.ZipFile(self._path) as archive:
            shared = [name for name in archive.namelist() if re.search(r"\.so(\.|$)", name)]
            found = sorted(name.partition(".")[0] for name in shared)
            if found != sorted(MODULES):
                raise CheckFailedError(f"expected {', '.join(MODULES)}, found {shared}")
            modules = [archive.extract(name, self._scratch / "unpacked") for name in shared]
        for module in modules:
            name = Path(module).name
            if ".abi3." not in name:
                raise CheckFailedError(f"{name} is not built for the stable ABI")
            dynamic = call("readelf", "--dynamic", "--wide", module)
            needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
            print(f"     {name} needs {', '.join(needed) or 'nothing'}")
            others = [library for library in needed if not ALLOWED_NEEDED.fullmatch(library)]
            if others:
                raise CheckFailedError(f"{name} needs {', '.join(others)}")

    def check_import(self) -> None:
        """It installs into an empty venv and imports from an empty directory."""
        venv, empty = self._scratch / "venv", self._scratch / "empty"
        empty.mkdir()
        call(sys.executable, "-m", "venv", venv)
        python = venv / "bin" / "python"
        call(
            *(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"),
            self._path,
            limit_s=300,
        )
        code = "import aiordma; print(aiordma.__file__)"
        origin = call(python, "-W", "error", "-c", code, cwd=empty, limit_s=60).strip()
        if not Path(origin).is_relative_to(venv):
            raise CheckFailedError(f"it imported {origin}, not the installed package")


def main() -> int:
    """Run the checks; those after a failed build would only repeat its failure."""
    parser = argparse.ArgumentParser(description="Build the wheel and check it.")
    parser.add_argument("--junit", type=Path, help="write the results to this file")
    options = parser.parse_args()
    checks = Checks("wheel", options.junit)
    with tempfile.TemporaryDirectory(prefix="aiordma-wheel-") as scratch:
        wheel = Wheel(Path(scratch))
        if checks.run("build", wheel.build):
            checks.run("abi3 tag", wheel.check_tag)
            checks.run("contents", wheel.check_contents)
            checks.run("libraries", wheel.check_libraries)
            checks.run("import in an empty venv", wheel.check_import)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
