"""The command line without click: the extra `cli` may be missing where a diagnosis is needed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from aiordma.cli import devices, doctor
from aiordma.cli.version import aiordma_version

__all__ = ["run"]


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="aiordma",
        description="RDMA connections for asyncio: what is here, and whether it works.",
        epilog="More commands (cp, perf, serve) and more comfort with: pip install aiordma[cli]",
    )
    version = f"aiordma, version {aiordma_version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function, text in (
        ("devices", devices.run, "List the RDMA devices with their ports and GIDs."),
        ("doctor", doctor.run, "Check what RDMA needs on this machine, and say what to do."),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
        command.set_defaults(function=function)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as exit_:  # after --help, or a mistake in the words
        return exit_.code if isinstance(exit_.code, int) else 2
    return int(options.function(as_json=options.as_json))
