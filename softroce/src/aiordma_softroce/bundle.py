"""What the published wheel has beside the code: kernels that have been built, and rdma-core.

Where it is installed the engine ``uml`` builds nothing and needs no package of the system.  The
folder ``system`` of this package has

- ``linux-X.Y``, kernels, linked statically, named by their series;
- ``sbin`` and ``bin``, the programs of iproute2, rdma-core and perftest, for those that the system
  lacks;
- ``lib``, the libraries of rdma-core: always for these programs, and for the command where the
  system has none.  This libibverbs looks for its settings in /run, which is the guest's own;
- ``private``, the other libraries of these programs, which no other program finds.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import InfrastructureError

#: In a checkout, and in an installation from source, it is not there.
FOLDER = Path(__file__).with_name("system")
#: The kernel of a run that asks for none by name.
DEFAULT_KERNEL = "6.12"
#: The drivers of the devices that a guest can have.
PROVIDERS = ("rxe", "siw")
#: The folder of libibverbs' settings, in Debian's build and in the bundle: as long as each other.
DEBIAN_SETTINGS = "/etc/libibverbs.d"
SETTINGS = "/run/libibverbs.d"
_KERNEL = re.compile(r"linux-(\d+)\.(\d+)")
_LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")


@dataclass(frozen=True)
class Bundle:
    """The files of an installed wheel.

    Attributes:
        folder: its files.
    """

    folder: Path

    def kernel(self, name: str | None = None) -> Path | None:
        """Return the kernel of this name, a program, or None; without a name, the default."""
        found = self.kernels()
        if name is None:
            name = DEFAULT_KERNEL if DEFAULT_KERNEL in found else next(reversed(found))
        return found.get(name)

    def kernels(self) -> dict[str, Path]:
        """Return the kernels by name, the oldest first."""
        named = [
            (tuple(map(int, match.groups())), path)
            for path in self.folder.glob("linux-*")
            if (match := _KERNEL.fullmatch(path.name))
        ]
        return {".".join(map(str, number)): path for number, path in sorted(named)}

    def set_up(self) -> dict[str, str]:
        """Return environment variables for the commands that set a guest up; PATH is appended."""
        told = {"PATH": f"{self.folder / 'sbin'}:{self.folder / 'bin'}"}
        if shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
            told["TC_LIB_DIR"] = str(self.folder / "tc")  # the distributions of netem
        return told

    def environment(self) -> dict[str, str]:
        """Return environment variables for the command, so that it finds what the system lacks."""
        told = self.set_up()
        if not has_rdma_core():
            told["LD_LIBRARY_PATH"] = _joined("LD_LIBRARY_PATH", str(self.folder / "lib"))
        told["PATH"] = _joined("PATH", told["PATH"])
        return told

    def files(self) -> dict[str, str]:
        """Return files for the guest, below /run: the settings of the bundle's libibverbs."""
        drivers = [f"driver {self.folder / 'lib/libibverbs' / f'lib{name}'}" for name in PROVIDERS]
        return {f"{SETTINGS}/softroce.driver": "\n".join(drivers) + "\n"}


def find() -> Bundle | None:
    """Return what this installation has, or None.

    Raises:
        InfrastructureError: it cannot be used where it is.
    """
    found = Bundle(FOLDER)
    if not found.kernels():
        return None
    for kernel in found.kernels().values():
        if not os.access(kernel, os.X_OK):
            raise InfrastructureError(
                f"{kernel} may not be run, because its file system is mounted noexec: install "
                "aiordma-softroce on another"
            )
    if ":" in str(FOLDER):
        raise InfrastructureError(
            f"the folder {FOLDER} has a colon in its name, which lists of folders cannot hold: "
            "install aiordma-softroce elsewhere"
        )
    return found


def has_rdma_core() -> bool:
    """Whether this system has rdma-core's libraries, with the drivers of a guest's devices."""
    try:
        for name in _LIBRARIES:
            ctypes.CDLL(name)
    except OSError:
        return False
    with open("/proc/self/maps") as file:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in file if _LIBRARIES[0] in line}
    return any(
        all(list(Path(path).parent.glob(f"libibverbs/lib{name}-rdmav*.so")) for name in PROVIDERS)
        for path in loaded
    )


def _joined(name: str, more: str) -> str:
    """The caller's own list of folders, and behind it `more`."""
    own = os.environ.get(name)
    return f"{own}:{more}" if own else more
