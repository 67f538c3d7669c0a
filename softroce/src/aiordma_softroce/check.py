"""``softroce --check``: the needs of an engine that this machine lacks, and the first build."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from . import (
    bundle,
    cache,
    host,
    kernel_build,
    kernel_source,
    module_build,
    packages,
    qemu,
    qemu_image,
    runner,
    tools,
    uml,
)
from .errors import SoftroceError
from .options import OLDEST_KERNEL, Options

_PROGRAMS = ("gcc", "make", "flex", "bison", "bc", "tar", "xz", "bzip2")
_TRY_SECONDS = 120.0
#: PTRACE_TRACEME.
TRACE_ME = 0
_PTRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: the part of the machine.
        text: its state; for a fault, with the remedy.
        good: nothing has to be done.
    """

    subject: str
    text: str
    good: bool = True


def check(options: Options) -> int:
    """Print what a run with `options` would find; return 0 if nothing is missing, else 1."""
    try:
        engine = runner.choose(options)
    except SoftroceError as error:
        _show(Finding("engine", str(error), good=False))
        return 1
    looks: dict[str, Callable[[Options], Iterator[Finding]]] = {
        "uml": _uml, "qemu": _qemu, "host": _host,
    }  # fmt: skip
    chosen = "" if options.engine != "auto" else ", which auto chooses here"
    _show(Finding("engine", f"{engine}{chosen}"))
    good = True
    try:
        for finding in looks[engine](options):
            _show(finding)
            good &= finding.good
        if good:
            for finding in _trial(replace(options, engine=engine), engine):
                _show(finding)
                good &= finding.good
    except SoftroceError as error:
        _show(Finding("check", str(error), good=False))
        good = False
    print("ready" if good else "not ready: see the lines that begin with 'missing'", flush=True)
    return 0 if good else 1


def _show(finding: Finding) -> None:
    mark = "ok     " if finding.good else "missing"
    first, *more = finding.text.splitlines()
    print(f"{mark}  {finding.subject}: {first}")
    for line in more:
        print(f"         {line}")
    sys.stdout.flush()


def _uml(options: Options) -> Iterator[Finding]:
    uml.check(options)
    name = uml.kernel_name(options)
    bundled = bundle.find()
    linux = bundled.kernel(name) if bundled is not None else None
    if linux is None:
        yield from _build(name, in_wheel=bundled is not None)
    if bundled is not None:
        yield from _bundle(bundled, linux)
    yield _memory(options.memory or uml.DEFAULT_MEMORY)
    try:
        folder = uml.memory_directory(options.memory or uml.DEFAULT_MEMORY)
        yield Finding("file for the guest's memory", f"in {folder}")
    except SoftroceError as error:
        yield Finding("file for the guest's memory", str(error), good=False)
    yield _mappings()
    yield _ptrace()


def _mappings() -> Finding:
    """Never missing: a guest runs, and only its large processes are in danger."""
    count = uml.mappings()
    if count is None:
        return Finding("memory mappings", "their limit is not known")
    text = f"{count} for a process"
    if count < uml.MAPPINGS_WANTED:
        text += (
            f"; one that uses more than {count >> 8} MB in the guest may be killed, unless that is "
            f"raised: {uml.MAPPINGS_REMEDY}"
        )
    return Finding("memory mappings", text)


def _bundle(bundled: bundle.Bundle, linux: Path | None) -> Iterator[Finding]:
    """The parts that the wheel has."""
    if linux is not None:
        yield Finding("kernel", f"{linux}, of the wheel: nothing has to be built")
    yield Finding("kernels of the wheel", ", ".join(bundled.kernels()))
    own = "this system's" if bundle.has_rdma_core() else f"those in {bundled.folder / 'lib'}"
    yield Finding("libraries of rdma-core", own)


def _build(name: str | None, *, in_wheel: bool) -> Iterator[Finding]:
    """The parts that the system has, and those of a build.

    Args:
        name: the series of the kernel, or None.
        in_wheel: the wheel has the tools of a guest, so that the system may lack them.
    """
    found = None
    try:
        kernel_build.require_place()
        found = kernel_build.cached(name)
    except SoftroceError as error:
        yield Finding("kernel", str(error), good=False)
    else:
        yield _kernel(found, "building takes some minutes", kernel_build.NEEDED_BYTES)
    if needed := kernel_build.needed_packages(found, in_wheel=in_wheel):
        yield _packages(needed)
    if found is None:
        yield _programs("compiler and tools of a build", _PROGRAMS)
        yield _source(name)
    if not in_wheel:
        yield _programs("tools of the guest", kernel_build.TOOLS)


def _qemu(options: Options) -> Iterator[Finding]:
    qemu.check(options)
    yield _packages((*qemu.PACKAGES, qemu.PROVIDERS))
    yield _programs("emulator and tools of the guest", (qemu.PROGRAM, *kernel_build.TOOLS))
    yield Finding("kernel", _kept("qemu", "unpacked from packages on the first run"))
    if options.device == "siw":
        yield _siw(qemu_image.cached())
    yield _memory(options.memory or qemu.DEFAULT_MEMORY)


def _siw(image: Path | None) -> Finding:
    subject = "module siw"
    if image is None:
        return Finding(subject, "compiled on the first run if the kernel is without it")
    if qemu_image.has_module(image, "siw"):
        return Finding(subject, "the kernel has it")
    if module_build.cached(image) is not None:
        return Finding(subject, f"in {cache.root()}")
    absent = module_build.absent(image)
    text = "not there; compiled on the first run"
    if absent:
        text += f", which takes the packages {' '.join(absent)}"
    return Finding(subject, text, good=not absent)


def _kept(kind: str, effort: str) -> str:
    cached = any(path.name.startswith(f"{kind}-") for path in _entries() if path.is_dir())
    return f"in {cache.root()}" if cached else f"not there; {effort}"


def _host(options: Options) -> Iterator[Finding]:
    if found := host.of_kind(options.device):
        yield Finding("device", ", ".join(found))
        return
    if options.device != "rxe":
        kind = f"no {options.device}" if options.device else "none"
        yield Finding("device", f"{kind} with an active port: use --engine uml", good=False)
        return
    root = os.geteuid() == 0
    yield Finding("rights", "root" if root else "root has to make the device", good=root)
    module = tools.query(["modprobe", "-n", "rdma_rxe"]).returncode == 0
    text = "rdma_rxe" if module else "this kernel has no rdma_rxe: use --engine uml"
    yield Finding("module", text, good=module)
    yield _programs("tools", ("ip", "rdma"))


def _kernel(found: object, effort: str, needed: int) -> Finding:
    if found is not None:
        return Finding("kernel", f"{found}, with the hashes that it was made with")
    folder = cache.nearest()
    free = shutil.disk_usage(folder).free
    text = (
        f"none in {cache.root()}; a first run makes it: {effort}, {needed >> 20} MB of free space "
        f"(there are {free >> 20} MB)"
    )
    if not os.access(folder, os.W_OK):
        return Finding("kernel", f"{text}, and {folder} may not be written to", good=False)
    return Finding("kernel", text, good=free >= needed)


def _packages(names: tuple[str, ...]) -> Finding:
    if shutil.which("dpkg-query") is None:
        return Finding("packages", "not looked up, as there is no dpkg; Debian calls them "
                       + " ".join(names))  # fmt: skip
    absent = packages.missing(names)
    if not absent:
        return Finding("packages", f"all {len(names)} are installed")
    sudo = "" if os.geteuid() == 0 else "sudo "
    words = " ".join(absent)
    return Finding("packages", f"{sudo}apt-get install --no-install-recommends {words}", good=False)


def _programs(subject: str, names: tuple[str, ...]) -> Finding:
    absent = [name for name in names if tools.find(name) is None]
    if absent:
        return Finding(subject, f"not found: {', '.join(absent)}", good=False)
    return Finding(subject, ", ".join(names))


def _source(name: str | None) -> Finding:
    if name is not None:
        wanted = kernel_source.package_of(name)
        if version := packages.candidate(wanted):
            return Finding("source of the kernel", f"{wanted} {version}, downloaded if needed")
        text = f"this system has no {wanted}; the build looks in Debian's other releases"
        if not kernel_source.KEYS.exists():
            text += ", which takes their keys: install debian-archive-keyring"
        return Finding("source of the kernel", text, good=kernel_source.KEYS.exists())
    package = packages.newest_known(kernel_source.PATTERN, OLDEST_KERNEL)
    if package is None:
        return Finding(
            "source of the kernel",
            "no package linux-source-* is known: run apt-get update, in Debian or Ubuntu",
            good=False,
        )
    return Finding(
        "source of the kernel", f"{package} {packages.candidate(package)}, downloaded if needed"
    )


def _memory(needed: int) -> Finding:
    available = 0
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):
        # Of a container with a limit; "max" is none.
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        available = min(available, limit)
    text = f"{available >> 20} MB are available, and the guest may take {needed >> 20} MB"
    if available >= needed:
        return Finding("memory", text)
    return Finding("memory", f"{text}: end other programs, or use --memory", good=False)


def _ptrace() -> Finding:
    """Whether a process may trace its child, as the kernel does with each process of the guest."""
    child = os.fork()
    if child == 0:
        try:
            if ctypes.CDLL(None, use_errno=True).ptrace(TRACE_ME, 0, 0, 0) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(0)
            os._exit(ctypes.get_errno())
        finally:
            os._exit(255)
    status = _wait(child)
    if status is not None and os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        _wait(child)
        return Finding("ptrace", "a process may trace its child")
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else 0
    return Finding(
        "ptrace",
        f"a process may not trace its child ({os.strerror(code) if code else 'no answer'}): lift "
        "that limit (kernel.yama.ptrace_scope below 3; in a container seccomp and "
        "--cap-add=SYS_PTRACE)",
        good=False,
    )


def _wait(child: int) -> int | None:
    deadline = time.monotonic() + _PTRACE_SECONDS
    while time.monotonic() < deadline:
        process, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if process:
            return status
        time.sleep(0.001)
    return None


def _trial(options: Options, engine: str) -> Iterator[Finding]:
    """Run a command that does nothing, unless that takes a build, or the minute of qemu's boot."""
    if engine == "qemu" or (engine == "uml" and not _has_kernel(uml.kernel_name(options))):
        return
    start = time.monotonic()
    trial = replace(options, interactive=False, tty=False, timeout=_TRY_SECONDS)
    names = [name for name in trial.__dataclass_fields__ if name != "net_words"]
    status = runner.run(
        [sys.executable, "-I", "-S", "-c", ""], **{name: getattr(trial, name) for name in names}
    )
    seconds = time.monotonic() - start
    good = status == 0
    text = f"a command ran, in {seconds:.1f} s" if good else f"a command ended with {status}"
    yield Finding("trial", text, good)


def _has_kernel(name: str | None) -> bool:
    bundled = bundle.find()
    if bundled is not None and bundled.kernel(name) is not None:
        return True
    return kernel_build.cached(name) is not None


def _entries() -> list[os.DirEntry[str]]:
    try:
        with os.scandir(cache.root()) as entries:
            return list(entries)
    except OSError:
        return []
