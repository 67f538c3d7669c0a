"""Run a command as an ordinary user, in a root that has Python and nothing else, without a network.

Run as root, as: python minimal_root.py ROOT COMMAND...
ROOT is an empty folder, or one of an earlier call.  The command finds Python in /opt/python, the
folder ROOT/home as /home, and no other file of this machine but the shared libraries that the
modules of Python need.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_USER = 65534
_NEW_SPACES = 0x00020000 | 0x40000000 | 0x20000000  # mount points, network, processes
_PRIVATE, _BIND, _RECURSIVE = 1 << 18, 1 << 12, 1 << 14
#: Libraries that come with the C library.
_BESIDE = ("libdl.so.2", "libgcc_s.so.1", "libpthread.so.0", "librt.so.1", "libutil.so.1")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Make the root, and become the command."""
    root = Path(sys.argv[1])
    if not (root / "opt").exists():
        _fill(root)
    _must(_libc.unshare(_NEW_SPACES), "unshare")
    child = os.fork()  # the first process of its space
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    _mount("none", Path("/"), "", _PRIVATE | _RECURSIVE)
    _mount(sys.base_prefix, root / "opt/python", "", _BIND)
    _mount("proc", root / "proc", "proc")
    _mount("tmpfs", root / "dev", "tmpfs")
    for name in ("null", "zero", "urandom", "random"):
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", root / "dev" / name, "", _BIND)
    (root / "dev/shm").mkdir()
    (root / "dev/shm").chmod(0o1777)
    os.chroot(root)
    os.chdir("/home")
    os.setgroups([])
    os.setgid(_USER)
    os.setuid(_USER)
    # A process that has changed its user may not be traced, which a first exec ends.
    os.execve(
        sys.argv[2], sys.argv[2:], {"HOME": "/home", "PATH": "/home/venv/bin:/opt/python/bin"}
    )


def _fill(root: Path) -> None:
    for name in ("opt/python", "proc", "dev", "sys", "run", "tmp", "home"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    os.chown(root / "home", _USER, _USER)
    modules = Path(os.__file__).with_name("lib-dynload").glob("*.so")
    files = [os.path.realpath(sys.executable), *map(str, modules)]
    told = subprocess.run(["ldd", *files], capture_output=True, text=True, timeout=60, check=False)
    needed = set(re.findall(r"(/\S+) \(0x", told.stdout))
    (libc,) = (Path(found) for found in needed if found.endswith("/libc.so.6"))
    needed |= {str(libc.with_name(name)) for name in _BESIDE}
    for found in sorted(needed):
        # Python's own is where only its own prefix tells to look.
        own = found.startswith(sys.base_prefix)
        target = root / (f"lib/{Path(found).name}" if own else found.lstrip("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, target)


def _mount(source: str, target: Path, kind: str, flags: int = 0) -> None:
    words = source.encode(), bytes(target), kind.encode()
    _must(_libc.mount(*words, flags, None), f"mount {target}")


def _must(result: int, call: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
