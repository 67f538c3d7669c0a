"""Clean installations of Debian in a folder, in which the package is installed as a user does it.

Each is made by debootstrap, which needs root, with Python and nothing else.  What the package says
there is taken at its word: the check installs the packages that its errors name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from check_wheel import WITHOUT_RDMA_CORE, check_missing
from checks import CheckFailedError, call

if TYPE_CHECKING:
    import wheels

#: The releases of Debian.
RELEASES = ("bookworm", "trixie", "testing")
#: For the packages that come as wheels; pip takes the first that fits.
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64")
#: Of the packages that a build needs, those without the headers that are not the C library's.
_COMPILER = "gcc libc6-dev"
_INSTALL = re.compile(r"apt install ([\w. +-]+)")
_DIAGNOSIS = "import aiordma; aiordma.verbs; print(aiordma.why_unavailable())"
#: For pytest --softroce.
_SUITE = """
import subprocess

def test_the_device(tmp_path):
    assert "rxe0" in subprocess.check_output(["ibv_devices"], text=True)
    (tmp_path / "written").touch()
"""
#: Sends a message to itself, and prints it.
FIRST_MESSAGE = """
import asyncio
import aiordma

async def main():
    async with aiordma.listen("10.80.0.1", 0) as listener:
        async with aiordma.connect("10.80.0.1", listener.port) as client:
            server = await listener.accept()
            await client.send(b"hello")
            print(bytes(await server.recv()))
            await server.close()

asyncio.run(main())
"""


def why_not() -> str:
    """Why there can be no such root here; an empty text if there can."""
    if os.geteuid():
        return "only root can make one"
    if shutil.which("debootstrap") is None:
        return "debootstrap is not installed"
    return ""


def mirror() -> list[str]:
    """The archive that this Debian uses, as an argument; none elsewhere, for the usual one."""
    texts = [path.read_text() for path in Path("/etc/apt").glob("sources.list*") if path.is_file()]
    texts += [
        path.read_text() for path in Path("/etc/apt/sources.list.d").glob("*") if path.is_file()
    ]
    found = re.findall(
        r"(?:^URIs: *|^deb (?:\[.*\] )?)(https?://\S+/debian/?)(?=\s)", "\n".join(texts), re.M
    )
    return found[:1]


def accept_mirror(root: Path) -> None:
    """Have apt take a mirror that stands still, as a snapshot does; debootstrap asks neither."""
    file = root / "etc/apt/apt.conf.d/90aiordma"
    file.write_text('Acquire::Check-Valid-Until "false";\n')


def packages(said: str) -> list[str]:
    """The packages of Debian that a text tells to install.

    Raises:
        CheckFailedError: It tells of none.
    """
    if (found := _INSTALL.search(said)) is None:
        raise CheckFailedError(f"it names no packages of Debian: {said}")
    return found[1].split()


class Root:
    """A clean root of one release.

    Args:
        release: Its name.
        folder: Where it is made; empty, and on a file system that allows devices.
        built: What is installed in it.
    """

    def __init__(self, release: str, folder: Path, built: wheels.Built) -> None:
        self._release = release
        self._path = folder / release
        self._built = built
        self._venvs = 0

    def make(self) -> None:
        """Install the system, and put the wheels of the dependencies beside the package's."""
        options = ("--variant=minbase", "--include=python3,python3-venv")
        call("debootstrap", *options, self._release, self._path, *mirror(), limit_s=900)
        accept_mirror(self._path)
        shutil.copy("/etc/resolv.conf", self._path / "etc" / "resolv.conf")
        store = self._path / "store"
        store.mkdir()
        for path in (self._built.sdist, self._built.wheel):
            shutil.copy(path, store)
        platforms = [f"--platform={name}" for name in _PLATFORMS]
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        own = self._run("python3", "-c", code).strip()
        python = (f"--python-version={own}", "--implementation=cp")
        pip = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check")
        what = ("--only-binary=:all:", f"--dest={store}", "cffi>=2.0", "setuptools>=77", "pytest")
        call(*pip, *python, *platforms, *what, limit_s=300)

    def check_wheel(self) -> None:
        """The wheel imports; its error names the packages; with these it finds the libraries."""
        python = self._venv()
        self._pip(python, "aiordma", "--only-binary=aiordma")
        said = self._run(python, "-W", "error", "-c", WITHOUT_RDMA_CORE)
        check_missing(said)
        self._apt(said)
        self._check_libraries(python)

    def check_softroce(self, wheel: Path) -> None:
        """An ordinary user has a device, without a network: alone, in pytest, and for aiordma."""
        shutil.copy(wheel, self._path / "store")
        python = self._venv()
        self._pip(python, "aiordma-softroce", "pytest", "--only-binary=:all:")
        said = self._as_user(f"{Path(python).parent}/softroce", "--", "ibv_devices")
        if "rxe0" not in said:
            raise CheckFailedError(f"ibv_devices in a guest says {said!r}")
        suite = self._path / "suite"
        suite.mkdir()
        (suite / "test_first.py").write_text(_SUITE)
        pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "/suite")
        if "1 passed" not in (said := self._as_user(*pytest, "--softroce=uml")):
            raise CheckFailedError(f"pytest --softroce says {said!r}")
        self._pip(python, "aiordma", "--only-binary=:all:")
        (self._path / "first.py").write_text(FIRST_MESSAGE)
        said = self._as_user(python, "-m", "aiordma_softroce", "--", python, "/first.py")
        if said != "b'hello'\n":
            raise CheckFailedError(f"the first program says {said!r}")

    def _as_user(self, *words: str) -> str:
        """Run a program as an ordinary user, without a network; return all that it says."""
        proc = self._path / "proc"
        alone = ("unshare", "--net", "--mount", "--pid", "--fork", f"--mount-proc={proc}")
        user = ("chroot", "--userspec=65534:65534", self._path, "env", "HOME=/tmp")
        return call(*alone, *user, *words, limit_s=100)

    def check_sdist(self) -> None:
        """The sdist says which packages a build needs; with these it builds."""
        python = self._venv()
        self._check_refusal(python, "there is no C compiler")
        # The headers of the packages beside it are still missing then.
        self._apt(f"apt install {_COMPILER}")
        headers = "<Python.h>, <infiniband/verbs.h>, <rdma/rdma_cma.h>, <rdma/rdma_verbs.h>"
        self._apt(self._check_refusal(python, f"the C compiler does not find {headers}"))
        self._pip(python, "aiordma", "--no-binary=aiordma")
        self._check_libraries(python)

    def remove(self) -> None:
        """Remove all of it."""
        # debootstrap unmounts what it mounts, unless it fails.
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed(mounts):
            if Path(mount).is_relative_to(self._path):
                call("umount", "--lazy", mount)
        shutil.rmtree(self._path, ignore_errors=True)

    def _check_libraries(self, python: str) -> None:
        said = self._run(python, "-W", "error", "-c", _DIAGNOSIS).strip()
        if said == "None" or "device" not in said or "cannot load" in said:
            raise CheckFailedError(f"with rdma-core it should say that there is no device: {said}")

    def _check_refusal(self, python: str, reason: str) -> str:
        """The sdist is not built, for a reason that is said; return what is said."""
        status, said = self._try_pip(python, "aiordma", "--no-binary=aiordma")
        if status == 0:
            raise CheckFailedError(f"it was built, although {reason}")
        if reason not in said:
            raise CheckFailedError(f"the build does not say that {reason}: {said}")
        return said

    def _venv(self) -> str:
        self._venvs += 1
        folder = f"/venv-{self._venvs}"
        self._run("python3", "-m", "venv", folder)
        return f"{folder}/bin/python"

    def _apt(self, said: str) -> None:
        """Install the packages that a text names for Debian."""
        self._run("apt-get", "-q", "update")
        self._run("apt-get", "-q", "install", "-y", "--no-install-recommends", *packages(said))

    def _pip(self, python: str, *words: str) -> None:
        status, said = self._try_pip(python, *words)
        if status:
            raise CheckFailedError(f"pip install {' '.join(words)} failed: {said}")

    def _try_pip(self, python: str, *words: str) -> tuple[int, str]:
        options = ("--disable-pip-version-check", "--no-input", "--no-index", "--find-links=/store")
        return self._call(python, "-m", "pip", "install", *options, *words)

    def _run(self, *words: str) -> str:
        status, said = self._call(*words)
        if status:
            raise CheckFailedError(
                f"exit status {status} in {self._release}: {' '.join(words)}: {said}"
            )
        return said

    def _call(self, *words: str) -> tuple[int, str]:
        """Run a program in the root, of whose environment it gets what reaches the network."""
        environment = {
            name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")
        }
        environment |= {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8",
            "DEBIAN_FRONTEND": "noninteractive",
        }  # fmt: skip
        done = subprocess.run(
            ["chroot", self._path, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=900,
        )
        return done.returncode, done.stdout
