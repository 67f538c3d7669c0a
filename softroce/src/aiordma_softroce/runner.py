"""Choose the engine and run the command on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import host, qemu, uml
from .errors import UsageError
from .options import Options


def choose(options: Options) -> str:
    """Return the engine for `options`: ``auto`` resolved.

    The machine's own device comes first, unless an option asks for what only a guest has.
    """
    if options.engine != "auto":
        return options.engine
    if options.counted:
        return "qemu"
    guest_only = (
        options.virtual_time
        or options.hosts == 2
        or options.device is not None
        or options.kernel is not None
    )
    if not guest_only and host.has_device():
        return "host"
    return "uml"


def run(argv: Sequence[str], /, *, stdout: int = 1, **options: Any) -> int:
    """Run a command with an RDMA device, and return its exit status.

    Standard output and standard error of the command appear live and unchanged; its standard input
    is empty, unless `interactive` is given. The status is 128 plus the number of the signal if a
    signal ended the command, 127 if it was not found, 126 if it could not be executed, and 124 if
    it took longer than `timeout`. SIGINT and SIGTERM to this process are passed on to the command,
    and the status is then 130 or 143.

    Args:
        argv: the command and its arguments.
        stdout: descriptor that gets the command's standard output.
        options: the fields of `Options`, which are those of the command line: ``engine``,
            ``device``, ``kernel``, ``hosts``, ``virtual_time``, ``counted``, ``net``, ``mtu``,
            ``memory`` (in bytes), ``cpus``, ``timeout`` (in seconds), ``interactive``, ``tty``,
            ``install``, ``verbose``.

    Raises:
        UsageError: the options contradict each other or the engine.
        InfrastructureError: the environment could not be set up, or failed.
    """
    if not argv:
        raise UsageError("no command was given")
    chosen = Options(**options)
    engine = choose(chosen)
    engines: dict[str, Callable[..., int]] = {"uml": uml.run, "qemu": qemu.run, "host": host.run}
    return engines[engine](argv, chosen, stdout=stdout)
