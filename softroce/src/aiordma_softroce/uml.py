"""The ``uml`` engine: a Linux kernel that is an ordinary program."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import bundle, guest, network, packages
from .errors import InfrastructureError, UsageError
from .kernel_build import kernel
from .options import Options, check_kernel

#: The environment variable with the name of a kernel, for runs without the option.
KERNEL = "AIORDMA_SOFTROCE_KERNEL"
#: Bytes.
DEFAULT_MEMORY = 1 << 30
_BOOT_SECONDS = 120.0
#: How many memory mappings a process of the host may have; a process of the guest is one.
MAPPINGS = Path("/proc/sys/vm/max_map_count")
#: The limit of newer distributions. Linux itself has 65,530, with which pages of 4 KiB that lie
#: apart in the memory of the guest make no more than 256 MiB.
MAPPINGS_WANTED = 1_048_576
MAPPINGS_REMEDY = f"sudo sysctl -w vm.max_map_count={MAPPINGS_WANTED}"


def check(options: Options) -> None:
    """Refuse options that this engine does not have.

    Raises:
        UsageError: with the engine to use instead.
    """
    machine = os.uname().machine
    if machine != "x86_64":
        raise UsageError(
            f"--engine uml needs an x86_64 machine, and this is {machine}: use --engine host on a "
            "machine with an RDMA device (or, as root, --engine host --device rxe)"
        )
    options.refuse("uml", "counted")
    kernel_name(options)
    if options.cpus not in (None, 1):
        raise UsageError("--cpus above 1 is not possible with --engine uml: use --engine qemu")


def run(argv: Sequence[str], options: Options, *, stdout: int = 1) -> int:
    """Run `argv` in a guest and return its status; see `runner.run`."""
    check(options)
    name = kernel_name(options)
    bundled = bundle.find()
    linux = bundled.kernel(name) if bundled is not None else None
    if linux is None:
        linux = kernel(
            name,
            verbose=options.verbose,
            install=options.install,
            wheel=list(bundled.kernels()) if bundled is not None else (),
        )
    memory = options.memory or DEFAULT_MEMORY
    if packages.may_change_the_system(options.install):
        raise_mappings()
    machine = guest.Guest(options, _BOOT_SECONDS, "the guest's kernel", _remedies())
    command = command_line(linux, memory, machine.descriptors, options)
    told = network.environment(options, "uml")
    if bundled is not None:
        told |= bundled.environment()
    message = guest.request(argv, network.plan(options), told, options, bundled)
    # The kernel passes its own environment to no process; the command's comes with the request.
    surroundings = {
        "PATH": os.defpath,
        "TMPDIR": memory_directory(memory),
        # The C library of a kernel that is linked statically registers memory to which the host
        # writes whenever it resumes the process; a process of the guest does not have that memory.
        "GLIBC_TUNABLES": "glibc.pthread.rseq=0",
    }
    return machine.run(command, surroundings, message, stdout=stdout, log_is_stdout=True)


def kernel_name(options: Options) -> str | None:
    """Return the name of the kernel that is asked for, by the option or by the environment.

    Raises:
        UsageError: the variable holds no name.
    """
    name = os.environ.get(KERNEL)
    return options.kernel or (check_kernel(name, KERNEL) if name else None)


def mappings() -> int | None:
    """Return how many memory mappings a process may have here; None if that is not known."""
    try:
        return int(MAPPINGS.read_text())
    except OSError:
        return None


def raise_mappings() -> None:
    """As root, let processes have as many memory mappings as newer distributions do."""
    # Not allowed in most containers, even for root. A guest runs without it, too.
    count = mappings()
    with contextlib.suppress(OSError):
        if count is not None and count < MAPPINGS_WANTED:
            MAPPINGS.write_text(f"{MAPPINGS_WANTED}\n")


def _remedies() -> dict[bytes, str]:
    limited = (
        "this process may not map as much memory as the guest is to have; raise the limit (ulimit "
        "-v), or ask for less with --memory"
    )
    return {
        # It is the kernel's only word of it: the process ends as after a wrong address.
        b"UML ran out of memory on the host side": "the guest's kernel killed a process, for which "
        "this machine allows no more memory mappings. To allow more: " + MAPPINGS_REMEDY,
        b"setup_physmem - mapping": limited,
        b"Kernel panic - not syncing: map_memory": limited,
        b"mount likely just ran out of space": "the file system with the guest's memory is full; "
        "free some space there, or ask for less with --memory",
    }


def command_line(
    linux: Path, memory: int, descriptors: tuple[int, int, int, int], options: Options
) -> list[str]:
    """Return the command that runs the guest."""
    out, err, control, _ = descriptors
    words = [
        str(linux),
        f"mem={memory >> 20}M",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "rw",
        f"init={_quote(sys.executable)}",
        # A broken kernel must not go on and give verdicts.
        "oops=panic",
        "panic=-1",
        "con=null",
        "con0=null,fd:1",
        f"con1=fd:{out}",
        f"con2=fd:{err}",
        f"con3=fd:{control}",
        # Otherwise it keeps a directory in the user's home, and leaves it there when killed. A
        # directory that cannot be made is the documented way to have none: it goes on without.
        "uml_dir=/dev/null/",
        # From Linux 6.16 on a filter stops a process at its system calls, rather than ptrace: tests
        # take a fifth less processor time. An older kernel hands the word to its init.
        "seccomp=auto",
        # Otherwise the driver of bonds makes one at the start, and each guest has a card more.
        "bonding.max_bonds=0",
    ]
    if not options.verbose:
        words.append("quiet")
    if options.virtual_time:
        words.append("time-travel=inf-cpu")
    words += ["--", "-I", "-S", "-B", "-X", "utf8", _quote(str(guest.INIT))]
    return [*words, "/dev/tty1", "/dev/tty2", "/dev/tty3"]


def _quote(word: str) -> str:
    """Return `word` for a kernel's command line, which knows no escape for a quote."""
    if '"' in word:
        raise InfrastructureError(f"the path {word} has a quote and cannot be passed to the guest")
    return f'"{word}"' if any(letter.isspace() for letter in word) else word


def memory_directory(memory: int) -> str:
    """Return where the guest's memory, an unlinked file, is to be.

    The file grows with use, and a full file system kills the guest with SIGBUS; in a container
    /dev/shm often has 64 MB.
    """
    for candidate in ("/dev/shm", "/tmp", "/var/tmp"):
        try:
            free = os.statvfs(candidate)
        except OSError:
            continue
        if not os.access(candidate, os.W_OK) or free.f_flag & os.ST_NOEXEC:
            continue
        if free.f_bavail * free.f_frsize >= memory:
            return candidate
    raise InfrastructureError(
        f"neither /dev/shm nor /tmp nor /var/tmp has the {memory >> 20} MB that the guest's memory "
        "may take and allows executable mappings: free some space, or ask for less with --memory"
    )
