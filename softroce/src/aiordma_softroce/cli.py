"""The command line."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from . import terminal
from .bundle import DEFAULT_KERNEL
from .check import check
from .errors import STATUS_SIGNAL_BASE, SoftroceError, UsageError
from .options import DEFAULT_MTU, DEFAULT_TIMEOUT, DEVICES, ENGINES, Options, parse_size
from .runner import run

_DESCRIPTION = """\
Run a command with an RDMA device, without RDMA hardware. The command sees the files of this
machine, your environment and working directory, and an RDMA device with address 10.80.0.1
(AIORDMA_SOFTROCE_ADDR); with --hosts 2 there is a second one, 10.80.0.2 (AIORDMA_SOFTROCE_ADDR2).
When the command ends, everything that it left running is ended, too.

Started in a terminal, the command has a terminal, too. Otherwise its standard input is empty,
unless -i is given. --check says what is missing on this machine, and takes no command."""

_EPILOG = """\
exit status: the command's, 128+N if signal N ended it; 127 not found; 126 not executable;
124 timed out; 125 the environment failed; 2 wrong options; 130 after Ctrl-C; 143 after SIGTERM.

A kernel that the wheel does not have (installed from source, every kernel) is built on first use,
which takes some minutes and 1.5 GiB of free space, and kept in $AIORDMA_SOFTROCE_CACHE, by default
~/.cache/aiordma/softroce."""


class _Version(argparse.Action):
    """``--version``; an action of argparse's own would have it looked up in each run."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata

        try:
            version = importlib.metadata.version("aiordma-softroce")
        except importlib.metadata.PackageNotFoundError:
            version = "of a checkout that is not installed"
        print(f"aiordma-softroce {version}")
        parser.exit()


def _is_module() -> bool:
    """Whether this program was started as ``python -m aiordma_softroce``."""
    return os.path.basename(sys.argv[0]) == "__main__.py"


def options_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        # As it was typed.
        prog=f"python -m {__package__}" if _is_module() else "softroce",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="uml: a Linux that runs as an ordinary program; qemu: the distribution's, emulated; "
        "host: this machine's own device; auto (default): host if there is one, else uml",
    )
    add("--device", choices=DEVICES, help="rxe: RoCE v2 (default); siw: iWARP")
    add(
        "--kernel",
        metavar="X.Y",
        help="series of the guest's kernel, such as 6.1, 6.12 or 7.2 (uml; default "
        f"$AIORDMA_SOFTROCE_KERNEL, else {DEFAULT_KERNEL} of the wheel, or, without a wheel, the "
        "newest of the system's packages)",
    )
    add("--hosts", type=int, default=1, metavar="N", help="1 (default), or 2 with a wire between")
    add(
        "--virtual-time",
        action="store_true",
        help="time passes only while everything sleeps, and then at once (uml)",
    )
    add(
        "--counted",
        action="store_true",
        help="the clock counts instructions, so that speed figures repeat (qemu)",
    )
    add(
        "--net",
        metavar="QDISC",
        help="faults on the wire as for tc, such as 'netem loss 5%%'; implies --hosts 2",
    )
    add("--mtu", type=int, metavar="BYTES", help=f"of the network cards (default {DEFAULT_MTU})")
    add("--memory", metavar="SIZE", help="of the guest, such as 512M or 2G (uml 1G, qemu 2G)")
    add("--cpus", type=int, metavar="N", help="of the guest (qemu; default 2, with --counted 1)")
    add(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"real time after which everything is killed (default {DEFAULT_TIMEOUT:g}, or none "
        "if the command reads a terminal)",
    )
    add(
        "-i",
        "--interactive",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the command reads this program's standard input (default: in a terminal)",
    )
    add(
        "-t",
        "--tty",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the command has a terminal (default: in a terminal); Ctrl-] three times within a "
        "second ends a command that answers no key",
    )
    add(
        "--check",
        action="store_true",
        help="say what is missing on this machine, and end with 0 if nothing is, else with 1",
    )
    add(
        "--install",
        action="store_true",
        help="as root, install missing packages, and raise vm.max_map_count",
    )
    add(
        "--version",
        nargs=0,
        action=_Version,
        default=argparse.SUPPRESS,
        help="print the version of aiordma-softroce",
    )
    add("-v", "--verbose", action="store_true", help="show the logs of the kernel and of a build")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _decide_terminal(values: dict[str, Any]) -> None:
    """Fill in the options of a terminal that the command line has not given."""
    if values["interactive"] is None and values["tty"] is None and terminal.wanted():
        values.update(interactive=True, tty=True)
    values.update(interactive=bool(values["interactive"]), tty=bool(values["tty"]))
    if values["timeout"] is None:
        # A person at a terminal ends the command when it is time.
        has_person = values["interactive"] and values["tty"]
        values["timeout"] = math.inf if has_person else DEFAULT_TIMEOUT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = options_parser()
    values = vars(parser.parse_args(arguments))
    command: list[str] = values.pop("command")
    if command[:1] == ["--"]:
        command = command[1:]
    checks: bool = values.pop("check")
    _decide_terminal(values)
    try:
        if checks and command:
            raise UsageError("--check takes no command")
        if not command and not checks:
            raise UsageError("no command was given: put it after --")
        if values["memory"] is not None:
            values["memory"] = parse_size(values["memory"])
        # Checked before anything is looked up, so that a mistake is reported at once.
        options = Options(**values)
        return check(options) if checks else run(command, **values)
    except SoftroceError as error:
        sys.stderr.write(f"softroce: {error}\n")
        return error.exit_status
    except BrokenPipeError:
        # The reader of --check has gone. At its exit the interpreter would complain about the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return STATUS_SIGNAL_BASE + signal.SIGPIPE
    except KeyboardInterrupt:
        # While a kernel is being built or looked up: half-made files have been removed.
        return STATUS_SIGNAL_BASE + 2
