"""Build the sdist and the wheel of ``aiordma-softroce``: ``make softroce-wheel`` fills ``dist``.

Beside the code the wheel has User-Mode Linux kernels of several series, and rdma-core, iproute2 and
perftest for their guests, so that ``python -m aiordma_softroce`` needs no compiler, no package of
the system and no network.  The kernels are those that the runner builds; the programs and libraries
come out of Debian's packages, as they are, but with the place of their libraries.  ``SOURCES.md``
in the wheel names the source of each with its version; two builds from the same packages and
kernels are the same, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checks import ROOT, CheckFailedError, call, repository_files
from wheels import DIST, imported, program, settings

sys.path.insert(0, str(ROOT / "softroce/src"))

from aiordma_softroce import SoftroceError, bundle, kernel_build, packages

PACKAGE = ROOT / "softroce"
#: As the files of both are called.
NAME = "aiordma_softroce"
#: Of a wheel with the kernels and programs of others.
LICENSE = (
    "Apache-2.0 AND GPL-2.0-only AND (GPL-2.0-only OR Linux-OpenIB) AND LGPL-2.1-only AND "
    "GPL-2.0-or-later AND LGPL-2.1-or-later AND BSD-3-Clause AND Zlib"
)
#: The kernels of a release: the long-term ones of Debian 12, and the newest.
KERNELS = ("6.1", "6.12", "7.2")
#: The oldest C library for which the wheel is: its version, in the tag of manylinux.
OLDEST_GLIBC = (2, 34)
_PLATFORM = "manylinux_{}_{}_x86_64".format(*OLDEST_GLIBC)

#: Debian's packages, and the programs that are taken from each.
_PROGRAMS = {
    "iproute2": r"(bin/ip|sbin/tc|usr/bin/rdma)",
    "rdmacm-utils": r"usr/bin/\w+",
    "ibverbs-utils": r"usr/bin/\w+",
    "perftest": r"usr/bin/ib_\w+",
}
#: Packages whose libraries belong to rdma-core, or come with the wrong release of it if not here.
_RDMA_CORE = (
    "libibverbs1", "librdmacm1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200",
    "libibumad3",
)  # fmt: skip
_PRIVATE = (
    "libbpf1", "libbsd0", "libcap2", "libelf1", "libmd0", "libmnl0", "libpci3", "libudev1",
    "libxtables12", "zlib1g",
)  # fmt: skip
#: Libraries of the C library, which each system has.
_GLIBC = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_LICENSE = re.compile(r"common-licenses/([\w.-]*\w)")


def main() -> None:
    """Build both into ``dist``."""
    parser = argparse.ArgumentParser(
        description="Build the sdist and the wheel of aiordma-softroce."
    )
    parser.add_argument("--folder", type=Path, default=DIST, help="in place of dist")
    parser.add_argument(
        "--kernels", nargs="+", default=KERNELS, metavar="X.Y", help="to have in it"
    )
    options = parser.parse_args()
    try:
        built = make(options.folder, options.kernels)
        print(built.sdist, built.wheel, sep="\n")
    except (CheckFailedError, SoftroceError) as error:
        sys.exit(f"make softroce-wheel: {error}")


@dataclass(frozen=True)
class Built:
    """What a build makes.

    Attributes:
        sdist: The archive of the sources, without kernels.
        wheel: The wheel, with them.
    """

    sdist: Path
    wheel: Path


def make(folder: Path, kernels: Sequence[str] = KERNELS) -> Built:
    """Build both, the wheel with these kernels, into a folder; what was there before is removed.

    Raises:
        CheckFailedError: A part needs a library that is not in the wheel, or a newer C library.
        SoftroceError: The kernel or a package cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="aiordma-softroce-") as scratch, settings():
        source, out = Path(scratch, "source"), Path(scratch, "out")
        _copy(source)
        _build(source, out, "--sdist")
        target = source / "src" / NAME / bundle.FOLDER.name
        for name in ("bin", "lib", "lib/libibverbs", "licenses", "private", "sbin", "tc"):
            (target / name).mkdir(parents=True)
        shutil.copy(source / "SOURCES.md", target)
        origins = [*_add_kernels(target, kernels), *_add_packages(target, Path(scratch))]
        _add_licenses(target / "licenses")
        _write_sources(target, origins)
        _check(target)
        _set_license(source)
        _build(source, out, "--wheel", f"-C--build-option=--plat-name={_PLATFORM}")
        folder.mkdir(exist_ok=True)
        for old in folder.glob(f"{NAME}-*"):
            old.unlink()
        (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
        return Built(Path(shutil.copy(sdist, folder)), Path(shutil.copy(wheel, folder)))


def _copy(source: Path) -> None:
    """Copy what git knows of the distribution: leftovers of a build would be in the wheel."""
    for path in repository_files():
        if path.is_relative_to(PACKAGE.name):
            copy = source / path.relative_to(PACKAGE.name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy)


def _build(source: Path, out: Path, *words: str) -> None:
    call(
        sys.executable, "-m", "build", "--no-isolation", *words, "--outdir", out, source,
        limit_s=600,
    )  # fmt: skip


def _add_kernels(target: Path, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Copy the kernels; return the lines of their origin."""
    origins = []
    licenses = target / "licenses"
    for name in names:
        kernel = kernel_build.kernel(name, install=os.geteuid() == 0)
        program = Path(shutil.copy(kernel, target / f"linux-{name}"))
        if kernel_build.REPRODUCIBLE_MARK not in program.read_bytes():
            print(f"the kernel {name} is of an older recipe, and a second build would differ: for "
                  f"a release, remove {kernel.parent} first", file=sys.stderr)  # fmt: skip
        call("strip", program)
        origins.append((program.name, "linux", kernel_build.version_of(kernel.parent)))
        (licenses / program.name).write_text("The Linux kernel: common-licenses/GPL-2, alone.\n")
    shutil.copy(kernel_build.CONFIG, licenses / "linux.config")
    # Not as a module of this package, which a type checker would look for.
    shutil.copy(kernel_build.__file__, licenses / "linux.recipe.txt")
    return origins


def _add_packages(target: Path, scratch: Path) -> list[tuple[str, str, str]]:
    """Copy programs and libraries out of Debian's packages; return their origins."""
    origins = []
    log = scratch / "log"
    if os.geteuid() == 0:
        packages.update(log)  # old lists name packages that are not there any more
    archives = packages.download((*_PROGRAMS, *_RDMA_CORE, *_PRIVATE), scratch / "debian", log)
    for name, archive in archives.items():
        unpacked = packages.unpack(archive, scratch / name, log)
        shown = "--showformat=${source:Package}\n${source:Version}"
        source, version = call("dpkg-deb", "--show", shown, archive).split()
        origins.append((name, source, version))
        shutil.copy((unpacked / "usr/share/doc" / name / "copyright").resolve(),
                    target / "licenses" / name)  # fmt: skip
        for path in unpacked.glob("usr/lib/*/tc/*.dist"):
            shutil.copy(path, target / "tc")
        if name in _PROGRAMS:
            _add_programs(unpacked, target / ("sbin" if name == "iproute2" else "bin"),
                          _PROGRAMS[name])  # fmt: skip
        else:
            _add_libraries(unpacked, target / ("lib" if name in _RDMA_CORE else "private"))
    return origins


def _add_licenses(folder: Path) -> None:
    """Copy the texts to which the files of the packages refer."""
    named = {name for path in folder.iterdir() for name in _LICENSE.findall(path.read_text())}
    (folder / "common-licenses").mkdir()
    for name in sorted(named):
        shutil.copy(Path("/usr/share/common-licenses", name), folder / "common-licenses")


def _add_programs(unpacked: Path, folder: Path, pattern: str) -> None:
    for path in sorted(unpacked.rglob("*")):
        name = str(path.relative_to(unpacked))
        if path.is_file() and not path.is_symlink() and re.fullmatch(pattern, name):
            copy = Path(shutil.copy(path, folder))
            copy.chmod(0o755)
            _find_libraries(copy, "$ORIGIN/../lib:$ORIGIN/../private")


def _add_libraries(unpacked: Path, folder: Path) -> None:
    """Copy the libraries under the names by which programs need them, and the drivers."""
    for path in sorted(unpacked.rglob("*.so*")):
        if path.is_symlink() or not path.is_file():
            continue
        if path.parent.name == "libibverbs":
            if not path.name.startswith(tuple(f"lib{name}-" for name in bundle.PROVIDERS)):
                continue
            copy = Path(shutil.copy(path, folder / "libibverbs"))
            _find_libraries(copy, "$ORIGIN/..")
        else:
            soname = call(program("patchelf"), "--print-soname", path).strip()
            copy = Path(shutil.copy(path, folder / (soname or path.name)))
            _find_libraries(copy, "$ORIGIN:$ORIGIN/../private")
            if soname == "libibverbs.so.1":
                _move_settings(copy)
        copy.chmod(0o644)


def _find_libraries(file: Path, places: str) -> None:
    call(program("patchelf"), "--set-rpath", places, file)


def _move_settings(library: Path) -> None:
    """Have libibverbs read its settings where the guest has them; without any it warns."""
    old, new = bundle.DEBIAN_SETTINGS.encode(), bundle.SETTINGS.encode()
    data = library.read_bytes()
    if data.count(old + b"\0") != 1 or len(old) != len(new):
        raise CheckFailedError(f"{library.name} does not name {bundle.DEBIAN_SETTINGS} once")
    library.write_bytes(data.replace(old, new))


def _write_sources(target: Path, origins: list[tuple[str, str, str]]) -> None:
    """Add the table of origins to the text on the sources."""
    rows = [f"| {name} | {source} {version} | `licenses/{name}` |"
            for name, source, version in origins]  # fmt: skip
    file = target / "SOURCES.md"
    file.write_text(file.read_text().replace("TABLE\n", "\n".join(rows) + "\n"))


def _set_license(source: Path) -> None:
    file = source / "pyproject.toml"
    line = f'license = "{LICENSE}"'
    file.write_text(re.sub("^license = .*$", line, file.read_text(), flags=re.MULTILINE))


def _check(target: Path) -> None:
    """Fail where a part needs what neither the wheel nor each system has."""
    kernels = sorted(target.glob("linux-*"))
    for path in kernels:
        if "INTERP" in call("readelf", "--program-headers", path):
            raise CheckFailedError(f"{path.name} is not linked statically")
    for path in sorted(target.rglob("*")):
        if not path.is_file() or path.read_bytes()[:4] != b"\x7fELF" or path in kernels:
            continue
        folders = (target / "lib", target / "private")
        for name in _NEEDED.findall(call("readelf", "--dynamic", path)):
            if name not in _GLIBC and not any((folder / name).exists() for folder in folders):
                raise CheckFailedError(f"{path.name} needs {name}, which no package here has")
        for version in imported(path):
            name, _, numbers = version.partition("_")
            if name == "GLIBC" and tuple(map(int, numbers.split("."))) > OLDEST_GLIBC:
                raise CheckFailedError(f"{path.name} needs {version}: raise OLDEST_GLIBC")


if __name__ == "__main__":
    main()
