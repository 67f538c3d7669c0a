"""The kernel of the ``uml`` engine, built from the distribution's source package."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import cache, kernel_source, packages, tools
from .errors import InfrastructureError

CONFIG = Path(__file__).with_name("uml.config")
_KIND = "uml"
_WHAT = "the kernel of the uml engine"
#: To be raised with each change of this file that changes what a kernel does.
_RECIPE = 1

NEEDED_BYTES = 3 << 29
_UNPACK_SECONDS = 1800.0
_BUILD_SECONDS = 2 * 3600.0

#: Without these no guest can be had, unless a wheel has what is in them.
RUNTIME_PACKAGES = ("iproute2", "rdma-core", "ibverbs-providers")
#: Programs of the first.
TOOLS = ("ip", "rdma", "tc")
BUILD_PACKAGES = ("gcc", "libc6-dev", "make", "flex", "bison", "bc", "xz-utils", "bzip2")

#: Bytes of a register image. The kernel's own number (2696) is too small for processors with AMX,
#: and ptrace takes and gives no more than the processor has: one kernel serves all.
_REGISTER_BYTES = 12288
_REGISTER_LIMIT = 1 << 16

#: Without these a kernel has the time, the user and the machine of its build in it.
_REPRODUCIBLE = {
    "KBUILD_BUILD_TIMESTAMP": "1970-01-01",
    "KBUILD_BUILD_USER": "aiordma",
    "KBUILD_BUILD_HOST": "softroce",
    "KBUILD_BUILD_VERSION": "1",
}
#: The kernel's make, without variables that would make it something else, or end it.
MAKE = (
    "env",
    *(word for name in (
        "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "CROSS_COMPILE", "LLVM", "KBUILD_OUTPUT",
        "KBUILD_EXTRA_SYMBOLS", "KCFLAGS", "KCPPFLAGS", "KAFLAGS",
    ) for word in ("-u", name)),
    "make",
)  # fmt: skip
#: In each kernel that was built with them.
REPRODUCIBLE_MARK = b"(aiordma@softroce)"

#: Options to check: where a newer kernel has changed the requirements of a fragment's line, its
#: configuration drops the line without a message.
ESSENTIAL = (
    "HOSTFS",
    "DEVTMPFS",
    "BINFMT_SCRIPT",
    "UML_TIME_TRAVEL_SUPPORT",
    "INFINIBAND_USER_ACCESS",
    "INFINIBAND_ADDR_TRANS",
    "RDMA_RXE",
    "RDMA_SIW",
    "IPV6_MULTIPLE_TABLES",
    "NET_SCH_NETEM",
    "DUMMY",
    "VETH",
    "BRIDGE",
    "VLAN_8021Q",
    "MACVLAN",
    "BONDING",
)

#: Four fifths of the source are for hardware and architectures that are not here. The files that
#: configure a build must stay, whatever folder they are in.
_UNNEEDED = (
    *(f"drivers/{name}" for name in ("gpu", "media", "staging", "scsi", "iio", "accel", "comedi")),
    *(f"drivers/{name}" for name in ("net/ethernet", "net/wireless", "net/dsa", "usb", "clk")),
    *(f"drivers/{name}" for name in ("infiniband/hw", "pinctrl", "platform", "mtd", "crypto")),
    *("sound", "Documentation", "tools/testing", "tools/perf"),
    *(f"fs/{name}" for name in ("btrfs", "xfs", "ocfs2", "f2fs", "bcachefs", "smb", "ceph")),
    *(f"arch/{name}" for name in ("alpha", "arc", "arm", "arm64", "csky", "hexagon", "loongarch")),
    *(f"arch/{name}" for name in ("m68k", "microblaze", "mips", "nios2", "openrisc", "parisc")),
    *(f"arch/{name}" for name in ("powerpc", "riscv", "s390", "sh", "sparc", "xtensa")),
)
#: Few patterns: tar compares each with each of 85,000 names.
_EXCLUDED = (
    *(f"*/{folder}/*.[chS]" for folder in _UNNEEDED),
    *("*/Documentation/*.rst", "*/Documentation/*.txt", "*/Documentation/*.yaml"),
    *("*/arch/arm*/*.dts*", "*/arch/powerpc/*.dts*", "*/tools/perf/*.json"),
)


def kernel(
    name: str | None = None,
    *,
    verbose: bool = False,
    install: bool = False,
    wheel: Sequence[str] = (),
) -> Path:
    """Return the kernel as a program, and build it on first use.

    Args:
        name: its series, such as ``6.1``; None is the newest that the packages of the system have.
        verbose: show what the build says.
        install: as root, install packages that are missing.
        wheel: the kernels of the wheel, if one is installed: it has the tools of a guest, too.

    Raises:
        InfrastructureError: it cannot be built; the message says what to do.
        Interrupted: a signal came.
    """
    require_place()
    size = register_bytes()
    found = cached(name)
    needed = needed_packages(found, in_wheel=bool(wheel))
    if needed and (absent := packages.missing(needed)):
        # One message lists everything that a user without root has to install.
        purpose = "the uml engine"
        if wheel:
            purpose = f"a build of Linux {name}, as the wheel has only {', '.join(wheel)},"
        log = cache.log_file("packages")
        packages.ensure(absent, purpose, log, verbose=verbose, install=install)
    for tool in () if wheel else TOOLS:
        if tools.find(tool) is None:
            raise InfrastructureError(f"the uml engine needs the program {tool} (package iproute2)")
    if found is None:
        found = cache.obtain(
            _KIND,
            _key(size, name),
            NEEDED_BYTES,
            lambda shop: _build(shop, name, size, verbose),
            what=_WHAT,
        )
    return found / "linux"


def needed_packages(found: Path | None, *, in_wheel: bool) -> tuple[str, ...]:
    """Return the packages that a run needs whose kernel, from `cached`, is `found`."""
    return (
        *(() if in_wheel else RUNTIME_PACKAGES),
        *(BUILD_PACKAGES if found is None else ()),
    )


def require_place() -> None:
    """Raise `InfrastructureError` if no program may be run from the cache folder."""
    folder = cache.nearest()
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise InfrastructureError(
            f"no kernel can be run from {cache.root()}, whose file system is mounted noexec: set "
            "AIORDMA_SOFTROCE_CACHE to a folder on another"
        )


def cached(name: str | None = None) -> Path | None:
    """Return the folder of a kernel that has been built, or None; see `kernel`.

    Raises:
        InfrastructureError: it is not to be trusted.
    """
    size = register_bytes()
    found = cache.find(_KIND, _key(size, name))
    if found is None and name is not None:
        # That which was built without a name may be of this series.
        found = cache.find(_KIND, _key(size, None))
        if found is not None and series(version_of(found)) != name:
            return None
    return found


def version_of(folder: Path) -> str:
    """Return the version of the package that the kernel in a folder of `cached` was built from."""
    return folder.name.split("-", 1)[1].rsplit("-", 1)[0]


def series(version: str) -> str:
    """Return the name of a kernel of this version of its package."""
    return ".".join(re.findall(r"\d+", version)[:2])


def _key(size: int, name: str | None) -> str:
    # Without a name as it was before there were names.
    return cache.digest(CONFIG.read_bytes(), size, _RECIPE, *([name] if name else []))


def _build(shop: cache.Workshop, name: str | None, size: int, verbose: bool) -> str:
    tools.say(f"building {_WHAT}: some minutes, once; the log is {shop.log}")
    total = tools.Progress(_WHAT)
    archive, version = kernel_source.get(shop, name, verbose=verbose)
    tree = shop.scratch / "linux"
    tree.mkdir()
    excludes = [f"--exclude={pattern}" for pattern in _EXCLUDED]
    tools.run(
        ["tar", "-xf", str(archive), "-C", str(tree), "--strip-components=1", *excludes],
        title="unpacking the kernel source",
        log=shop.log,
        limit=_UNPACK_SECONDS,
        verbose=verbose,
    )
    widen_registers(tree, size, shop.log)
    make = [*MAKE, "ARCH=um", "-C", str(tree)]
    tools.run(
        [*make, f"KCONFIG_ALLCONFIG={CONFIG}", "allnoconfig"],
        title="configuring the kernel",
        log=shop.log,
        limit=_UNPACK_SECONDS,
        verbose=verbose,
    )
    check_configuration(tree / ".config", version)
    tools.run(
        [*make, f"-j{len(os.sched_getaffinity(0)) + 1}", "linux"],
        title="compiling the kernel",
        log=shop.log,
        limit=_BUILD_SECONDS,
        verbose=verbose,
        # A compiler that is killed leaves its temporary files behind.
        environment={"TMPDIR": str(shop.scratch), **_REPRODUCIBLE},
        counted_prefix=b"  CC ",
        counted_name="files",
    )
    program = shop.result / "linux"
    shutil.copyfile(tree / "linux", program)
    program.chmod(0o755)
    _check_program(program)
    tools.say(f"{_WHAT} is ready: Linux {version}, {total.seconds:.0f} s in all")
    return version


def register_bytes() -> int:
    """Return the size of a register image that suits this processor as well."""
    # Leaf 0xD of CPUID, register EBX: bytes that XSAVE writes with the features that are on.
    # push rbx; mov eax, 13; xor ecx, ecx; cpuid; mov eax, ebx; pop rbx; ret
    code = bytes.fromhex("53 b80d000000 31c9 0fa2 89d8 5b c3")
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        # A hardened system forbids it; no processor so far needs more.
        return _REGISTER_BYTES
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    size = int(ctypes.CFUNCTYPE(ctypes.c_uint32)(address)())
    # A processor without that leaf answers with anything.
    return size if _REGISTER_BYTES < size <= _REGISTER_LIMIT else _REGISTER_BYTES


def widen_registers(tree: Path, size: int, log: Path) -> None:
    """Have a source tree of the kernel use register images of `size` bytes."""
    file = tree / "arch/x86/um/user-offsets.c"
    text = file.read_text()
    wide, count = re.subn(
        r"DEFINE_LONGS\(HOST_FP_SIZE, 2696\)", f"DEFINE_LONGS(HOST_FP_SIZE, {size})", text
    )
    if count:
        file.write_text(wide)
    elif "HOST_FP_SIZE, 2696" in text:
        raise InfrastructureError(
            f"{file.name} of this kernel fixes the size of the registers in an unknown way"
        )
    else:
        # Later kernels ask the processor.
        with log.open("a") as stream:
            stream.write("user-offsets.c fixes no size of the registers: nothing to change\n")


def check_configuration(file: Path, version: str) -> None:
    """Raise `InfrastructureError` if a configuration lacks what a guest needs."""
    lines = set(file.read_text().splitlines())
    lost = [name for name in ESSENTIAL if f"CONFIG_{name}=y" not in lines]
    if lost:
        raise InfrastructureError(
            f"Linux {version} cannot be configured with {', '.join(lost)}: its configuration has "
            f"changed, and {CONFIG.name} has to follow"
        )


def _check_program(program: Path) -> None:
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"the kernel that was built does not run: {error}") from None
    if done.returncode != 0:
        raise InfrastructureError(
            f"the kernel that was built does not run: exit status {done.returncode}: "
            f"{done.stderr.decode(errors='replace').strip()}"
        )
