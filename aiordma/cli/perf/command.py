"""The words of `aiordma perf`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import click

from aiordma.cli.perf.options import APIS, LOOPS, METRICS, TESTS, WAITS, Plan
from aiordma.cli.ports import DEFAULT_PORT

__all__ = ["perf"]

_ITERS = 1000


@click.command("perf", short_help="Measure latency, bandwidth or message rate.")
@click.argument("test", required=False, type=click.Choice(TESTS))
@click.argument("metric", required=False, type=click.Choice(METRICS))
@click.argument("host", required=False)
@click.option(
    "--local",
    metavar="ADDRESS",
    help="Client and server in one command: the server is a second process on this address.",
)
@click.option("--server", is_flag=True, help="Serve one test; so does the command without HOST.")
@click.option("--host", "listen_host", metavar="ADDRESS", help="Server: address to listen on.")
@click.option(
    "-p",
    "--port",
    type=click.IntRange(0, 0xFFFF),
    default=DEFAULT_PORT,
    show_default=True,
    help="Listen on, or connect to, this port.",
)
@click.option("-s", "--size", type=int, help="Bytes of a message. [lat 2, bw 65536, rate 64]")
@click.option("-a", "--all", "all_sizes", is_flag=True, help="Sizes from 2 to 2^23.")
@click.option("-n", "--iters", type=int, help="Iterations of each size.  [1000]")
@click.option("-D", "--duration", type=float, metavar="SECONDS", help="Measure this long instead.")
@click.option("-q", "--qp", "qps", type=int, default=1, help="Connections.  [1]")
@click.option("-t", "--tx-depth", type=int, help="Requests under way, for bw and rate.  [128]")
@click.option("-r", "--rx-depth", type=int, default=512, help="Receives posted ahead.  [512]")
@click.option("-l", "--post-list", type=int, help="Requests with one doorbell.")
@click.option("-W", "--warm-up", type=int, help="Iterations before each measurement.")
@click.option("--api", type=click.Choice(APIS), help="Which interface is measured.")
@click.option("--loop", type=click.Choice(LOOPS), default="asyncio", help="Which event loop.")
@click.option("--wait", type=click.Choice(WAITS), default="event", help="How to wait.")
@click.option("--report_gbits", "gbits", is_flag=True, help="Bandwidth in Gb/s, not MiB/s.")
@click.option("-U", "--report-unsorted", "unsorted", is_flag=True, help="lat: every sample, too.")
@click.option("--json", "json_path", metavar="FILE", help="Write JSON, too; '-': JSON alone.")
@click.option(
    "--timeout", "timeout_s", type=float, default=300.0, metavar="SECONDS",
    help="Limit for connecting, and for each measurement in addition to its duration.  [300]",
)  # fmt: skip
@click.option("--with-parent", is_flag=True, hidden=True)
@click.pass_context
def perf(
    context: click.Context,
    /,
    *,
    test: str | None,
    metric: str | None,
    host: str | None,
    local: str | None,
    server: bool,
    listen_host: str | None,
    port: int,
    iters: int | None,
    duration: float | None,
    loop: str,
    gbits: bool,
    unsorted: bool,
    json_path: str | None,
    with_parent: bool,
    **choices: Any,
) -> None:
    """Measure latency, bandwidth or message rate, with the columns of perftest.

    With HOST it is the client, without it the server, which learns everything but its --loop from
    the client and serves one test.
    """
    if loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        raise click.UsageError("uvloop is not installed: pip install 'aiordma[uvloop]'")
    if host is not None and (local is not None or server):
        raise click.UsageError("HOST is for a client: leave --local and --server out")
    if local is not None and server:
        raise click.UsageError("--local starts a server of its own: leave --server out")
    # Modules that need RDMA are imported once it is clear what to do.
    if host is None and local is None:
        if json_path is not None:
            raise click.UsageError("the figures are the client's: leave --json out")
        from aiordma.cli.perf.run import run_server

        context.exit(run_server(listen_host, port, loop=loop, with_parent=with_parent))
    if test is None or metric is None:
        raise click.UsageError("say what to measure: TEST and METRIC")
    if duration is not None and iters is not None:
        raise click.UsageError("--iters and --duration are two ways to end: give one of them")
    if unsorted and metric != "lat":
        raise click.UsageError("--report-unsorted is for lat")
    if gbits and metric == "lat":
        raise click.UsageError("--report_gbits is for bw and rate")
    if host is not None and not port:
        raise click.UsageError("--port 0 is for a server")
    if json_path not in (None, "-") and not Path(str(json_path)).absolute().parent.is_dir():
        raise click.UsageError(f"--json: there is no folder {Path(str(json_path)).parent}")
    choices["iters"] = _ITERS if iters is None else iters
    try:
        plan = Plan.make(test, metric, duration_s=duration, **choices)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    from aiordma.cli.perf.output import Printer
    from aiordma.cli.perf.run import run_client, run_local

    printer = Printer(plan, gbits=gbits, unsorted=unsorted, json_path=json_path)
    if local is not None:
        context.exit(run_local(plan, local, loop=loop, printer=printer))
    assert host is not None
    context.exit(run_client(plan, host, port, loop=loop, printer=printer))
