"""The options of a run, and the engines that can do it."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field

from .errors import UsageError

ENGINES = ("auto", "uml", "qemu", "host")
DEVICES = ("rxe", "siw")

#: Bytes on the wire. Jumbo frames, because an rxe port of 4096 bytes (the largest that RoCE knows)
#: needs the room, and the default of Ethernet would make it a port of 1024.
DEFAULT_MTU = 9000
DEFAULT_TIMEOUT = 3600.0

#: The name of a kernel: its series.
_KERNEL = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
#: The oldest that has what a guest needs.
OLDEST_KERNEL = (6, 1)
_SIZE = re.compile(r"(\d+)([KMG]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Return the number of bytes that a text such as ``512M`` or ``2G`` names.

    Raises:
        UsageError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--memory {text}: expected a size such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]


def _check_input(tty: bool) -> None:
    """Raise `UsageError` if standard input cannot be passed on."""
    try:
        os.fstat(0)
    except OSError:
        raise UsageError("--interactive: standard input is closed") from None
    if tty and not os.isatty(0):
        raise UsageError(
            "--tty with --interactive needs a terminal as standard input: leave out --tty"
        )


def check_kernel(name: str, source: str) -> str:
    """Return the name of a kernel.

    Args:
        name: such as ``6.12``.
        source: the option or the variable that has it, for messages.

    Raises:
        UsageError: it is no name, or the kernel lacks what a guest needs.
    """
    if _KERNEL.fullmatch(name) is None:
        raise UsageError(f"{source} {name!r}: expected two numbers, such as 6.12")
    if tuple(map(int, name.split("."))) < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        raise UsageError(f"{source} {name}: expected {oldest} or later")
    return name


@dataclass(frozen=True)
class Options:
    """The options of one run; the names are those of the command line.

    Attributes:
        engine: one of `ENGINES`; ``auto`` takes the machine's own RDMA device if it has one, and
            ``uml`` otherwise.
        device: the software adapter, ``rxe`` (RoCE v2) or ``siw`` (iWARP). None is ``rxe`` for the
            engines that make a device, and any device for ``host``.
        kernel: the series of the guest's kernel, such as ``6.1`` (uml); None is the one that
            AIORDMA_SOFTROCE_KERNEL names, or else the engine's choice.
        hosts: 1 is one device with one address; 2 is a pair of virtual network cards with a device
            on each, so that packets cross a wire on which they can be lost.
        virtual_time: time passes in the guest only while everything in it sleeps (uml).
        counted: the guest's clock counts instructions, so that figures repeat (qemu).
        net: a queueing discipline for both ends of the pair, such as ``netem loss 5%``; it implies
            two hosts.
        mtu: of the network cards, in bytes; None is `DEFAULT_MTU`.
        memory: of the guest, in bytes; None leaves the choice to the engine.
        cpus: of the guest; None leaves the choice to the engine.
        timeout: seconds of real time after which everything is killed.
        interactive: the command reads the runner's standard input. Otherwise its own is empty.
        tty: the command has a terminal, of the size of the runner's; with `interactive`, standard
            input has to be one, and each key goes to the command. Standard error goes to it, too,
            unless the runner's goes elsewhere.
        install: as root, install missing packages, and raise ``vm.max_map_count``.
        verbose: show the log of the guest's kernel and of a build.
    """

    engine: str = "auto"
    device: str | None = None
    kernel: str | None = None
    hosts: int = 1
    virtual_time: bool = False
    counted: bool = False
    net: str | None = None
    mtu: int | None = None
    memory: int | None = None
    cpus: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    interactive: bool = False
    tty: bool = False
    install: bool = False
    verbose: bool = False
    net_words: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        """Refuse options that no engine has, and split `net`.

        Raises:
            UsageError: with a message for the user.
        """
        if self.engine not in ENGINES:
            raise UsageError(f"--engine {self.engine}: expected one of {', '.join(ENGINES)}")
        if self.device is not None and self.device not in DEVICES:
            raise UsageError(f"--device {self.device}: expected one of {', '.join(DEVICES)}")
        if self.kernel is not None:
            check_kernel(self.kernel, "--kernel")
        if self.hosts not in (1, 2):
            raise UsageError(f"--hosts {self.hosts}: expected 1 or 2")
        if self.mtu is not None and not 576 <= self.mtu <= 65521:
            raise UsageError(f"--mtu {self.mtu}: expected 576 to 65521 bytes")
        if self.memory is not None and self.memory < 64 << 20:
            raise UsageError("--memory: a guest needs at least 64M")
        if self.cpus is not None and not 1 <= self.cpus <= 64:
            raise UsageError(f"--cpus {self.cpus}: expected 1 to 64")
        if not self.timeout > 0:
            raise UsageError(f"--timeout {self.timeout}: expected a positive number of seconds")
        if self.interactive:
            _check_input(self.tty)
        if self.net is not None:
            try:
                words = tuple(shlex.split(self.net))
            except ValueError as error:
                raise UsageError(f"--net {self.net!r}: {error}") from None
            if not words:
                raise UsageError("--net: expected a queueing discipline, such as 'netem loss 5%'")
            object.__setattr__(self, "net_words", words)
            object.__setattr__(self, "hosts", 2)

    def refuse(self, engine: str, *names: str) -> None:
        """Raise `UsageError` if an option is set that `engine` has no way to honor.

        Args:
            engine: the engine in question.
            names: attributes of this class which that engine cannot honor.
        """
        hints = {
            "kernel": ("--kernel", "use --engine uml"),
            "virtual_time": ("--virtual-time", "use --engine uml"),
            "counted": ("--counted", "use --engine qemu"),
            "net": ("--net", "use --engine uml or qemu"),
            "hosts": ("--hosts 2", "use --engine uml or qemu"),
            "mtu": ("--mtu", "use --engine uml or qemu"),
            "memory": ("--memory", "use --engine uml or qemu"),
            "cpus": ("--cpus", "use --engine qemu"),
        }
        defaults = Options()
        for name in names:
            if getattr(self, name) != getattr(defaults, name):
                option, advice = hints[name]
                raise UsageError(f"{option} is not possible with --engine {engine}: {advice}")
