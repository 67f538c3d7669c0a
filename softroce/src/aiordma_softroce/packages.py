"""The distribution's packages: which there are, which are missing, and how to get them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from . import tools
from .errors import InfrastructureError

_INSTALL_SECONDS = 1800.0
_NUMBER = re.compile(r"\d+")


def missing(packages: Sequence[str]) -> list[str]:
    """Return those of `packages` that are not installed.

    Without dpkg nothing is reported: the tools that are needed then show up missing by name.
    """
    if shutil.which("dpkg-query") is None:
        return []
    done = tools.query(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages])
    installed = {
        name for name, state in map(str.split, done.stdout.splitlines()) if state == "installed"
    }
    return [package for package in packages if package not in installed]


def may_change_the_system(install: bool) -> bool:
    """Return whether that is asked for, by the option ``--install`` or by the environment."""
    return install or os.environ.get("AIORDMA_SOFTROCE_INSTALL") == "1"


def ensure(
    packages: Sequence[str],
    purpose: str,
    log: Path,
    *,
    verbose: bool = False,
    install: bool = False,
) -> None:
    """Install the missing `packages` if that is asked for, or say how to.

    Args:
        packages: names in Debian and Ubuntu.
        purpose: their purpose, as in "the uml engine".
        log: a file that gets the output of the package manager.
        verbose: show that output as well.
        install: whether root wants them installed; so does AIORDMA_SOFTROCE_INSTALL=1.

    Raises:
        InfrastructureError: with the command to run when nothing is installed, or the reason.
    """
    absent = missing(packages)
    if not absent:
        return
    words = " ".join(absent)
    if shutil.which("apt-get") is None:
        raise InfrastructureError(
            f"{purpose} needs packages that Debian and Ubuntu call {words}: install what your "
            "distribution calls them"
        )
    if os.geteuid() != 0:
        raise InfrastructureError(
            f"{purpose} needs packages that are not installed; run\n"
            f"  sudo apt-get install --no-install-recommends {words}"
        )
    if not may_change_the_system(install):
        raise InfrastructureError(
            f"{purpose} needs packages that are not installed; run\n"
            f"  apt-get install --no-install-recommends {words}\n"
            "or have that done by --install, or by AIORDMA_SOFTROCE_INSTALL=1 in the environment"
        )
    tools.say(f"installing for {purpose}: {words}")
    if any(not candidate(package) for package in absent):
        update(log, verbose=verbose)
    tools.run(
        ["apt-get", "install", "-y", "--no-install-recommends", *absent],
        title="installing packages",
        log=log,
        limit=_INSTALL_SECONDS,
        verbose=verbose,
        environment={"DEBIAN_FRONTEND": "noninteractive"},
    )


def update(log: Path, *, verbose: bool = False) -> None:
    """Fetch the lists of packages; needs root.

    Raises:
        InfrastructureError: it failed, or this user may not.
    """
    if os.geteuid() != 0:
        raise InfrastructureError(
            "the lists of packages lack what is needed; run\n  sudo apt-get update"
        )
    tools.run(
        ["apt-get", "update"],
        title="fetching the lists of packages",
        log=log,
        limit=_INSTALL_SECONDS,
        verbose=verbose,
    )


def candidate(package: str, apt: Sequence[str] = ()) -> str:
    """Return the version that would be installed or downloaded, or "" if there is none.

    Args:
        package: its name.
        apt: options of apt, with which it knows other packages.
    """
    for line in tools.query(["apt-cache", *apt, "policy", package]).stdout.splitlines():
        name, _, version = line.strip().partition(": ")
        if name == "Candidate":
            return "" if version == "(none)" else version
    return ""


def depends(package: str) -> list[str]:
    """Return the packages that `package` cannot be without, one level deep.

    Of alternatives, which apt-cache marks by a bar before all but the last, it is the first.
    """
    done = tools.query(["apt-cache", "depends", "--important", package])
    found: list[str] = []
    decided = False
    for words in map(str.split, done.stdout.splitlines()):
        if len(words) != 2 or words[0] not in ("Depends:", "|Depends:"):
            continue
        if not decided and not words[1].startswith("<"):  # not a virtual package
            found.append(words[1])
        decided = words[0].startswith("|")
    return found


def newest(pattern: str, least: tuple[int, ...], log: Path) -> str:
    """Return the package with the highest number in its name.

    Args:
        pattern: a regular expression for the whole name, with one group for the number.
        least: the lowest number that will do.
        log: a file for the output of an update of the lists, done once when nothing is found.

    Raises:
        InfrastructureError: there is none.
    """
    require_apt()
    if os.geteuid() == 0:
        # Only asked for when a kernel is about to be made, which takes minutes: old lists, or lists
        # from before a source was added, name a package that is not the newest.
        with contextlib.suppress(InfrastructureError):
            update(log)
    found = _numbered(pattern)
    if not found or max(found)[0] < least:
        update(log)
        found = _numbered(pattern)
    if not found or max(found)[0] < least:
        wanted = ".".join(map(str, least))
        raise InfrastructureError(
            f"no package {pattern} of version {wanted} or later is available: check the sources of "
            "apt (/etc/apt/sources.list)"
        )
    return max(found)[1]


def require_apt() -> None:
    """Raise `InfrastructureError` where no apt is."""
    if shutil.which("apt-cache") is None:
        raise InfrastructureError(
            "this engine takes its kernel from the packages of Debian or Ubuntu, and there is no "
            "apt-cache here: use a container of one of them, or --engine host"
        )


def numbers(pattern: str, apt: Sequence[str] = ()) -> list[tuple[int, ...]]:
    """Return the numbers in the names of packages; see `newest` and `candidate`."""
    return [number for number, _ in _numbered(pattern, apt)]


def newest_known(pattern: str, least: tuple[int, ...]) -> str | None:
    """Return what `newest` would, from the lists of packages as they are, or None."""
    if shutil.which("apt-cache") is None:
        return None
    found = _numbered(pattern)
    return max(found)[1] if found and max(found)[0] >= least else None


def _numbered(pattern: str, apt: Sequence[str] = ()) -> list[tuple[tuple[int, ...], str]]:
    done = tools.query(["apt-cache", *apt, "pkgnames", "linux-"])
    whole = re.compile(pattern)
    return [
        (tuple(map(int, _NUMBER.findall(match[1]))), name)
        for name in done.stdout.split()
        # Names that other packages only mention are listed too.
        if (match := whole.fullmatch(name)) and candidate(name, apt)
    ]


def download(
    names: Sequence[str], folder: Path, log: Path, *, verbose: bool = False, apt: Sequence[str] = ()
) -> dict[str, Path]:
    """Fetch packages into a new folder without installing them; return their archives by name.

    Needs no root; a name may be followed by "=" and a version; for `apt` see `candidate`.

    Raises:
        InfrastructureError: a package is not available.
    """
    folder.mkdir()
    options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    tools.run(
        ["apt-get", *options, *apt, "download", *names],
        title=f"downloading {names[0] if len(names) == 1 else f'{len(names)} packages'}",
        log=log,
        limit=_INSTALL_SECONDS,
        verbose=verbose,
        directory=folder,
    )
    # The version, in which apt writes a colon as %3a, and the architecture follow the name.
    archives = {path.name.partition("_")[0]: path for path in folder.glob("*.deb")}
    return {name: archives[name] for name in (each.partition("=")[0] for each in names)}


def version_of(archive: Path) -> str:
    """Return the version of the package in an archive."""
    return tools.query(["dpkg-deb", "--field", str(archive), "Version"]).stdout.strip()


def unpack(archive: Path, target: Path, log: Path, *, verbose: bool = False) -> Path:
    """Unpack the archive of a package below `target`, and return that.

    Raises:
        InfrastructureError: it cannot be unpacked.
    """
    tools.run(
        ["dpkg", "-x", str(archive), str(target)],
        title=f"unpacking {archive.name}",
        log=log,
        limit=_INSTALL_SECONDS,
        verbose=verbose,
    )
    return target
