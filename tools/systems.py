"""Other systems: Debian releases with newer Pythons and rdma-cores, for stages of ``make test``.

Usage: ``tools/systems.py 3.15 [--or-here] -- COMMAND...`` runs a command in the system that has
this Python, where ``python`` is the project's own environment, for example::

    tools/systems.py 3.15 -- python -m pytest tests/unit
    tools/systems.py 3.15 -- python -m aiordma_softroce -- bash

``tools/systems.py --make sid`` makes the system of a release and its environments. Without
arguments the systems are listed.

A system is a folder, made by debootstrap and kept in the user's cache. It is entered with a mount
namespace and chroot, so that nothing stays mounted afterwards. The command finds a copy of the
repository in the place of the repository, with an extension that was built there: against that
rdma-core's headers, with that compiler. A guest of softroce has the system's files, so that the
command meets its Python and its rdma-core there, too.

The exit status is 77 if the system cannot be had here, with the reason as the last line. With
``--or-here`` the command runs on this machine then, with the Python that runs this.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import clean_roots
from checks import ROOT, CheckFailedError, call, copy_repository

#: The exit status for "not to be had here", as automake's tests have it.
ABSENT = 77
#: How the lines begin that say what a command runs with, or why it does not.
_SYSTEM, _ABSENT = "system: ", "absent: "
MARKS = (_SYSTEM, _ABSENT)
COPIES = ROOT / "build" / "systems"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_DAY_S = 86400.0
#: What is wanted beside the smallest variant of debootstrap.
_BASE = ("ca-certificates",)
_ENTER = ROOT / "tools" / "enter.sh"


@dataclass(frozen=True, slots=True)
class System:
    """A release of Debian.

    Attributes:
        release: its name in the archive.
        pythons: those of its Pythons that the tests run with.
        days: for which it is kept. The packages of a release that is being made move daily.
    """

    release: str
    pythons: tuple[str, ...]
    days: int

    @property
    def root(self) -> Path:
        """The folder of its files."""
        return cache() / self.release


SYSTEMS = (System("trixie", ("3.13",), days=30), System("sid", ("3.14", "3.15"), days=7))


class AbsentError(Exception):
    """The system cannot be had here, which is no fault; the text says why."""


def cache() -> Path:
    """The folder of all systems, in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "aiordma" / "systems"


def system_of(python: str) -> System:
    """The system that has this Python, such as "3.15"."""
    for system in SYSTEMS:
        if python in system.pythons:
            return system
    known = ", ".join(python for system in SYSTEMS for python in system.pythons)
    raise CheckFailedError(f"no system has a CPython {python}; there is: {known}")


def why_not() -> str:
    """Why no system can be had here; an empty text if one can."""
    if reason := clean_roots.why_not():
        return reason
    if not KEYS.exists():
        return "the keys of Debian's archive are not installed (debian-archive-keyring)"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "this container lets no program have mounts of its own"
    return ""


def make(system: System) -> None:
    """Make a system that is not there, or is too old, or lacks packages, and its environments.

    Raises:
        AbsentError: it cannot be had here.
        CheckFailedError: it can, and something in it fails.
    """
    if reason := why_not():
        raise AbsentError(reason)
    cache().mkdir(parents=True, exist_ok=True)
    with _locked(cache() / f"{system.release}.lock"):
        stamp = cache() / f"{system.release}.json"
        if not _is_current(system, stamp):
            stamp.unlink(missing_ok=True)
            _bootstrap(system)
            stamp.write_text(json.dumps({"key": _key(system), "made": time.time()}))
        for python in present(system):
            _set_up(system, python)


def present(system: System) -> list[str]:
    """Those of the Pythons of a system that the archive had when it was made."""
    return [
        python for python in system.pythons if (system.root / f"usr/bin/python{python}").exists()
    ]


def _is_current(system: System, stamp: Path) -> bool:
    try:
        known = json.loads(stamp.read_text())
        return bool(
            known["key"] == _key(system)
            and 0 <= time.time() - known["made"] < system.days * _DAY_S
            and system.root.is_dir()
        )
    except (OSError, ValueError, KeyError):
        return False


def _key(system: System) -> str:
    """What a new root depends on; tools/setup installs what else is wanted in one that is there."""
    return " ".join((*clean_roots.mirror(), *system.pythons, *_BASE))


def _bootstrap(system: System) -> None:
    """Make the root anew, with the Pythons that the archive has."""
    shutil.rmtree(system.root, ignore_errors=True)
    print(f"a new root of Debian {system.release}, for {system.days} days", flush=True)
    log = cache() / f"{system.release}.log"
    command = [
        "debootstrap", "--variant=minbase", f"--include={','.join(_BASE)}", f"--keyring={KEYS}",
        system.release, str(system.root), *clean_roots.mirror(),
    ]  # fmt: skip
    with log.open("wb") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False,
            timeout=1200,
        )  # fmt: skip
    if done.returncode:
        said = log.read_text(errors="replace")
        shutil.rmtree(system.root, ignore_errors=True)
        if "Failed getting release" in said:
            raise AbsentError(f"the archive has no {system.release}, or cannot be reached")
        raise CheckFailedError(f"debootstrap of {system.release} failed:\n{said[-2000:]}")
    clean_roots.accept_mirror(system.root)
    empty = cache() / "empty"
    empty.mkdir(exist_ok=True)
    apt = ("apt-get", "-q", "-o", "Dpkg::Use-Pty=0")
    call(*_entered(system, empty), *apt, "update", limit_s=600)
    names = []
    for python in system.pythons:
        name = f"python{python}"
        policy = call(*_entered(system, empty), "apt-cache", "policy", name)
        if re.search(r"Candidate: (?!\()", policy):
            names += [name, f"{name}-venv", f"{name}-dev"]
    if names:
        install = (*apt, "install", "-y", "--no-install-recommends", *names)
        call(*_entered(system, empty), *install, limit_s=1200)


def _set_up(system: System, python: str) -> None:
    """Copy the repository, and have the copy set itself up as on any machine."""
    copy = COPIES / python
    copy.mkdir(parents=True, exist_ok=True)
    with _locked(COPIES / f"{python}.lock"):
        copy_repository(copy)
        setup = ("bash", "tools/setup", "system")
        call(*_entered(system, copy, python), *setup, limit_s=1800)


def run(python: str, command: list[str], *, or_here: bool = False) -> None:
    """Become a command in the system that has this Python.

    Raises:
        AbsentError: it cannot be had here.
        CheckFailedError: it cannot be set up.
    """
    system = system_of(python)
    try:
        make(system)
        if python not in present(system):
            raise AbsentError(f"the archive's {system.release} has no CPython {python}")
    except AbsentError as reason:
        if not or_here:
            raise
        own = platform.python_version()
        print(f"{_ABSENT}{reason}; CPython {own} of this machine stands in", flush=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.chdir(ROOT)
        os.execvpe(command[0], command, {**os.environ, "PATH": path})
    print(f"{_SYSTEM}{describe(system, python)}", flush=True)
    words = [*_entered(system, COPIES / python, python), *command]
    os.execvp(words[0], words)


def describe(system: System, python: str) -> str:
    """The release, and the versions of its Python and its rdma-core."""
    copy = COPIES / python
    query = ("dpkg-query", "-W", "-f", "${Version}", "rdma-core")
    rdma_core = call(*_entered(system, copy, python), *query)
    version = call(*_entered(system, copy, python), f"/usr/bin/python{python}", "--version")
    return f"Debian {system.release}, {version.strip()}, rdma-core {rdma_core.strip()}"


def compile_tests(python: str) -> None:
    """Have every file of tests imported once: outside, because in a guest it takes minutes."""
    folders = ("tests/unit", "tests/device", "tests/interop")
    collect = ("python", "-m", "pytest", "-qq", "--co", "-p", "no:cacheprovider", *folders)
    call(*_entered(system_of(python), COPIES / python, python), *collect, limit_s=600)


def _entered(system: System, copy: Path, python: str = "") -> list[str]:
    """The words before a command that is run in a system; a copy is there in ROOT's place."""
    from aiordma_softroce import cache as kernels

    reports = ROOT / "build" / "test"
    for shared in (reports, kernels.root()):
        shared.mkdir(parents=True, exist_ok=True)
    places = (system.root, copy, ROOT, reports, kernels.root())
    words = ["unshare", "--mount", "sh", str(_ENTER), *map(str, places)]
    # Whatever the user's habit: a guest, and each program that it starts, is slow to compile.
    words += ["-u", "PYTHONDONTWRITEBYTECODE"]
    return [*words, *(f"{name}={value}" for name, value in _environment(python).items())]


def _environment(python: str) -> Mapping[str, str]:
    """What is other in a system than in the caller's environment."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    told = {"PATH": path, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    if python:
        told["PATH"] = f"{ROOT / '.venv' / 'bin'}:{path}"
        told["PYTHON"] = f"/usr/bin/python{python}"
    return told


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time be in the block: two stages of one system may begin together."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Do what the command line says."""
    words = sys.argv[1:]
    if not words:
        print(why_not() or f"in {cache()}:")
        for system in SYSTEMS:
            there = ", ".join(present(system)) or "not made yet"
            print(f"{system.release}: CPython {', '.join(system.pythons)} ({there})")
    elif words[0] == "--make":
        for system in SYSTEMS:
            if system.release in words[1:] or not words[1:]:
                make(system)
                for python in present(system):
                    compile_tests(python)
                    print(f"{_SYSTEM}{describe(system, python)}", flush=True)
    elif "--" in words:
        cut = words.index("--")
        run(words[0], words[cut + 1 :], or_here="--or-here" in words[:cut])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main()
    except AbsentError as reason:
        print(f"{_ABSENT}{reason}", flush=True)
        sys.exit(ABSENT)
    except CheckFailedError as error:
        sys.exit(str(error))
