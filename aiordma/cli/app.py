"""The command line on click."""

from __future__ import annotations

from collections.abc import Sequence

import click

from aiordma.cli import devices, doctor
from aiordma.cli.version import aiordma_version

__all__ = ["run"]

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
@click.version_option(aiordma_version(), prog_name="aiordma")
def aiordma() -> None:
    """RDMA connections for asyncio: what is here, and whether it works."""


@aiordma.command("devices")
@_json
@click.pass_context
def _devices(context: click.Context, *, as_json: bool) -> None:
    """List the RDMA devices with their ports and GIDs."""
    context.exit(devices.run(as_json=as_json))


@aiordma.command("doctor")
@_json
@click.pass_context
def _doctor(context: click.Context, *, as_json: bool) -> None:
    """Check what RDMA needs on this machine, and say what to do."""
    context.exit(doctor.run(as_json=as_json))


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line and return its exit status."""
    words = None if arguments is None else list(arguments)
    try:
        # Standalone mode would end the process by itself.
        return int(aiordma.main(words, prog_name="aiordma", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
