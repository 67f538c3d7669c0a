"""The parts of the package that pyproject.toml cannot express.

The compiled modules and what they need, the stable-ABI tag, the bill of materials in the wheel
(PEP 770), and an sdist that is the same, byte for byte, when it is built again.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

CORE = sorted(str(path) for path in Path("aiordma/_core").glob("*.c"))

FABRIC = "aiordma.testing.fabric._fabric"
FABRIC_C = Path("aiordma/testing/fabric/lib")
#: Its symbols have the versions of rdma-core's.
FABRIC_MAP = FABRIC_C / "libibverbs.map"

#: Stands between a program and rdma-core, for faults on a device.
SHIM = "aiordma.testing.faults._shim"
SHIM_C = Path("aiordma/testing/faults/_shim.c")

#: What the C sources include and a machine may lack.
HEADERS = ("Python.h", "infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h")
NEEDS = """\
aiordma cannot be built here: {}. Install what a build needs:
  Debian, Ubuntu:  apt install gcc libc6-dev python3-dev libibverbs-dev librdmacm-dev
  Fedora, RHEL:    dnf install gcc python3-devel rdma-core-devel
  openSUSE, SLES:  zypper install gcc python3-devel rdma-core-devel
  Arch:            pacman -S gcc rdma-core"""

#: Seconds since 1970 that archives and documents carry, if the environment sets them.
EPOCH = os.environ.get("SOURCE_DATE_EPOCH")


#: Uses the newest function of rdma-core that the C sources call.
NEWEST = """
#include <infiniband/verbs.h>
enum ibv_fork_status aiordma_probe(void);
enum ibv_fork_status aiordma_probe(void) { return ibv_is_fork_initialized(); }
"""


def lacking(command: list[str]) -> str:
    """What the build lacks, for the sentence of `NEEDS`; empty if nothing.

    The compiler looks for the headers, not Python: it knows CPPFLAGS and sysroots.

    Args:
        command: The compiler, with the options that say where it looks.
    """
    source = "".join(
        f'#if !__has_include(<{name}>)\naiordma_lacks "{name}"\n#endif\n' for name in HEADERS
    )
    try:
        done = _compiler([*command, "-E", "-P"], source)
    except FileNotFoundError:
        return f"there is no C compiler ({command[0]})"
    names = [line.split('"')[1] for line in done.stdout.splitlines() if "aiordma_lacks" in line]
    if names:
        return f"the C compiler does not find {', '.join(f'<{name}>' for name in names)}"
    done = _compiler([*command, "-fsyntax-only"], NEWEST)
    if done.returncode and "ibv_fork_status" in done.stderr:
        return "the headers of rdma-core are older than 35, the smallest that aiordma is built with"
    return ""


def _compiler(command: list[str], source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "-x", "c", "-"], input=source, capture_output=True, text=True, check=False
    )


class BuildExt(build_ext):
    """As setuptools', but says in a sentence what is missing, before the compiler does in many.

    A module that is to be installed is stripped; those in a developer's tree keep their symbols.
    The libraries of the fabric and of faults are no modules, and their files have no names of such.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """The file of a module, which may be named without its package."""
        if fullname in {
            name for each in (FABRIC, SHIM) for name in (each, each.rpartition(".")[2])
        }:
            return f"{fullname.replace('.', os.sep)}.so"
        return str(super().get_ext_filename(fullname))

    def build_extensions(self) -> None:
        """Check, then build."""
        where = [f"-I{folder}" for folder in self.compiler.include_dirs]
        if missing := lacking([*self.compiler.compiler_so, *where]):
            sys.exit(NEEDS.format(missing))
        if not (self.inplace or self.editable_mode):
            for extension in self.extensions:
                extension.extra_link_args = [*extension.extra_link_args, "-Wl,--strip-all"]
        super().build_extensions()


def rdma_core_version() -> dict[str, str]:
    """The version of rdma-core's headers, as pkg-config tells it: "1.14.44.0" is of 44.0."""
    try:
        done = subprocess.run(
            ["pkg-config", "--modversion", "libibverbs"],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"version": ".".join(done.stdout.strip().split(".")[2:])}


def bill_of_materials(name: str, version: str) -> dict[str, Any]:
    """The bill of materials of the wheel, in CycloneDX 1.6.

    It lists the software of others of which code is in the compiled modules: cffi, which writes
    most of `_rdma`, and rdma-core, whose headers have inline functions. No library is in the wheel.
    """
    about = importlib.metadata.metadata("cffi")
    cffi, terms = about["Version"], about["License-Expression"]
    root = {
        "type": "library", "bom-ref": name, "name": name, "version": version,
        "purl": f"pkg:pypi/{name}@{version}", "licenses": [{"license": {"id": "Apache-2.0"}}],
    }  # fmt: skip
    parts = [
        {
            "type": "library", "bom-ref": "cffi", "name": "cffi", "version": cffi,
            "purl": f"pkg:pypi/cffi@{cffi}", "licenses": [{"expression": terms}] if terms else [],
            "description": "Code that it wrote is in aiordma/_ffi/_rdma.abi3.so; the package "
            "itself is a dependency, and not in the wheel.",
        },
        {
            "type": "library", "bom-ref": "rdma-core", "name": "rdma-core", **rdma_core_version(),
            "purl": "pkg:github/linux-rdma/rdma-core",
            "licenses": [{"expression": "GPL-2.0-only OR Linux-OpenIB"}],
            "description": "Inline functions of its headers are in both compiled modules; "
            "libibverbs and librdmacm are those of the system, and not in the wheel.",
        },
    ]  # fmt: skip
    metadata: dict[str, Any] = {"lifecycles": [{"phase": "build"}], "component": root}
    if EPOCH is not None:
        moment = datetime.fromtimestamp(int(EPOCH), UTC)
        metadata["timestamp"] = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": metadata,
        "components": parts,
        "dependencies": [
            {"ref": name, "dependsOn": ["cffi", "rdma-core"]}, {"ref": "cffi"}, {"ref": "rdma-core"}
        ],
    }  # fmt: skip
    # Of the contents, so that two builds of the same wheel have the same number.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill, sort_keys=True))
    return bill | {"serialNumber": f"urn:uuid:{number}"}


class BdistWheel(bdist_wheel):
    """As setuptools', with the bill of materials in the folder that PEP 770 has for it."""

    def write_wheelfile(self, wheelfile_base: str, *args: Any, **kwargs: Any) -> None:
        """Write WHEEL and, beside it, the bill of materials."""
        super().write_wheelfile(wheelfile_base, *args, **kwargs)
        metadata = self.distribution.metadata
        bill = bill_of_materials(str(metadata.name), str(metadata.version))
        folder = Path(wheelfile_base) / "sboms"
        folder.mkdir(exist_ok=True)
        (folder / "aiordma.cdx.json").write_text(json.dumps(bill, indent=2) + "\n")


class Sdist(sdist):
    """As setuptools', but SOURCE_DATE_EPOCH is the time of all files, and their order is fixed."""

    def make_archive(self, base_name: str, format: str, *args: Any, **kwargs: Any) -> str:
        """Write the archive of `base_dir`."""
        if EPOCH is None or format != "gztar":
            return str(super().make_archive(base_name, format, *args, **kwargs))
        archive = f"{base_name}.tar.gz"
        Path(archive).parent.mkdir(parents=True, exist_ok=True)
        with (
            open(archive, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=int(EPOCH)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for path in sorted(Path(kwargs["base_dir"]).rglob("*")):
                tar.add(path, recursive=False, filter=_uniform)
        return archive


def _uniform(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = int(EPOCH or 0)
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "aiordma: a free-threaded Python is not supported: the data path relies on the global "
        "interpreter lock. Install it for an ordinary build of Python 3.11 or later."
    )


# A library of its own for threads, in C libraries before 2.34, and an empty one since.
IS_GLIBC = "CS_GNU_LIBC_VERSION" in os.confstr_names and os.confstr("CS_GNU_LIBC_VERSION")
THREADS = "-l:libpthread.so.0" if IS_GLIBC else "-pthread"


def fabric() -> Extension:
    """The library of the fabric, in place of libibverbs and librdmacm: it needs neither."""
    return Extension(
        FABRIC,
        sorted(str(path) for path in FABRIC_C.glob("*.c")),
        depends=[str(FABRIC_MAP), *sorted(str(path) for path in FABRIC_C.glob("*.h"))],
        extra_compile_args=[
            "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden",
            "-include", str(FABRIC_C / "glibc.h"),
        ],
        extra_link_args=[
            f"-Wl,--version-script={FABRIC_MAP}", "-Wl,-z,defs", "-Wl,--no-as-needed", THREADS,
        ],
    )  # fmt: skip


def shim() -> Extension:
    """The library between a program and rdma-core, for faults on a device."""
    return Extension(
        SHIM,
        [str(SHIM_C)],
        depends=[str(FABRIC_C / "glibc.h")],
        libraries=["rdmacm", "ibverbs"],
        extra_compile_args=[
            "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden",
            "-include", str(FABRIC_C / "glibc.h"),
        ],
        extra_link_args=["-Wl,-z,defs", "-Wl,--no-as-needed", THREADS],
    )  # fmt: skip


setup(
    cmdclass={"build_ext": BuildExt, "bdist_wheel": BdistWheel, "sdist": Sdist},
    cffi_modules=["build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(
            "aiordma._core._compiled",
            CORE,
            libraries=["rdmacm", "ibverbs"],
            # The stable ABI of 3.11 is the first with the buffer protocol (message_object.c).
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            depends=sorted(str(path) for path in Path("aiordma/_core").glob("*.h")),
            extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", "-fvisibility=hidden"],
            extra_link_args=["-Wl,--as-needed"],
        ),
        fabric(),
        shim(),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
