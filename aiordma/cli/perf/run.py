"""One run of the command: as the server, as the client, or as both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from aiordma.cli.output import print_hint
from aiordma.cli.perf.client import measure
from aiordma.cli.perf.control import PerfError
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.output import Printer
from aiordma.cli.perf.server import serve
from aiordma.cli.words import words_of
from aiordma.errors import RdmaError

__all__ = ["run_client", "run_local", "run_server"]

_START_S = 600.0  # for an interpreter, where time may fly; its death is noticed at once
_END_S = 10.0


def run_server(host: str | None, port: int, *, loop: str, with_parent: bool) -> int:
    """Serve one test; return 0, or 1 if it was not served to its end.

    Args:
        host: Address to listen on, None for all.
        port: Port.
        loop: Which event loop.
        with_parent: End when standard input does: a server that was started by its client.
    """
    if with_parent:
        threading.Thread(target=_end_with_input, daemon=True).start()

    def listening(address: str, port: int) -> None:
        print(f"listening on {address} {port}", flush=True)

    return _bounded(lambda: serve(host, port, loop=loop, listening=listening), loop)


def _end_with_input() -> None:
    """End the process with its input: the parent has ended then, and needs no result."""
    while os.read(0, 4096):  # not sys.stdin: its lock would be held at the end of the process
        pass
    os._exit(1)


def run_client(plan: Plan, host: str, port: int, *, loop: str, printer: Printer) -> int:
    """Run a test against a server; return 0, or 1 if it was not run to its end."""

    async def work() -> None:
        await measure(
            plan,
            host,
            port,
            loop=loop,
            gbits=printer.gbits,
            begun=lambda facts: printer.begin({**facts, "loop": loop}),
            measured=printer.row,
        )
        printer.end()

    return _bounded(work, loop)


def run_local(plan: Plan, host: str, *, loop: str, printer: Printer) -> int:
    """Run a test with a server of its own, in another process that ends with this."""
    try:
        with _server(host, loop) as port:
            return run_client(plan, host, port, loop=loop, printer=printer)
    except PerfError as exc:
        print_hint(f"aiordma perf: {exc}")
        return 1


@contextlib.contextmanager
def _server(host: str, loop: str) -> Iterator[int]:
    """Run a server process, and yield its port; it is ended in any case, within a bounded time."""
    words = ["perf", "--server", "--with-parent", "--host", host, "-p", "0", "--loop", loop]
    child = subprocess.Popen(
        [sys.executable, "-m", "aiordma", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield _port_of(child)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
    finally:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.stdout.close()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _port_of(child: subprocess.Popen[bytes]) -> int:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], _START_S)
    line = child.stdout.readline().split() if ready else []
    if line[:2] != [b"listening", b"on"]:
        msg = "the server did not start"
        raise PerfError(msg)
    return int(line[-1])


def _bounded(work: Callable[[], Coroutine[Any, Any, None]], loop: str) -> int:
    """Run a coroutine on the loop of that name; the exit status."""
    try:
        with asyncio.Runner(loop_factory=_factory(loop)) as runner:
            runner.run(work())
    except (PerfError, OSError, RdmaError) as exc:
        print_hint(f"aiordma perf: {words_of(exc)}")
        return 1
    return 0


def _factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if loop == "asyncio":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
