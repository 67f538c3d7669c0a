"""The command line on click."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from aiordma.cli import devices, doctor, gids
from aiordma.cli.perf.command import perf
from aiordma.cli.ports import DEFAULT_PORT
from aiordma.cli.top import top
from aiordma.cli.version import aiordma_version

__all__ = ["run"]

_F = TypeVar("_F", bound=Callable[..., Any])


class _Seconds(click.FloatRange):
    """Seconds, up to a day; unlike its base it refuses NaN."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__(min=least, max=86_400.0, min_open=not least)

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


_port = click.option(
    "--port",
    type=click.IntRange(1, 0xFFFF),
    default=DEFAULT_PORT,
    show_default=True,
    help="The peer's port.",
)
_source = click.option(
    "-I",
    "--source",
    metavar="ADDRESS",
    help="Local address to connect from, which chooses the device.",
)
_key_file = click.option(
    "--key-file",
    type=click.Path(exists=True, path_type=Path),
    help="File whose bytes are the secret of a key, and whose name is the key's; of a folder, the "
    "file whose name sorts last.",
)
_listening = (
    click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on."),
    click.option(
        "--port",
        type=click.IntRange(0, 0xFFFF),
        default=DEFAULT_PORT,
        show_default=True,
        help="Port to listen on; 0 takes a free one.",
    ),
)


def _listens(function: _F) -> _F:
    for option in reversed(_listening):
        function = option(function)
    return function


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"All commands listen on port {DEFAULT_PORT}, or connect to it, unless the command line "
    "names another.  Rates are in MiB/s.",
)
@click.version_option(aiordma_version(), prog_name="aiordma")
def aiordma() -> None:
    """RDMA connections for asyncio: look at this machine, try the way to another, measure, copy."""


@aiordma.command("devices")
@_json
@click.pass_context
def _devices(context: click.Context, *, as_json: bool) -> None:
    """List the RDMA devices with their ports and GIDs."""
    context.exit(devices.run(as_json=as_json))


@aiordma.command("gids", short_help="List the GIDs of the devices.")
@click.argument("device", required=False)
@_json
@click.pass_context
def _gids(context: click.Context, *, device: str | None, as_json: bool) -> None:
    """List the GIDs of all devices, or of DEVICE: type, IPv4 form, interface."""
    context.exit(gids.run(device, as_json=as_json))


@aiordma.command("doctor", short_help="Check this machine, and the way to a peer.")
@click.argument("peer", required=False)
@_port
@click.option(
    "--timeout",
    "limit_s",
    type=_Seconds(),
    default=doctor.LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="With PEER: limit for each step on the wire.",
)
@_source
@_key_file
@_json
@click.pass_context
def _doctor(context: click.Context, /, **options: Any) -> None:
    """Check what RDMA needs on this machine, and say what to do.

    With PEER, the way to an `aiordma echo` there is checked, too: messages of all sizes, reads,
    writes and streams, in both directions; or to an `aiordma serve`, as far as it answers.
    """
    path = options.pop("key_file")
    with contextlib.suppress(ImportError):  # a check tells what is missing
        options["keys"] = _key_of(path)
    context.exit(doctor.run(**options))


@aiordma.command("ping", short_help="Measure the time to an echo and back.")
@click.argument("host")
@click.option("-c", "--count", type=click.IntRange(min=1), help="Stop after so many messages.")
@click.option(
    "-i",
    "--interval",
    "interval_s",
    type=_Seconds(0.001),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one message to the next.",
)
@click.option(
    "-s",
    "--size",
    type=click.IntRange(0, 64 << 20),
    default=56,
    show_default=True,
    help="Bytes of a message.",
)
@click.option(
    "-W",
    "--timeout",
    "limit_s",
    type=_Seconds(),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an answer, or a connection, may take.",
)
@_port
@_source
@click.option(
    "--connect",
    "connects",
    is_flag=True,
    help="Open and close connections instead of sending messages: for servers other than echo.",
)
@_key_file
@click.option("-q", "--quiet", is_flag=True, help="Print only the summary.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object on each line.")
@click.pass_context
def _ping(context: click.Context, /, **options: Any) -> None:
    """Measure the time to an `aiordma echo` on HOST and back, until Ctrl-C.

    With --connect, any server of messages or requests answers, without its program noticing; a
    refusal by a server that is full counts as an answer.

    Exit status: 0 if there was an answer, 1 if there was none, 2 for a wrong command line.
    """
    # Here and below: modules that need RDMA are imported only by the commands that use them.
    from aiordma.cli import ping

    is_default = context.get_parameter_source("size") is ParameterSource.DEFAULT
    if options["connects"] and not is_default:
        msg = "--size is for messages, and --connect sends none."
        raise click.UsageError(msg)
    options["keys"] = _key_of(options.pop("key_file"))
    context.exit(ping.run(options.pop("host"), options.pop("port"), **options))


def _key_of(path: Path | None) -> Any:
    """The key in a file, or in the last file of a folder, such as a mounted Kubernetes Secret."""
    if path is None:
        return None
    from aiordma.endpoint.keys import MOST_BYTES, Keys

    try:
        if path.is_dir():
            # The mount has entries of its own, whose names begin with a dot.
            files = sorted(each for each in path.iterdir() if not each.name.startswith("."))
            if not files:
                msg = "no file is there"
                raise ValueError(msg)
            path = files[-1]
        with path.open("rb") as file:
            return Keys({path.name: file.read(MOST_BYTES + 1)})
    except (OSError, ValueError) as exc:
        msg = f"{path}: {exc.strerror if isinstance(exc, OSError) else exc}"
        raise click.BadParameter(msg, param_hint="--key-file") from None


_limit = click.option(
    "--timeout",
    "limit_s",
    type=_Seconds(),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Limit for each step on the wire.",
)


def _bound(name: str, default: int, text: str, most: int | None = None) -> Callable[[_F], _F]:
    return click.option(
        name, type=click.IntRange(1, most), default=default, show_default=True, help=text
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

    One of SOURCE and DESTINATION is HOST:/NAME or HOST:PORT/NAME (an IPv6 address in brackets), the
    other a file here.  The file appears under its name when it is complete and its SHA-256 is
    right.
    """
    from aiordma.cli import cp

    context.exit(cp.run(source, destination, as_json=as_json, quiet=quiet, limit_s=limit_s))


@aiordma.command("echo", short_help="Send every message back.")
@_listens
@_bound("--max-clients", 64, "Clients that are served at a time; more are refused.", 1 << 16)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object on each line.")
@click.pass_context
def _echo(context: click.Context, *, host: str, port: int, max_clients: int, as_json: bool) -> None:
    """Send every message back, for `aiordma ping` and `aiordma doctor PEER`, until Ctrl-C."""
    from aiordma.cli import echo

    context.exit(echo.run(host, port, as_json=as_json, most_clients=max_clients))


@aiordma.command("serve")
@click.argument("folder")
@_listens
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
