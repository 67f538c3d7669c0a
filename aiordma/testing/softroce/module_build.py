"""Software iWARP for the kernel of the ``qemu`` engine, where the distribution does not build it.

Debian has the source of the module `siw` and leaves it out of its kernel.  It is compiled against
the headers of that kernel, out of packages that are unpacked and not installed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from . import cache, kernel_build, kernel_source, packages, tools
from .errors import InfrastructureError

_KIND = "siw"
_WHAT = "the module siw for the kernel of the qemu engine"
#: To be raised with each change of this file that changes the module.
_RECIPE = 1
_NEEDED_BYTES = 400 << 20
_LIMIT_S = 900.0
#: The folder of the source in that of the kernel, and the programs that unpack and compile it.
_SOURCE = "drivers/infiniband/sw/siw"
_BUILD_PACKAGES = ("make", "xz-utils")


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
    key = cache.digest(_RECIPE, image.name)
    found = cache.find(_KIND, key) or cache.obtain(
        _KIND, key, _NEEDED_BYTES, lambda shop: _build(shop, image, verbose, install), what=_WHAT
    )
    return found / "siw.ko"


def needs(module: Path) -> tuple[str, ...]:
    """Return the modules that have to be loaded before `module`."""
    done = tools.query(["/sbin/modinfo", "-F", "depends", str(module)])
    return tuple(name for name in done.stdout.strip().split(",") if name)


def _build(shop: cache.Workshop, image: Path, verbose: bool, install: bool) -> str:
    tools.say(f"building {_WHAT}, once; the log is {shop.log}")
    (release,) = (folder.name for folder in (image / "lib/modules").iterdir())
    headers = f"linux-headers-{release}"
    if not packages.candidate(headers):
        raise InfrastructureError(
            f"{_WHAT} needs the package {headers}, and apt does not know it (any more): remove "
            f"{image}, and the next run fetches the newest kernel; or use --engine uml"
        )
    parts, others = parts_of(headers)
    packages.ensure(
        packages.missing((*_BUILD_PACKAGES, *others)), _WHAT, shop.log, verbose=verbose,
        install=install,
    )  # fmt: skip
    archives = packages.download(parts, shop.scratch / "archives", shop.log, verbose=verbose)
    root = shop.scratch / "root"
    for archive in archives.values():
        packages.unpack(archive, root, shop.log, verbose=verbose)
    tree = root / "usr/src" / headers
    # It has one line, which includes another file by the place where it would be installed.
    makefile = tree / "Makefile"
    makefile.write_text(makefile.read_text().replace(" /usr/src/", f" {root}/usr/src/"))
    source, version = kernel_source.get(shop, kernel_build.series(release), verbose=verbose)
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
        ["make", "-C", str(tree), f"M={folder / _SOURCE}", "CONFIG_RDMA_SIW=m", "modules"],
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
    """Return the packages of the kernel that `package` needs, and itself; and the other ones."""
    parts, others = [package], list[str]()
    for part in parts:  # it grows meanwhile
        for name in packages.depends(part):
            found = parts if name.startswith("linux-") else others
            if name not in found:
                found.append(name)
    return parts, others
