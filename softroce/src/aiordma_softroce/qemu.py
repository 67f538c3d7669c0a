"""The ``qemu`` engine: the distribution's kernel on an emulated machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import cache, guest, module_build, network, packages
from .errors import InfrastructureError, UsageError
from .options import Options
from .qemu_image import has_module, image

#: Bytes.
DEFAULT_MEMORY = 2 << 30
_DEFAULT_CPUS = 2
_BOOT_SECONDS = 300.0
#: Five levels of page tables would only make the emulation slower.
_CPU = "max,la57=off"
#: A clock that counts instructions charges each byte of a string instruction like an instruction.
#: The kernel and the C library copy with these instructions only if the processor says that they
#: are fast; otherwise they copy with ordinary loops, which move eight bytes or more at a time.
_COUNTED_CPU = f"{_CPU},-erms,-fsrm"
PROGRAM = "qemu-system-x86_64"
PACKAGES = ("qemu-system-x86", "kmod", "busybox-static", "iproute2", "rdma-core")
PROVIDERS = "ibverbs-providers"
#: Names the variable with more words for QEMU: it has devices, traces and plugins without end.
MORE = "AIORDMA_SOFTROCE_QEMU"
_MODULES = ("rdma_rxe", "rdma_ucm", "ib_uverbs", "ib_umad", "veth", "sch_netem")


def check(options: Options) -> None:
    """Refuse options that this engine does not have.

    Raises:
        UsageError: with the engine to use instead.
    """
    machine = os.uname().machine
    if machine != "x86_64":
        raise UsageError(
            f"--engine qemu emulates an x86_64 machine for the programs of this one, which is "
            f"{machine}: use --engine host"
        )
    options.refuse("qemu", "kernel", "virtual_time")
    _more()
    if options.counted and options.cpus not in (None, 1):
        raise UsageError("--counted needs one processor: leave out --cpus")


def _modules(folder: Path, options: Options) -> tuple[tuple[str, ...], ...]:
    """Return the commands that load the modules of the device, where `folder` has the kernel."""
    load = ("modprobe", "-d", str(folder), "-a", *_MODULES)
    if options.device != "siw":
        return (load,)
    if has_module(folder, "siw"):
        return ((*load, "siw"),)
    module = module_build.siw(folder, verbose=options.verbose, install=options.install)
    return ((*load, *module_build.needs(module)), ("insmod", str(module)))


def prepare(device: str) -> None:
    """Make all that a guest with this device needs, before its time begins; raises as `run`."""
    _modules(image(), Options(device=device))


def run(argv: Sequence[str], options: Options, *, stdout: int = 1) -> int:
    """Run `argv` in a guest and return its status; see `runner.run`."""
    check(options)
    absent = packages.missing((*PACKAGES, PROVIDERS))
    if absent:
        log = cache.log_file("packages")
        packages.ensure(
            absent, "the qemu engine", log, verbose=options.verbose, install=options.install
        )
    if shutil.which(PROGRAM) is None:
        raise InfrastructureError(f"{PROGRAM} was not found (package qemu-system-x86)")
    folder = image(verbose=options.verbose)
    plan = network.plan(options)
    plan = replace(
        plan,
        steps=(
            # rxe asks the kernel for its checksum, and the kernel asks this.
            (network.WRITE, "kernel/modprobe", str(folder / "modprobe")),
            *_modules(folder, options),
            # systemd brings a setting by which this module would make no card.
            ("modprobe", "-d", str(folder), "dummy", "numdummies=1"),
            *plan.steps,
        ),
    )
    machine = guest.Guest(options, _BOOT_SECONDS, "the guest's kernel")
    return machine.run(
        command_line(folder, machine.descriptors, options),
        os.environ,
        guest.request(argv, plan, network.environment(options, "qemu"), options),
        stdout=stdout,
        log_is_stdout=False,
    )


def command_line(
    folder: Path, descriptors: tuple[int, int, int, int], options: Options
) -> list[str]:
    """Return the command that runs the guest, with the words of $AIORDMA_SOFTROCE_QEMU."""
    cpus = 1 if options.counted else options.cpus or _DEFAULT_CPUS
    memory = (options.memory or DEFAULT_MEMORY) >> 20
    out, err, control, log = descriptors
    words = [
        PROGRAM,
        # Not KVM: a /dev/kvm that opens and then hangs is common on rented machines.
        *("-machine", "q35,accel=tcg"),
        *("-cpu", _COUNTED_CPU if options.counted else _CPU),
        *("-smp", str(cpus), "-m", f"{memory}M"),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initramfs")),
        *("-append", _append(options)),
        *("-chardev", f"socket,id=log,fd={log}", "-serial", "chardev:log"),
        *("-fsdev", "local,id=root,path=/,security_model=none,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root"),
        *("-device", "virtio-serial-pci"),
    ]
    for name, descriptor in (("out", out), ("err", err), ("control", control)):
        words += ["-chardev", f"socket,id={name},fd={descriptor}"]
        words += ["-device", f"virtserialport,chardev={name},name={name}"]
    if options.counted:
        words += ["-icount", "shift=1,sleep=off"]
    return words + _more()


def _more() -> list[str]:
    text = os.environ.get(MORE, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{MORE}={text!r}: {error}") from None


def _append(options: Options) -> str:
    words = ["console=ttyS0", "oops=panic", "panic=-1", "random.trust_cpu=on", "mitigations=off"]
    # Otherwise the module makes a bond0 when the first bond is asked for.
    words.append("bonding.max_bonds=0")
    if not options.verbose:
        words.append("quiet")
    for path in (sys.executable, str(guest.INIT)):
        if any(letter.isspace() or letter == '"' for letter in path):
            raise InfrastructureError(f"a path with spaces cannot be passed to the guest: {path}")
    return " ".join([*words, "--", sys.executable, "-I", "-S", "-B", "-X", "utf8", str(guest.INIT)])
