"""`aiordma ping`: the time that a message to `aiordma echo` takes there and back, or a connection.

Messages are numbered.  A connection delivers in order, so that the n-th answer belongs to the n-th
message of the connection.  A message is lost if its answer does not come within the limit, is not
the same bytes, or if the connection breaks before; then the next message makes a new connection.

With `--connect` each message is a connection instead, which is opened and closed: any server of
messages or requests answers that by itself, as long as its event loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from aiordma.cli.output import print_hint, print_line, printable
from aiordma.cli.words import is_full, serves_streams, words_of
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.keys import Keys
from aiordma.errors import (
    AuthenticationError,
    DeviceNotFoundError,
    HostNotFoundError,
    LibraryMissingError,
    RdmaError,
    RdmaOSError,
    RdmaPermissionError,
)
from aiordma.verbs.device import why_unavailable

__all__ = ["Ping", "Printer", "Tally", "run"]

#: Another message will not help here.
_FOR_GOOD = (DeviceNotFoundError, HostNotFoundError, LibraryMissingError, RdmaPermissionError)


#: Messages whose answers are late, and may come yet.  A peer that reads, and answers nothing, would
#: have the line of them grow for as long as the command runs.
_MOST_GIVEN_UP = 1000


class OutputEndedError(Exception):
    """The output takes no more; not an error of a connection.

    Attributes:
        cause: The reason.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(slots=True)
class Tally:
    """The figures of a run.

    Attributes:
        sent: Messages that were to be sent.
        lost: Those of them without a good answer in time.
        times_ms: Milliseconds that each answer took.
    """

    sent: int = 0
    lost: int = 0
    times_ms: list[float] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """Messages with a good answer in time."""
        return len(self.times_ms)

    @property
    def waiting(self) -> int:
        """Messages whose time has not run out."""
        return self.sent - self.lost - self.answered

    @property
    def loss_percent(self) -> float:
        """Percentage lost of the messages whose fate is known."""
        known = self.lost + self.answered
        return 100 * self.lost / known if known else 0.0

    def figures(self) -> dict[str, float] | None:
        """min, avg, max and mdev in milliseconds; None without an answer."""
        if not self.times_ms:
            return None
        average = math.fsum(self.times_ms) / len(self.times_ms)
        square = math.fsum(each * each for each in self.times_ms) / len(self.times_ms)
        return {
            "min": min(self.times_ms),
            "avg": average,
            "max": max(self.times_ms),
            "mdev": math.sqrt(max(0.0, square - average * average)),
        }


@dataclass(slots=True)
class _Sent:
    """A message on its way."""

    number: int
    payload: bytes
    at_ns: int
    timer: asyncio.TimerHandle
    given_up: bool = False


class Printer:
    """Prints a run: lines for people, or for programs an object on each line.

    Args:
        as_json: For programs.
        quiet: The summary alone, and the last reason if there was no answer.
        what: What the summary counts.
    """

    def __init__(self, *, as_json: bool, quiet: bool, what: str = "messages sent") -> None:
        self._as_json = as_json
        self._what = what
        self._quiet = quiet
        self._lost: tuple[tuple[tuple[str, str], ...], dict[str, object]] | None = None

    def say(self, event: str, *parts: tuple[str, str], **facts: object) -> None:
        """A line about an event."""
        if self._quiet and event not in ("begin", "summary"):
            if event == "lost":
                self._lost = parts, facts
            return
        try:
            if self._as_json:
                print(json.dumps({"event": event, **facts}), flush=True)
            else:
                print_line(*parts)
                sys.stdout.flush()
        except OSError as exc:
            raise OutputEndedError(exc) from exc

    def summary(self, host: str, tally: Tally, seconds: float) -> None:
        """The end."""
        if self._lost is not None and not tally.answered:
            parts, facts = self._lost
            self._quiet = False
            self.say("lost", *parts, **facts)
        figures = tally.figures()
        if self._as_json:
            self.say(
                "summary", host=host, sent=tally.sent, answered=tally.answered, lost=tally.lost,
                loss_percent=round(tally.loss_percent, 3), seconds=round(seconds, 3),
                rtt_ms=figures and {name: round(value, 6) for name, value in figures.items()},
            )  # fmt: skip
            return
        waiting = f", {tally.waiting} not yet" if tally.waiting else ""
        self.say("summary", ("", ""))
        self.say("summary", (f"--- {host} ping statistics ---", "bold"))
        self.say(
            "summary",
            (f"{tally.sent} {self._what}, {tally.answered} answered{waiting}, ", ""),
            (f"{tally.loss_percent:.6g}% lost", "red" if tally.lost else "green"),
            (f", time {seconds * 1000:.0f} ms", ""),
        )
        if figures:
            numbers = "/".join(f"{value:.3f}" for value in figures.values())
            self.say("summary", (f"rtt {'/'.join(figures)} = {numbers} ms", ""))


def _is_past(loop: asyncio.AbstractEventLoop, due: float) -> bool:
    return loop.time() >= due


class Ping:
    """One run.

    Args:
        host: Name or address of the peer.
        port: Its port.
        count: Messages to send; None for no end.
        interval_s: Seconds from one message to the next.
        size: Bytes of a message.
        limit_s: Seconds that an answer may take, and a connection.
        source: Local address to connect from; None lets routing choose.
        connects: Whether to open and close connections instead of sending messages.
        keys: The key to prove; None for a peer without keys.
        printer: Prints the events.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        count: int | None,
        interval_s: float,
        size: int,
        limit_s: float,
        source: str | None,
        connects: bool,
        keys: Keys | None,
        printer: Printer,
    ) -> None:
        self.tally: Tally = Tally()
        self._host = host
        self._port = port
        self._count = count
        self._interval_s = interval_s
        self._size = size
        self._limit_s = limit_s
        self._local_addr = None if source is None else (source, 0)
        self._say = printer.say
        self._connects = connects
        self._config = ConnectionConfig(close_timeout_s=1.0, keys=keys)
        self._connection: Connection | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._sent: deque[_Sent] = deque()
        self._given_up = 0  # of these
        self._changed = asyncio.Event()
        self._error: OutputEndedError | None = None  # out of a callback or a task
        self._told = False

    async def run(self) -> None:
        """Send until the count is reached and all fates are known, or until canceled.

        Raises:
            RdmaError: There is no way to the peer, and there will be none.
            OutputEndedError: The output takes no more.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while self._count is None or self.tally.sent < self._count:
                await (self._connect_once() if self._connects else self._send_one())
                due = max(due + self._interval_s, loop.time())
                if self._count is None or self.tally.sent < self._count:
                    await self._until(partial(_is_past, loop, due), due)
            await self._until(lambda: not self.tally.waiting, None)
        finally:
            await self._disconnect()

    async def _until(self, condition: Callable[[], bool], due: float | None) -> None:
        """Wait for a condition, or a moment; ends at once by an error of a callback."""
        while not condition():
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
            if self._error is not None:
                raise self._error
        if self._error is not None:
            raise self._error

    async def _send_one(self) -> None:
        self.tally.sent += 1
        number = self.tally.sent
        payload = self._payload(number)
        is_on_its_way = False
        try:
            connection = await self._connected()
            self._push(number, payload)
            is_on_its_way = True
            async with asyncio.timeout(self._limit_s):
                await connection.send(payload)
        except (OSError, RdmaError) as exc:
            if self._is_final(exc):
                self.tally.lost += 1
                raise
            why = f"no answer within {self._limit_s:g} s" if not str(exc) else words_of(exc)
            self._lose_all(why)
            if not is_on_its_way:
                self._lose(number, why)
            await self._disconnect()

    async def _connect_once(self) -> None:
        self.tally.sent += 1
        begun_ns = time.perf_counter_ns()
        try:
            connection = await self._connect()
        except (OSError, RdmaError) as exc:
            if is_full(exc):  # its listener answers, and would have to be killed to have room
                self._answered(self.tally.sent, begun_ns, time.perf_counter_ns(), "full")
                return
            if self._is_final(exc):
                self.tally.lost += 1
                raise
            self._lose(self.tally.sent, words_of(exc))
            return
        self._answered(self.tally.sent, begun_ns, time.perf_counter_ns())
        await connection.close()

    def _is_final(self, exc: BaseException) -> bool:
        """Whether another message has no chance either."""
        if isinstance(exc, _FOR_GOOD) or serves_streams(exc):
            return True
        # A module or a node is missing here, which the error of C does not show.
        return not self._told and isinstance(exc, RdmaOSError) and why_unavailable() is not None

    def _push(self, number: int, payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limit_s, self._late, number)
        self._sent.append(_Sent(number, payload, time.perf_counter_ns(), timer))

    async def _connected(self) -> Connection:
        connection = self._connection
        if connection is not None and not connection.is_closing():
            return connection
        await self._disconnect()
        connection = self._connection = await self._connect()
        self._hearing = asyncio.get_running_loop().create_task(self._hear(connection))
        return connection

    async def _connect(self) -> Connection:
        connection = await connect(
            self._host,
            self._port,
            config=self._config,
            local_addr=self._local_addr,
            timeout=self._limit_s,
        )
        if not self._told:
            self._told = True
            there = connection.get_extra_info("peername")[0]
            device = connection.get_extra_info("device")
            where = f"{self._host} ({there})" if there != self._host else there
            what = "connections" if self._connects else f"{self._size} bytes"
            self._say(
                "begin",
                (f"PING {where} port {self._port} by {device}: {what}", "bold"),
                host=self._host, address=there, port=self._port, device=device, **self._sizes,
            )  # fmt: skip
        return connection

    async def _disconnect(self) -> None:
        hearing, self._hearing = self._hearing, None
        connection, self._connection = self._connection, None
        if hearing is not None:
            hearing.cancel()
            await asyncio.wait([hearing])
        if connection is not None:
            await connection.close()

    def _payload(self, number: int) -> bytes:
        head = number.to_bytes(8)
        return (head * (self._size // 8 + 1))[: self._size]

    async def _hear(self, connection: Connection) -> None:
        try:
            async for message in connection:
                at_ns = time.perf_counter_ns()
                if not self._sent:
                    self._broken(connection, "the peer sent more than it was sent")
                    return
                sent = self._sent.popleft()
                sent.timer.cancel()
                self._given_up -= sent.given_up
                if not sent.given_up:
                    self._judge(sent, message == sent.payload, at_ns)
                self._changed.set()
            self._broken(connection, "the peer ended the connection")
        except RdmaError as exc:
            self._broken(connection, f"{words_of(exc)}{_advice(exc)}")
        except OutputEndedError as exc:
            self._error = exc
            self._changed.set()

    def _broken(self, connection: Connection, why: str) -> None:
        connection.abort()
        self._lose_all(why)

    def _judge(self, sent: _Sent, is_same: bool, at_ns: int) -> None:
        if not is_same:
            self._lose(sent.number, "other bytes came back")
            return
        self._answered(sent.number, sent.at_ns, at_ns)

    @property
    def _sizes(self) -> dict[str, int]:
        return {} if self._connects else {"bytes": self._size}

    def _answered(self, number: int, begun_ns: int, at_ns: int, how: str = "") -> None:
        time_ms = (at_ns - begun_ns) / 1e6
        self.tally.times_ms.append(time_ms)
        what = "connection to" if self._connects else f"{self._size} bytes from"
        facts: dict[str, object] = {"full": True} if how else {}
        self._say(
            "answer",
            (f"{what} {self._host}: seq=", ""), (str(number), "cyan"),
            (" time=", ""), (f"{time_ms:.3f}", "green"), (f" ms{how and f', {how}'}", ""),
            seq=number, **self._sizes, time_ms=round(time_ms, 6), **facts,
        )  # fmt: skip

    def _late(self, number: int) -> None:
        for sent in self._sent:
            if sent.number == number:
                # It stays in line: its answer may come yet, before those of later messages.
                sent.given_up = True
                self._given_up += 1
                self._lose(number, f"no answer within {self._limit_s:g} s")
                break
        if self._given_up >= _MOST_GIVEN_UP and self._connection is not None:
            self._broken(self._connection, "the peer answers nothing")

    def _lose_all(self, why: str) -> None:
        self._given_up = 0
        while self._sent:
            sent = self._sent.popleft()
            sent.timer.cancel()
            if not sent.given_up:
                self._lose(sent.number, why)
        self._changed.set()

    def _lose(self, number: int, why: str) -> None:
        self.tally.lost += 1
        self._changed.set()
        try:
            self._say(
                "lost", ("seq=", ""), (str(number), "cyan"), (" lost: ", "red"), (why, ""),
                seq=number, error=printable(why),
            )  # fmt: skip
        except OutputEndedError as exc:
            self._error = exc


def _advice(exc: BaseException) -> str:
    """The option of this command that is missing, if it is one."""
    if isinstance(exc, AuthenticationError):
        return "; --key-file names the key of this command"
    if "it takes requests there" in str(exc):
        return "; --connect asks such a server"
    return ""


def run(
    host: str,
    port: int,
    *,
    count: int | None,
    interval_s: float,
    size: int,
    limit_s: float,
    source: str | None,
    connects: bool,
    keys: Keys | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Ping until the count is reached, or until SIGINT or SIGTERM; then print the summary.

    Args:
        host: Name or address of the peer.
        port: Its port.
        count: Messages to send; None for no end.
        interval_s: Seconds from one message to the next.
        size: Bytes of a message.
        limit_s: Seconds that an answer may take.
        source: Local address to connect from; None lets routing choose.
        connects: Open and close connections instead of sending messages.
        keys: The key to prove; None for a peer without keys.
        quiet: Print only the summary.
        as_json: Print a JSON object on each line.

    Returns:
        0 if there was an answer, else 1.
    """
    printer = Printer(
        as_json=as_json, quiet=quiet, what="connections" if connects else "messages sent"
    )

    async def work() -> Tally:
        ping = Ping(
            host, port, count=count, interval_s=interval_s, size=size, limit_s=limit_s,
            source=source, connects=connects, keys=keys, printer=printer,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        running = loop.create_task(ping.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, running.cancel)
        begun = loop.time()
        await asyncio.wait([running])
        seconds = loop.time() - begun
        error = None if running.cancelled() else running.exception()
        if isinstance(error, OSError | RdmaError):
            print_hint(f"aiordma ping: {words_of(error)}{_advice(error)}")
        elif error is not None:
            raise error
        if error is None or ping.tally.answered:
            printer.summary(host, ping.tally, seconds)
        return ping.tally

    try:
        return 0 if asyncio.run(work()).answered else 1
    except OutputEndedError as exc:
        raise exc.cause from None
