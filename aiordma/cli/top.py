"""`aiordma top`: the live connections of a process that has called `aiordma.metrics.serve`.

It reads snapshots from the process's socket, or from the file of `dump_on_signal`, whose process it
signals for each.  On a terminal the table is refreshed until Ctrl-C; in a pipe it is printed once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from aiordma.cli.foreign import parsed, real, whole
from aiordma.cli.output import print_hint, printable

__all__ = ["top"]

LIMIT_S = 5  # for the process to answer
_MOST_BYTES = 64 << 20
_POLL_S = 0.02
HEADER = (
    "NUMBER", "KIND", "PEER", "DEVICE", "STATE", "AGE", "SENT/s", "RECV/s", "MSG/s", "WAITING",
    "PINNED",
)  # fmt: skip
_REMEDY = "in the program, `import aiordma.metrics` and call `aiordma.metrics.serve()`"
_LEFT = frozenset({"KIND", "PEER", "DEVICE", "STATE"})

# The word of a kind in the table, by its name in a snapshot.
_KINDS = {"connections": "messages", "streams": "stream", "datagrams": "datagrams"}
_NUMBERS = ("number", "waiting_to_be_received", "pinned_bytes")
_UNITS = ("messages_sent", "messages_received", "datagrams_sent", "datagrams_received")
_COUNTED = ("bytes_sent", "bytes_received", *_UNITS)
_TOTALS = ("messages_sent", "messages_received", "connections_lost", "refused")
_MOST_S = 1e12  # of a time since the epoch

Seen = dict[str, Any]
Row = tuple[str, ...]


class NoSnapshotError(Exception):
    """The process gives no snapshot; the text says why."""


class Source(Protocol):
    """A process that gives snapshots."""

    def take(self) -> Seen:
        """The next snapshot.

        Raises:
            NoSnapshotError: There is none.
        """


class SocketSource:
    """The socket of `aiordma.metrics.serve`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> Seen:
        """Connect, and read all."""
        end, parts, size = time.monotonic() + LIMIT_S, [], 0
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as reader:
                # A connect that waits for room behind other readers: with a timeout of Python's the
                # socket does not block, and a full line is EAGAIN at once.
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(LIMIT_S))
                reader.connect(os.fspath(self._path))
                reader.settimeout(LIMIT_S)
                while part := reader.recv(1 << 16):
                    parts.append(part)
                    size += len(part)
                    if size > _MOST_BYTES or time.monotonic() > end:
                        raise NoSnapshotError(f"{self._path}: the answer does not end")
        except ConnectionRefusedError as exc:
            raise NoSnapshotError(f"{self._path}: the process has ended") from exc
        except (TimeoutError, BlockingIOError) as exc:
            raise NoSnapshotError(f"{self._path}: no answer within {LIMIT_S} s") from exc
        except OSError as exc:
            raise NoSnapshotError(f"{self._path}: {exc.strerror or exc}") from exc
        return _parsed(self._path, b"".join(parts))


class DumpSource:
    """The file of `aiordma.metrics.dump_on_signal`.

    The file may belong to another user, and it names the process and the signal.  So only a process
    of the user that owns the file is signaled.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> Seen:
        """Signal the process, and read the file that it then writes."""
        seen, before = self._read()
        dump, pid = seen.get("dump"), seen.get("pid")
        if not isinstance(dump, dict) or not isinstance(pid, int) or pid <= 0:
            raise NoSnapshotError(f"{self._path} is no dump of aiordma.metrics.dump_on_signal")
        try:
            self._signal(pid, dump, before.st_uid)
        except (OSError, OverflowError, ValueError, TypeError) as exc:
            raise NoSnapshotError(f"{self._path}: process {pid}: {exc}") from exc
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            seen, now = self._read()
            if (now.st_ino, now.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
                return seen
            time.sleep(_POLL_S)
        raise NoSnapshotError(f"{self._path}: no dump within {LIMIT_S} s")

    def _signal(self, pid: int, dump: Seen, owner: int) -> None:
        from aiordma.metrics.serving import start_of

        number = signal.Signals(dump.get("signal", 0))
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            raise NoSnapshotError(f"{self._path}: the process {pid} has ended") from None
        try:
            # Its number may belong to another process by now, which the signal would end.  From
            # here on the descriptor means the old process.
            if not dump.get("began") or start_of(pid) != dump["began"]:
                raise NoSnapshotError(f"{self._path}: the process {pid} has ended")
            if os.stat(f"/proc/{pid}").st_uid != owner:
                text = f"{self._path}: the process {pid} does not belong to the owner of the file"
                raise NoSnapshotError(text)
            signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)

    def _read(self) -> tuple[Seen, os.stat_result]:
        try:
            # Without waiting, if it has become a FIFO.
            with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise NoSnapshotError(f"{self._path} is not a file")
                if found.st_size > _MOST_BYTES:
                    raise NoSnapshotError(f"{self._path} is too large")
                data = file.read(_MOST_BYTES)
        except OSError as exc:
            raise NoSnapshotError(f"{self._path}: {exc.strerror}") from exc
        return _parsed(self._path, data), found


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _parsed(path: Path, data: bytes) -> Seen:
    try:
        seen = parsed(data)
        whole(seen["pid"], 1)
        real(seen["time"], 0, _MOST_S)
        for name in _TOTALS:
            whole(seen["totals"].get(name, 0))
        for kind in _KINDS:
            whole(seen.get(f"unlisted_{kind}", 0))
            if not all(map(_is_row, seen[kind])):
                raise ValueError(kind)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NoSnapshotError(f"{path} gives no snapshot of aiordma.metrics") from None
    return dict(seen)


def _is_row(each: Any) -> bool:
    """Whether it has all that the table shows.

    Raises:
        ValueError, KeyError, AttributeError: It does not.
    """
    for name in _NUMBERS:
        whole(each[name])
    for name in _COUNTED:
        whole(each.get(name, 0))
    if (opened := each.get("opened_at")) is not None:
        real(opened, 0, _MOST_S)
    return all(isinstance(each[name], str) for name in ("device", "state")) and all(
        _is_address(each.get(name)) for name in ("peername", "sockname")
    )


def _is_address(address: Any) -> bool:
    # An IPv6 address may have two more numbers, as a socket's has.
    return address is None or (isinstance(address, list) and len(address) in (2, 4))


def _source_at(path: Path) -> Source | None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if stat.S_ISSOCK(mode):
        return SocketSource(path)
    return DumpSource(path) if stat.S_ISREG(mode) else None


def _source_of(target: str) -> Source:
    """The source of a process number, or of a path.

    Raises:
        NoSnapshotError: There is none.
    """
    from aiordma.metrics.serving import default_paths, is_owned

    if not target.isdecimal():
        source = _source_at(Path(target))
        if source is None:
            raise NoSnapshotError(f"{target}: no socket, and no dump")
        return source
    try:
        owner = os.stat(f"/proc/{target}").st_uid
    except OSError:
        raise NoSnapshotError(f"there is no process {target}") from None
    for suffix in ("sock", "json"):
        for path in default_paths(int(target), owner, suffix):
            source = _source_at(path) if is_owned(path.parent, owner) else None
            if source is not None:
                return source
    raise NoSnapshotError(f"process {target} shows nothing: {_REMEDY}, or give the path")


# The table


def _bytes(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.0f}{unit}" if not unit or number >= 100 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}T"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _rates(each: Seen, before: Seen | None, seconds: float) -> tuple[float, float, float]:
    """Bytes sent and received, and messages or datagrams, a second.

    Since `before`, or since the beginning.
    """
    values = []
    for names in (("bytes_sent",), ("bytes_received",), _UNITS):
        moved = sum(each.get(name, 0) - (before or {}).get(name, 0) for name in names)
        values.append(moved / seconds if seconds > 0 else 0.0)
    sent, received, messages = values
    return sent, received, messages


def _place(each: Seen) -> str:
    """The peer; for an endpoint without one, its own address."""
    if peer := each.get("peername"):
        return f"{peer[0]} {peer[1]}"
    own = each.get("sockname") if "datagrams_sent" in each else None
    return f"on {own[0]} {own[1]}" if own else "-"


def _rows(seen: Seen, before: Seen | None) -> list[Row]:
    known = {} if before is None else {
        each["number"]: each for kind in _KINDS for each in before[kind]
    }  # fmt: skip
    found: list[tuple[float, Row]] = []
    for kind, name in _KINDS.items():
        for each in seen[kind]:
            opened, last = each.get("opened_at"), known.get(each["number"])
            age = None if opened is None else seen["time"] - opened
            since = seen["time"] - before["time"] if before and last else age or 0.0
            sent, received, messages = _rates(each, last, since)
            row = (
                str(each["number"]),
                name,
                _place(each),
                each["device"],
                each["state"],
                _age(age),
                _bytes(sent),
                _bytes(received),
                _bytes(messages) if kind != "streams" else "-",
                _bytes(each["waiting_to_be_received"]),
                _bytes(each["pinned_bytes"]),
            )
            found.append((sent + received, tuple(map(printable, row))))
    found.sort(key=lambda each: -each[0])
    return [row for _, row in found]


def _summary(seen: Seen, before: Seen | None) -> str:
    totals = {name: seen["totals"].get(name, 0) for name in _TOTALS}
    text = (
        f"process {seen['pid']}: {len(seen['connections'])} connections, "
        f"{len(seen['streams'])} streams, {len(seen['datagrams'])} datagram endpoints; "
        f"{totals['messages_sent']} messages sent, {totals['messages_received']} received; "
        f"{totals['connections_lost']} connections lost, {totals['refused']} clients refused"
    )
    unlisted = sum(seen.get(f"unlisted_{kind}", 0) for kind in _KINDS)
    if unlisted:
        text += f"; {unlisted} more are not listed"
    return printable(text if before else text + "; rates since each was opened")


def _lines(seen: Seen, before: Seen | None, room: int | None = None) -> list[str]:
    """The table, of at most `room` lines."""
    rows = _rows(seen, before)
    more = 0 if room is None else max(0, len(rows) - max(1, room - 3))
    rows = rows[: len(rows) - more]
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    lines = [_summary(seen, before)]
    for row in (HEADER, *rows):
        cells = [
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(HEADER, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return [*lines, f"... and {more} more"] if more else lines


# The command


def _snapshots(source: Source, count: int | None, interval: float) -> Iterator[Seen]:
    """Take `count` snapshots, or snapshots until the process has ended."""
    yield source.take()
    taken = 1
    while count is None or taken < count:
        time.sleep(interval)
        try:
            yield source.take()
        except NoSnapshotError as exc:
            print_hint(f"aiordma top: {exc}")
            return
        taken += 1


def _show(snapshots: Iterator[Seen], *, as_json: bool) -> None:
    """Print each snapshot behind the last."""
    before: Seen | None = None
    for seen in snapshots:
        if as_json:
            print(json.dumps(seen), flush=True)
        else:
            print(*([""] if before else []), *_lines(seen, before), sep="\n", flush=True)
        before = seen


def _refresh(snapshots: Iterator[Seen]) -> None:
    """Show each snapshot in the place of the last, on a terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    before: Seen | None = None
    with Live(console=console, auto_refresh=False) as live:
        for seen in snapshots:
            summary, header, *rows = _lines(seen, before, console.height - 1)
            text = Text("\n", no_wrap=True, overflow="ellipsis").join(
                [Text(summary), Text(header, style="bold"), *map(Text, rows)]
            )
            live.update(text, refresh=True)
            before = seen


def _running(targets: Sequence[Path], open_: Callable[[Path], Source | None]) -> list[str]:
    return [path.name.partition(".")[0] for path in targets if open_(path) is not None]


def _only_process() -> str:
    """The process of this user that shows its connections, if there is exactly one.

    Raises:
        NoSnapshotError: There is none.
        click.UsageError: There are several.
    """
    from aiordma.metrics.serving import default_paths, is_owned

    found: set[str] = set()
    for suffix in ("sock", "json"):
        for path in default_paths(0, os.geteuid(), suffix):
            if is_owned(path.parent, os.geteuid()):
                names = _running(sorted(path.parent.glob(f"*.{suffix}")), _source_at)
                found |= {name for name in names if Path(f"/proc/{name}").is_dir()}
    if len(found) == 1:
        return found.pop()
    if not found:
        raise NoSnapshotError(f"no process of this user shows its connections: {_REMEDY}")
    raise click.UsageError(f"which process? {', '.join(sorted(found, key=int))}")


@click.command()
@click.argument("target", metavar="[PID|SOCKET]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print each snapshot as a line of JSON.")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(min=1),
    help="Number of snapshots; by default 1 in a pipe, and no limit on a terminal.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two snapshots.",
)
@click.pass_context
def top(
    context: click.Context, *, target: str | None, as_json: bool, count: int | None, interval: float
) -> None:
    """Show the live connections, streams and datagram endpoints of a process.

    The process has to call `aiordma.metrics.serve()`, or `aiordma.metrics.dump_on_signal()`.  Given
    the number of a process, or nothing, the command looks for its socket or file in the usual
    place.  SENT/s and RECV/s are bytes a second; WAITING is the number of messages (for a stream,
    bytes) that have arrived and that the program has not taken.
    """
    terminal = sys.stdout.isatty() and not as_json
    try:
        source = _source_of(_only_process() if target is None else target)
        snapshots = _snapshots(source, count or (None if terminal else 1), interval)
        if terminal:
            _refresh(snapshots)
        else:
            _show(snapshots, as_json=as_json)
    except NoSnapshotError as exc:
        print_hint(f"aiordma top: {exc}")
        context.exit(1)
    except KeyboardInterrupt:
        context.exit(0)  # as the end of every other `top`
