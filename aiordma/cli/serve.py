"""`aiordma serve`: offer a folder to `aiordma cp`.

Any program that reaches the port may read the folder's files and, with `--writable`, make and
replace some, up to a quota: there are no passwords.  When a client has gone, a line in the output
says so.  Clients are served whether or not the lines are read: 1,000 lines wait, and further lines
are lost, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from aiordma.cli.lines import LineWriter, event_line
from aiordma.cli.output import print_hint
from aiordma.cli.transfer.exchange import STREAM_CONFIG, Exchange, closing
from aiordma.cli.transfer.failure import TransferError
from aiordma.cli.transfer.folder import Folder
from aiordma.cli.transfer.frames import Reason
from aiordma.cli.transfer.server import Quota, serve_one
from aiordma.errors import RdmaError
from aiordma.link.listening import is_worth_a_line
from aiordma.link.source import source_of
from aiordma.memory.governor import fair_share
from aiordma.streams import RdmaStreamReader, start_server

__all__ = ["run"]

_EVERYWHERE = ("", "0.0.0.0", "::")
SILENT_S = 2.0  # a client that has asked for nothing by then gives way to others


def run(
    path: str,
    *,
    host: str,
    port: int,
    writable: bool,
    as_json: bool,
    limit_s: float,
    most_clients: int,
    quota: Quota,
) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        path: The folder.
        host: Address to listen on.
        port: Port to listen on; 0 lets the kernel choose.
        writable: Whether clients may put files there.
        as_json: Print each line as a JSON object.
        limit_s: Seconds that each step on the wire may take.
        most_clients: Clients that are served at a time; more are refused.
        quota: Limits of the files that clients may put.

    Returns:
        0; 1 if the folder or the port is not available.
    """
    try:
        folder = Folder(Path(path))
    except OSError as exc:
        print_hint(f"aiordma serve: {path}: {exc.strerror}")
        return 1
    lines = LineWriter(
        sys.stdout,
        lambda lost: event_line(
            "lost", f"{lost} lines: nothing has read them", as_json=as_json, lines=lost
        ),
    )
    try:
        service = Service(folder, writable, as_json, limit_s, most_clients, quota, lines.put)
        asyncio.run(service.serve(host, port))
    except (OSError, RdmaError) as exc:
        print_hint(f"aiordma serve: cannot listen on {host} port {port}: {exc}")
        return 1
    finally:
        folder.close()
        lines.close()
    return 0


@dataclass(eq=False, slots=True)
class Holder:
    """A client that has one of the places."""

    task: asyncio.Task[None]
    exchange: Exchange
    source: str
    since: float


class Service:
    """Serves a folder.

    Attributes:
        folder: The folder that is served.
        clients: The task of each client.
        holders: The clients that have a place, the oldest first.
    """

    def __init__(
        self,
        folder: Folder,
        writable: bool,
        as_json: bool,
        limit_s: float,
        most_clients: int,
        quota: Quota,
        put: Callable[[str], None] = print,
    ) -> None:
        self._put = put
        self._most_clients = most_clients
        self._quota = quota
        self.folder = folder
        self._writable = writable
        self._as_json = as_json
        self._limit_s = limit_s
        self.clients: set[asyncio.Task[None]] = set()
        self.holders: dict[Holder, None] = {}
        self._refused = 0

    async def serve(self, host: str, port: int) -> None:
        """Listen until a signal, then break off the transfers under way."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        server = await start_server(self.client, host, port, config=STREAM_CONFIG)
        async with server:
            for address in server.socknames:
                words = f"on {address[0]} {address[1]}"
                self._say("listening", words, host=address[0], port=address[1])
            if host in _EVERYWHERE:
                may = "read and replace" if self._writable else "read"
                print_hint(
                    "aiordma serve: on all addresses of this machine, without passwords: any "
                    f"program that reaches the port may {may} the files; --host ADDRESS listens "
                    "on one"
                )
            await stop.wait()
            server.close()
            server.abort_clients()
            # Each task removes the file that it has received in part.
            if self.clients:
                await asyncio.wait(self.clients)

    async def client(self, reader: RdmaStreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client, or send it the reason of the refusal."""
        task = asyncio.current_task()
        assert task is not None
        self.clients.add(task)
        task.add_done_callback(self.clients.discard)
        peer = " ".join(str(part) for part in writer.get_extra_info("peername")[:2])
        exchange = Exchange(reader, writer, self._limit_s)
        source = source_of(peer.split()[0])
        me = Holder(task, exchange, source, asyncio.get_running_loop().time())
        async with closing(writer, self._limit_s):
            text = self.why_full(source)
            if text and self._make_room(me):
                text = self.why_full(source)
            if text:
                self._refused += 1
                if is_worth_a_line(self._refused):
                    words = f"{text}, {peer} ({self._refused} refused so far)"
                    self._say("failed", words, error=text, peer=peer, refused=self._refused)
                with contextlib.suppress(OSError):
                    await exchange.apologize(TransferError(Reason.FULL, text))
                return
            self.holders[me] = None
            task.add_done_callback(lambda _: self.holders.pop(me, None))
            try:
                done = await serve_one(
                    exchange, self.folder, writable=self._writable, quota=self._quota
                )
            except (TransferError, OSError) as exc:
                self._say("failed", f"{exc}, {peer}", error=str(exc), peer=peer)
                await exchange.hear_out()
            else:
                words = f"{done.name} {done.size} bytes, {peer}"
                self._say(done.action, words, **asdict(done), peer=peer)

    def why_full(self, source: str) -> str:
        """The reason to refuse another client from that source; empty if there is none."""
        total, most = len(self.holders), self._most_clients
        if total >= most:
            return f"the server has {total} clients already; try again"
        own = sum(each.source == source for each in self.holders)
        if own and own + 1 > fair_share(most, total, own):
            return f"the server has {own} clients already from {source}; try again"
        return ""

    def _make_room(self, newcomer: Holder) -> bool:
        """End the oldest client that has asked for nothing, of the source with most of these."""
        silent = [
            each
            for each in self.holders
            if not each.exchange.asked and newcomer.since - each.since >= SILENT_S
        ]
        if len(self.holders) < self._most_clients:  # only the share of the source is used up
            silent = [each for each in silent if each.source == newcomer.source]
        if not silent:
            return False
        most = Counter(each.source for each in silent).most_common(1)[0][0]
        out = next(each for each in silent if each.source == most)
        del self.holders[out]
        return out.task.cancel()

    def _say(self, event: str, words: str, **facts: object) -> None:
        self._put(event_line(event, words, as_json=self._as_json, **facts))
