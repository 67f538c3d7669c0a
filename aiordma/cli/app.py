"""The command line on click."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from aiordma.cli import devices, doctor
from aiordma.cli.perf.command import perf
from aiordma.cli.top import top
from aiordma.cli.version import aiordma_version

__all__ = ["run"]

_F = TypeVar("_F", bound=Callable[..., Any])

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
@click.version_option(aiordma_version(), prog_name="aiordma")
def aiordma() -> None:
    """RDMA connections for asyncio: the devices of this machine, and whether they work."""


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


_limit = click.option(
    "--timeout",
    "limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Limit for each step on the wire.",
)


def _bound(name: str, default: int, text: str) -> Callable[[_F], _F]:
    return click.option(
        name, type=click.IntRange(min=1), default=default, show_default=True, help=text
    )


@aiordma.command("cp")
@click.argument("source")
@click.argument("destination")
@_json
@_limit
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.pass_context
def _cp(
    context: click.Context,
    *,
    source: str,
    destination: str,
    as_json: bool,
    limit_s: float,
    quiet: bool,
) -> None:
    """Copy a file to an `aiordma serve`, or from it.

    One of SOURCE and DESTINATION is HOST:PORT/NAME (an IPv6 address in brackets), the other a file
    here.  The file appears under its name when it is complete and its SHA-256 is right.
    """
    # Here and below: modules that need RDMA are imported only by the commands that use them.
    from aiordma.cli import cp

    context.exit(cp.run(source, destination, as_json=as_json, quiet=quiet, limit_s=limit_s))


@aiordma.command("serve")
@click.argument("folder")
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 0xFFFF),
    default=18516,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--writable", is_flag=True, help="Let clients put files into the folder.")
@_bound("--max-clients", 64, "Clients that are served at a time; more are refused.")
@_bound("--max-file-bytes", 16 << 30, "Bytes of a file that clients put.")
@_bound("--max-bytes", 64 << 30, "Bytes of all files that clients put while the server runs.")
@_bound("--max-files", 100_000, "Number of files that clients put while the server runs.")
@_json
@_limit
@click.pass_context
def _serve(
    context: click.Context,
    *,
    folder: str,
    host: str,
    port: int,
    writable: bool,
    as_json: bool,
    limit_s: float,
    max_clients: int,
    max_file_bytes: int,
    max_bytes: int,
    max_files: int,
) -> None:
    """Offer the files of FOLDER to `aiordma cp`, until Ctrl-C.

    There are no passwords: any program that reaches the port can read the files.
    """
    from aiordma.cli import serve
    from aiordma.cli.transfer.server import Quota

    status = serve.run(
        folder,
        host=host,
        port=port,
        writable=writable,
        as_json=as_json,
        limit_s=limit_s,
        most_clients=max_clients,
        quota=Quota(max_bytes, max_files, max_file_bytes),
    )
    context.exit(status)


aiordma.add_command(perf)
aiordma.add_command(top)


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
