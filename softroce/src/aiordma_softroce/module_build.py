"""Software iWARP for the kernel of the ``qemu`` engine, where the distribution does not build it.

Debian has the source of the module `siw` and leaves it out of its kernel.  It is compiled against
the headers of that kernel, out of packages that are unpacked and not installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from . import cache, kernel_build, kernel_source, packages, tools
from .errors import InfrastructureError

_KIND = "siw"
_WHAT = "the module siw for the kernel of the qemu engine"
#: To be raised with each change of this file that changes the module.
_RECIPE = 1
_NEEDED_BYTES = 700 << 20
_LIMIT_S = 900.0
#: The folder of the source in that of the kernel, and the programs that unpack and compile it.
_SOURCE = "drivers/infiniband/sw/siw"
_BUILD_PACKAGES = ("make", "xz-utils")
#: Packages that are unpacked for the build; the others that these need have to be installed.
_PARTS = ("linux-headers-", "linux-kbuild-", "linux-compiler-")


def siw(image: Path, *, verbose: bool = False, install: bool = False) -> Path:
    """Return the file of the module for the kernel in `image`, and compile it on first use.

    Args:
        image: folder of the kernel, from `qemu_image.image`.
        verbose: show what the tools say.
        install: as root, install packages that are missing.

    Raises:
        InfrastructureError: it cannot be compiled; the message says what to do.
        Interrupted: a signal came.
    """
    found = cached(image) or cache.obtain(
        _KIND, _key(image), _NEEDED_BYTES, lambda shop: _build(shop, image, verbose, install),
        what=_WHAT,
    )  # fmt: skip
    return found / "siw.ko"


def cached(image: Path) -> Path | None:
    """Return the folder of the module for the kernel in `image`; None before it is compiled."""
    return cache.find(_KIND, _key(image))


def _key(image: Path) -> str:
    return cache.digest(_RECIPE, image.name)


def absent(image: Path) -> list[str]:
    """Return the packages that have to be installed before a build, by the lists as they are."""
    return packages.missing((*_BUILD_PACKAGES, *parts_of(_headers(image))[1]))


def _headers(image: Path) -> str:
    (release,) = (folder.name for folder in (image / "lib/modules").iterdir())
    return f"linux-headers-{release}"


def needs(module: Path) -> tuple[str, ...]:
    """Return the modules that have to be loaded before `module`."""
    done = tools.query(["/sbin/modinfo", "-F", "depends", str(module)])
    return tuple(name for name in done.stdout.strip().split(",") if name)


def _build(shop: cache.Workshop, image: Path, verbose: bool, install: bool) -> str:
    if any(letter in str(shop.scratch) for letter in " :"):
        raise InfrastructureError(
            f"{_WHAT} cannot be built in {cache.root()}, because the kernel's make takes no spaces "
            "and colons: set AIORDMA_SOFTROCE_CACHE to another folder"
        )
    tools.say(f"building {_WHAT}, once; the log is {shop.log}")
    headers = _headers(image)
    advice = (
        f"{_WHAT} needs the package {headers}, which is not available (any more): remove {image}, "
        "and the next run fetches the newest kernel; or use --engine uml"
    )
    packages.require_apt()
    if os.geteuid() == 0:
        # Old lists name a package that is not there any more.
        with contextlib.suppress(InfrastructureError):
            packages.update(shop.log, verbose=verbose)
    if not packages.candidate(headers):
        packages.update(shop.log, verbose=verbose)
        if not packages.candidate(headers):
            raise InfrastructureError(advice)
    packages.ensure(absent(image), _WHAT, shop.log, verbose=verbose, install=install)
    try:
        archives = packages.download(
            parts_of(headers)[0], shop.scratch / "archives", shop.log, verbose=verbose
        )
    except InfrastructureError as error:
        raise InfrastructureError(f"{error}\n{advice}") from None
    version = packages.version_of(archives[headers])
    root = shop.scratch / "root"
    for archive in archives.values():
        packages.unpack(archive, root, shop.log, verbose=verbose)
        archive.unlink()
    tree = root / "usr/src" / headers
    # It has one line, which includes another file by the place where it would be installed.
    makefile = tree / "Makefile"
    makefile.write_text(makefile.read_text().replace(" /usr/src/", f" {root}/usr/src/"))
    series = kernel_build.series(version)
    source = kernel_source.get_exactly(shop, series, version, verbose=verbose)
    if source is None:
        source, version = kernel_source.get(shop, series, verbose=verbose)
    folder = shop.scratch / "linux"
    folder.mkdir()
    tools.run(
        ["tar", "-xf", str(source), "-C", str(folder), "--strip-components=1", "--wildcards",
         f"*/{_SOURCE}/*"],
        title="unpacking the source of the module",
        log=shop.log,
        limit=_LIMIT_S,
        verbose=verbose,
    )  # fmt: skip
    tools.run(
        [
            *kernel_build.MAKE,
            "-C",
            str(tree),
            f"M={folder / _SOURCE}",
            "CONFIG_RDMA_SIW=m",
            "modules",
        ],
        title="compiling the module",
        log=shop.log,
        limit=_LIMIT_S,
        verbose=verbose,
        # A compiler that is killed leaves its temporary files behind.
        environment={"TMPDIR": str(shop.scratch)},
    )
    shutil.copyfile(folder / _SOURCE / "siw.ko", shop.result / "siw.ko")
    return version


def parts_of(package: str) -> tuple[list[str], list[str]]:
    """Return the packages that a build unpacks, `package` among them; and those that they need."""
    parts, others = [package], list[str]()
    for part in parts:  # it grows meanwhile
        for name in packages.depends(part):
            # The headers of some releases need the kernel, which is there.
            if name.startswith("linux-") and not name.startswith(_PARTS):
                continue
            found = parts if name.startswith(_PARTS) else others
            if name not in found:
                found.append(name)
    return parts, others
