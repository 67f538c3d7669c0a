"""The command line without click: the extra `cli` may be missing where a diagnosis is needed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from aiordma.cli import devices, doctor, gids
from aiordma.cli.output import print_hint
from aiordma.cli.version import aiordma_version

__all__ = ["run"]

_REST = "click is not installed; all commands: pip install 'aiordma[cli]'"


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="aiordma",
        description="RDMA connections for asyncio: what is here, and whether it works.",
        epilog=_REST,
    )
    version = f"aiordma, version {aiordma_version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function, text in (
        ("devices", devices.run, "List the RDMA devices with their ports and GIDs."),
        ("doctor", doctor.run, "Check what RDMA needs on this machine, and say what to do."),
        ("gids", gids.run, "List the GIDs, with type, IPv4 form and interface."),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
        if function is gids.run:
            command.add_argument("device", nargs="?", metavar="DEVICE")
        command.set_defaults(function=function)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and not words[0].startswith("-") and words[0] not in commands.choices:
        known = ", ".join(commands.choices)
        print_hint(f"aiordma: only {known} work here: {_REST}")
        return 2
    try:
        options = vars(parser.parse_args(words))
    except SystemExit as exit_:  # after --help, or a mistake in the words
        return exit_.code if isinstance(exit_.code, int) else 2
    return int(options.pop("function")(**options))
