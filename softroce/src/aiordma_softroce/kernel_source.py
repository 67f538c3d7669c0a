"""The source of a guest's kernel: a package ``linux-source-X.Y`` of the distribution, or of Debian.

A system knows one or two of them.  A kernel that is asked for by name, and that the system does not
know, is looked up in the other releases of Debian: with lists of packages of its own, in a scratch
folder, so that the system's stay as they are and no root is needed.  apt checks their signatures
with Debian's keys, as for any other package.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from . import packages, tools
from .cache import Workshop
from .errors import InfrastructureError
from .options import OLDEST_KERNEL

PATTERN = r"linux-source-([0-9.]+)"
#: Suites of Debian, and whether each is on the mirror for security; a package is taken from the
#: first that has the highest version of it.
_SUITES = (
    ("bookworm", False), ("bookworm-security", True), ("bookworm-backports", False),
    ("trixie", False), ("trixie-security", True), ("trixie-backports", False), ("sid", False),
)  # fmt: skip
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LISTS_SECONDS = 900.0


def package_of(name: str) -> str:
    """Return the package with the source of the kernel `name`."""
    return f"linux-source-{name}"


def get(shop: Workshop, name: str | None, *, verbose: bool = False) -> tuple[Path, str]:
    """Return the archive with the source, and the version of its package.

    An installed package is used; otherwise the archive is downloaded into the scratch folder, which
    needs no root and leaves nothing behind.

    Args:
        shop: where the kernel is made.
        name: series of the kernel, such as ``6.1``; None is the newest that the system knows.
        verbose: show what the tools say.

    Raises:
        InfrastructureError: it is not available.
    """
    apt: tuple[str, ...] = ()
    if name is None:
        package = packages.newest(PATTERN, OLDEST_KERNEL, shop.log)
    else:
        package = package_of(name)
        apt = _find(shop, name, verbose)
    if packages.missing([package]):
        target, version = _unpacked(shop, package, verbose, apt)
    else:
        target = Path("/")
        version = tools.query(["dpkg-query", "-W", "-f", "${Version}", package]).stdout.strip()
    return _archive_in(target, package, version), version


def get_exactly(shop: Workshop, name: str, version: str, *, verbose: bool = False) -> Path | None:
    """Return the archive of `get` in this version of its package; None if there is none."""
    package = package_of(name)
    try:
        target, _ = _unpacked(shop, f"{package}={version}", verbose)
    except InfrastructureError:
        return None
    return _archive_in(target, package, version)


def _unpacked(
    shop: Workshop, package: str, verbose: bool, apt: tuple[str, ...] = ()
) -> tuple[Path, str]:
    """Return the folder of a package that has been downloaded, and its version."""
    (archive,) = packages.download(
        [package], shop.scratch / f"{package}.deb", shop.log, verbose=verbose, apt=apt
    ).values()
    version = packages.version_of(archive)
    target = packages.unpack(archive, shop.scratch / package, shop.log, verbose=verbose)
    archive.unlink()
    return target, version


def _archive_in(target: Path, package: str, version: str) -> Path:
    source = target / "usr/src"
    # Debian has it right there, Ubuntu in a folder of its own with a link to it.
    for pattern in (f"{package}.tar.*", f"{package}/{package}.tar.*"):
        for archive in source.glob(pattern):
            if archive.is_file() and not archive.is_symlink():
                return archive
    raise InfrastructureError(f"the package {package} {version} has no source archive in usr/src")


def _find(shop: Workshop, name: str, verbose: bool) -> tuple[str, ...]:
    """Return options for apt with which it knows the package of the kernel `name`."""
    package = package_of(name)
    packages.require_apt()
    if not packages.missing([package]):
        return ()
    if os.geteuid() == 0:
        # Old lists name a package that is not there any more.
        with contextlib.suppress(InfrastructureError):
            packages.update(shop.log)
    if packages.candidate(package):
        return ()
    apt = _other_releases(shop, name, verbose)
    if packages.candidate(package, apt):
        return apt
    known = {*packages.numbers(PATTERN), *packages.numbers(PATTERN, apt)}
    names = ", ".join(".".join(map(str, found)) for found in sorted(known))
    raise InfrastructureError(
        f"no source of Linux {name} is available: neither the packages of this system nor Debian's "
        f"other releases have {package}; they have {names or 'none'}"
    )


def _mirrors() -> dict[bool, str]:
    """Return the addresses of Debian that apt has, by whether it is the one for security."""
    found = tools.query(
        [
            "apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(ORIGIN)",
            "Created-By: Packages",
        ]
    )  # fmt: skip
    mirrors: dict[bool, str] = {}
    for words in map(str.split, found.stdout.splitlines()):
        if len(words) == 3 and words[2] == "Debian":
            mirrors.setdefault(words[1].endswith("-security"), words[0])
    return mirrors


def _other_releases(shop: Workshop, name: str, verbose: bool) -> tuple[str, ...]:
    """Return options with which apt knows Debian's releases, and fetch their lists."""
    if not KEYS.exists():
        raise InfrastructureError(
            f"the packages of this system have no {package_of(name)}, and to look for it in "
            "Debian's takes Debian's keys: install debian-archive-keyring"
        )
    mirrors = _mirrors()
    if False not in mirrors:
        raise InfrastructureError(
            f"the packages of this system have no {package_of(name)}, and apt has no mirror of "
            "Debian to look for it (of another distribution, or before apt-get update)"
        )
    folder = shop.scratch / "apt"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "status").touch()
    sources = folder / "sources.list"
    sources.write_text("".join(f"deb [signed-by={KEYS}] {mirrors[security]} {suite} main\n"
                               for suite, security in _SUITES if security in mirrors))  # fmt: skip
    apt = (
        "-o", f"Dir::State={folder}/state",
        "-o", f"Dir::State::status={folder}/status",
        "-o", f"Dir::Cache={folder}/cache",
        "-o", f"Dir::Etc::SourceList={sources}",
        "-o", "Dir::Etc::SourceParts=-",
        "-o", "Acquire::Languages=none",
        "-o", "APT::Sandbox::User=",
    )  # fmt: skip
    tools.run(
        ["apt-get", *apt, "update"],
        title="fetching the lists of Debian's other releases",
        log=shop.log,
        limit=_LISTS_SECONDS,
        verbose=verbose,
    )
    return apt
