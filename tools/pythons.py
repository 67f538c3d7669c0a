"""Run pytest under another CPython of this machine: one stage of ``make test`` for each.

Those that a system of tools/systems.py has are run there, if that can be had.

Usage: ``tools/pythons.py 3.12|debug [--guest] -- PYTEST OPTION...``. Without arguments it lists
the versions.

The compiled modules are of the stable ABI, so that the ones in the tree serve every version: what
is installed for another Python is only what the tests need, into ``build/python-3.12``.

``debug`` is a debug build of the version that runs this, whose assertions see references that are
counted wrong. It takes the packages of this one: modules of a release build run in a debug build.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

from checks import ROOT, CheckFailedError, call
from requirements import requirements

#: The versions looked for. The classifiers of pyproject.toml name those that have been run.
SUPPORTED = range(11, 16)
GROUPS = ["build", "cli", "uvloop", "test"]
#: The folders of what is installed, and those of its projects.
SOURCES = (str(ROOT), str(ROOT / "softroce/src"))
_PROJECTS = (ROOT, ROOT / "softroce")
#: What says "this one can be used": a real CPython with the interpreter lock and with venv.
_PROBE = (
    "import sys, sysconfig, venv, ensurepip;"
    "assert sys.implementation.name == 'cpython';"
    "assert not sysconfig.get_config_var('Py_GIL_DISABLED');"
    "assert sys.version_info.releaselevel == 'final';"
    "print('%d.%d.%d' % sys.version_info[:3], sys.executable)"
)
_DEBUG = "debug"
_DEBUG_PROBE = "import sys, venv; sys.gettotalrefcount(); print(sys.version_info[:2])"


def _candidates(minor: int) -> list[Path]:
    """Every place where a Python of this version usually is. Wrappers on PATH may lead nowhere."""
    name, home = f"python3.{minor}", Path.home()
    folders = [Path(word) for word in os.get_exec_path()]
    for pattern in (".pyenv/versions/*/bin", ".local/share/uv/python/*/bin"):
        folders += sorted(home.glob(pattern))
    return [path for folder in folders if (path := folder / name).is_file()]


def _ask(path: str | Path, probe: str) -> str:
    """Return what the probe prints; an empty text if this Python cannot run it."""
    done = subprocess.run(
        [path, "-I", "-c", probe], capture_output=True, check=False, text=True, timeout=30
    )
    return "" if done.returncode else done.stdout.strip()


@functools.cache
def found() -> dict[str, Path]:
    """The other CPythons of this machine: the newest of each minor version, by "3.12"."""
    others: dict[str, Path] = {}
    for minor in SUPPORTED:
        if minor == sys.version_info.minor:
            continue
        usable = []
        for path in _candidates(minor):
            if answer := _ask(path, _PROBE):
                version, program = answer.split(" ", 1)
                usable.append((tuple(map(int, version.split("."))), Path(program)))
        if usable:
            others[f"3.{minor}"] = max(usable)[1]
    return others


@functools.cache
def debug() -> Path | None:
    """A debug build of this version, as Debian's ``python3-dbg`` is; None if there is none."""
    for name in (f"python3.{sys.version_info.minor}-dbg", "python3-dbg"):
        path = shutil.which(name)
        if path is None:
            continue
        if _ask(path, _DEBUG_PROBE) == str(sys.version_info[:2]):
            return Path(path)
    return None


def prepare(version: str) -> Path:
    """Make the environment of a version if it is not there, and return its Python.

    Raises:
        CheckFailedError: there is no such Python here, or its packages cannot be installed.
    """
    if version == _DEBUG:
        return _prepare_debug()
    if version not in found():
        raise CheckFailedError(
            f"there is no CPython {version} here; there is: {', '.join(found())}"
        )
    folder = ROOT / "build" / f"python-{version}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two stages of one version may begin together
        return _install(version, folder)


def _prepare_debug() -> Path:
    path = debug()
    if path is None:
        raise CheckFailedError(
            f"there is no debug build of CPython 3.{sys.version_info.minor} here"
        )
    folder = ROOT / "build" / "python-debug"
    call(path, "-m", "venv", "--clear", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    packages = sysconfig.get_path("purelib")
    (Path(site) / "aiordma.pth").write_text("\n".join((packages, *SOURCES, "")))
    return python


def _install(version: str, folder: Path) -> Path:
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    projects = [
        tomllib.loads((each / "pyproject.toml").read_text())["project"] for each in _PROJECTS
    ]
    entries = map(_entry_points, projects)
    wanted = "\n".join((str(ROOT), str(found()[version]), *requirements(GROUPS), *entries))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    call(found()[version], "-m", "venv", "--clear", folder)
    pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input")
    call(python, *pip, *requirements(GROUPS), limit_s=600)
    # As editable installs would have it, for programs that are started from other folders.
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "aiordma.pth").write_text("\n".join((*SOURCES, "")))
    for project in projects:
        _note(project, Path(site), folder)
    stamp.write_text(wanted)
    return python


def _note(project: dict[str, Any], site: Path, folder: Path) -> None:
    """Write the metadata and the programs of a project."""
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(_entry_points(project))
    for name, where in project["scripts"].items():
        module, _, function = where.partition(":")
        script = folder / "bin" / name
        script.write_text(
            f"#!{folder}/bin/python\nimport sys\nfrom {module} import {function}\n"
            f"sys.exit({function}())\n"
        )
        script.chmod(0o755)


def _entry_points(project: dict[str, Any]) -> str:
    """The programs and plugins of the project, as the metadata of an installed package has them."""
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in names.items())
        for group, names in groups.items()
    )


def main() -> None:
    """Prepare, then become pytest, so that a signal reaches it and its status is ours."""
    words = sys.argv[1:]
    if not words:
        for version, path in found().items():
            print(version, path)
        return
    cut = words.index("--")
    python = str(prepare(words[0]))
    command = [python, "-m", "pytest", *words[cut + 1 :]]
    if "--guest" in words[:cut]:
        engine = ("--engine", "uml", "--device", "rxe", "--timeout=570")
        command = [python, "-m", "aiordma_softroce", *engine, "--", *command]
    os.chdir(ROOT)
    os.execv(python, command)


if __name__ == "__main__":
    try:
        main()
    except CheckFailedError as error:
        sys.exit(str(error))
