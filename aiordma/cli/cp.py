"""`aiordma cp`: copy a file to an `aiordma serve`, or from it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from aiordma.cli.output import print_hint, print_json, print_line, printable, rate_words
from aiordma.cli.transfer import client
from aiordma.cli.transfer.disk import in_thread
from aiordma.cli.transfer.exchange import STREAM_CONFIG, Exchange, closing
from aiordma.cli.transfer.failure import TransferError
from aiordma.cli.transfer.folder import local_incoming, local_source
from aiordma.cli.transfer.names import Remote, parse_remote, split_name
from aiordma.cli.words import words_of
from aiordma.errors import RdmaError
from aiordma.streams import open_connection

__all__ = ["plan", "run"]


def run(source: str, destination: str, *, as_json: bool, quiet: bool, limit_s: float) -> int:
    """Copy one file; one of the two is `HOST:[PORT]/NAME`.

    Args:
        source: File to copy.
        destination: Where to; if it is a folder or empty, under the source's name.
        as_json: Print the result for programs, and no progress.
        quiet: Print only errors.
        limit_s: Seconds that connecting, and each step on the wire, may take.

    Returns:
        0; 1 if the file was not copied, and then nothing of it is left; 2 if the names are wrong.
    """
    try:
        remote, local, is_put = plan(source, destination)
    except ValueError as exc:
        print_hint(f"aiordma cp: {exc}")
        return 2
    begun = time.monotonic()
    show = not as_json and not quiet
    try:
        with _progress(printable(local.name), shown=show) as bar:
            copy = (
                _put(remote, local, bar, limit_s) if is_put else _get(remote, local, bar, limit_s)
            )
            size, digest, extra = asyncio.run(copy)
    except (OSError, RdmaError, TransferError) as exc:
        print_hint(f"aiordma cp: {source} was not copied: {words_of(exc)}")
        if as_json:
            reason = exc.reason if isinstance(exc, TransferError) else "system"
            print_json({"ok": False, "reason": reason, "error": words_of(exc)})
        return 1
    seconds = time.monotonic() - begun
    if as_json:
        result = {
            "ok": True,
            "source": str(local if is_put else remote),
            "destination": str(remote if is_put else local),
            "bytes": size,
            "sha256": digest,
            "seconds": round(seconds, 6),
            **extra,
        }
        print_json(result)
    elif show:
        rate = rate_words(size / max(seconds, 1e-9))
        print_line(
            (f"{remote if is_put else local}", "bold"),
            (f"  {size} bytes in {seconds:.2f} s ({rate})  sha256 {digest}", ""),
        )
    return 0


def plan(source: str, destination: str) -> tuple[Remote, Path, bool]:
    """The file on the server, the local file, and whether it is sent.

    Raises:
        ValueError: Not exactly one of the two is on a server, or a name is invalid.
    """
    from_, to = parse_remote(source), parse_remote(destination)
    if from_ is None and to is not None:
        local = Path(source)
        name = to.name + local.name if to.name.endswith("/") or not to.name else to.name
        remote = Remote(to.host, to.port, name)
    elif from_ is not None and to is None:
        remote = from_
        local = Path(destination)
        split_name(remote.name)
        if destination.endswith("/") or local.is_dir():
            local /= split_name(remote.name)[-1]
    else:
        msg = (
            "one of the two is HOST:/NAME or HOST:PORT/NAME, the other a local file (./NAME if "
            "need be)"
        )
        raise ValueError(msg)
    split_name(remote.name)
    return remote, local, to is not None


_Bar = tuple[Callable[[int], object], Callable[[int], object]]
_Result = tuple[int, str, dict[str, Any]]


async def _put(remote: Remote, local: Path, bar: _Bar, limit_s: float) -> _Result:
    begin, progress = bar
    source = local_source(local)
    try:
        size = await in_thread(source.open)
        async with _connected(remote, limit_s) as (exchange, extra):
            begin(size)
            digest = await client.put(exchange, source, size, remote.name, progress)
    finally:
        await in_thread(source.close)
    return size, digest, extra


async def _get(remote: Remote, local: Path, bar: _Bar, limit_s: float) -> _Result:
    incoming = local_incoming(local)
    try:
        await in_thread(incoming.open)
        async with _connected(remote, limit_s) as (exchange, extra):
            size, digest = await client.get(exchange, remote.name, incoming, *bar)
    finally:
        await in_thread(incoming.discard)
    return size, digest, extra


@contextlib.asynccontextmanager
async def _connected(
    remote: Remote, limit_s: float
) -> AsyncIterator[tuple[Exchange, dict[str, Any]]]:
    """A connection to the server, and its facts for the report."""
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await open_connection(remote.host, remote.port, config=STREAM_CONFIG)
    except TimeoutError as exc:
        if str(exc):
            raise
        msg = f"no connection to {remote.host} port {remote.port} within {limit_s:g} s"
        raise TimeoutError(msg) from None
    extra = {key: writer.get_extra_info(key) for key in ("backend", "device")}
    async with closing(writer, limit_s):
        yield Exchange(reader, writer, limit_s), extra


@contextlib.contextmanager
def _progress(name: str, *, shown: bool) -> Iterator[_Bar]:
    """A bar if stderr is a terminal: called with the size, then with the bytes copied."""
    if not (shown and sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda _: None, lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """As TransferSpeedColumn, which has only decimal units."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("?" if speed is None else rate_words(speed), style="progress.data.speed")

    columns = (BarColumn(), DownloadColumn(binary_units=True), Rate(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(text, *columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=None)
        yield (
            lambda size: progress.update(task, total=size),
            lambda count: progress.advance(task, count),
        )
