"""What pyproject.toml cannot say: the compiled modules, what they need, the stable-ABI tag."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = sorted(str(path) for path in Path("aiordma/_core").glob("*.c"))

#: What the C sources include and a machine may lack.
HEADERS = ("Python.h", "infiniband/verbs.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h")
NEEDS = """\
aiordma cannot be built here: {}. Install what a build needs:
  Debian, Ubuntu:  apt install gcc libc6-dev python3-dev libibverbs-dev librdmacm-dev
  Fedora, RHEL:    dnf install gcc python3-devel rdma-core-devel"""


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
        done = subprocess.run(
            [*command, "-E", "-P", "-x", "c", "-"],
            input=source, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return f"there is no C compiler ({command[0]})"
    names = [line.split('"')[1] for line in done.stdout.splitlines() if "aiordma_lacks" in line]
    found = f"the C compiler does not find {', '.join(f'<{name}>' for name in names)}"
    return found if names else ""


class BuildExt(build_ext):
    """As setuptools', but says in a sentence what is missing, before the compiler does in many."""

    def build_extensions(self) -> None:
        """Check, then build."""
        where = [f"-I{folder}" for folder in self.compiler.include_dirs]
        if missing := lacking([*self.compiler.compiler_so, *where]):
            sys.exit(NEEDS.format(missing))
        super().build_extensions()


if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "aiordma: a free-threaded Python is not supported: the data path relies on the global "
        "interpreter lock. Install it for an ordinary build of Python 3.11 or later."
    )

setup(
    cmdclass={"build_ext": BuildExt},
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
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
