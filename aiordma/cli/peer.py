"""`aiordma doctor PEER`: the way to an `aiordma echo`, step by step; or to an `aiordma serve`.

Each step has a connection of its own, so that no step spoils the next.  A step that fails names the
first size that did not pass, and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiordma.cli.echo_orders import GIVE, MOST, STREAM_ORDER, TAKE, order, pattern
from aiordma.cli.finding import Finding, fail, ok, skip, warn
from aiordma.cli.foreign import parsed
from aiordma.cli.transfer.exchange import Exchange, closing
from aiordma.cli.transfer.failure import TransferError
from aiordma.cli.transfer.frames import Get, Ready, Reason
from aiordma.cli.words import serves_streams, words_of
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.keys import Keys
from aiordma.errors import (
    AuthenticationError,
    CompletionError,
    ConnectionLostError,
    ConnectionRejectedError,
    RdmaError,
)
from aiordma.memory.remote import RemoteRegion
from aiordma.streams.connecting import open_connection
from aiordma.streams.stream_reader import RdmaStreamReader

__all__ = ["SIZES", "Scene", "StepError", "examine_peer", "try_sizes"]

#: Bytes of a message: within one packet and beyond, within one slot and beyond, copied and read.
SIZES = (1, 64, 256, 1024, 4096, 16 << 10, 64 << 10, 256 << 10, MOST)
_MOST_TEXT = 60
_LONG_NAME = 60_000
_START_ECHO = "start `aiordma echo` there, or name its port by --port"


class StepError(Exception):
    """A step has failed.

    Attributes:
        seen: The fact.
        advice: The remedy, or an empty text.
    """

    def __init__(self, seen: str, advice: str = "") -> None:
        super().__init__(seen)
        self.seen = seen
        self.advice = advice


class OtherProgramError(StepError):
    """Packets pass both ways, but the steps cannot be taken with the program there."""


@dataclass(slots=True)
class Scene:
    """The peer, and the facts about it.

    Attributes:
        host: Name or address.
        port: Port of the messages.
        limit_s: Seconds for each step on the wire.
        source: Local address to connect from; None lets routing choose.
        keys: The key to prove; None for a peer without keys.
        facts: The answer of an `aiordma echo`; empty for another server.
        mtu: Bytes of data in a packet on RoCE and InfiniBand; 0 on iWARP.
        hole: The first size that did not pass, if it fills packets; else 0.
    """

    host: str
    port: int
    limit_s: float
    source: str | None = None
    keys: Keys | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    mtu: int = 0
    hole: int = 0

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        """A connection of messages."""
        config = ConnectionConfig(keys=self.keys)
        connecting = connect(
            self.host, self.port, config=config, local_addr=self._local_addr, timeout=self.limit_s
        )
        async with connecting as connection:
            yield connection

    @property
    def _local_addr(self) -> tuple[str, int] | None:
        return None if self.source is None else (self.source, 0)

    async def ask(self, connection: Connection, *messages: bytes) -> bytes:
        """Send messages, and return the answer."""
        async with asyncio.timeout(self.limit_s):
            for message in messages:
                await connection.send(message)
            with await connection.recv() as answer:
                return bytes(answer)

    async def order(self, connection: Connection, *messages: bytes) -> dict[str, Any]:
        """As `ask`; the answer is an object.

        Raises:
            StepError: It is not, or says that the peer could not do it.
        """
        answer = await self.ask(connection, *messages)
        words = _object(answer)
        if words is None:
            raise StepError(f"the peer answered {answer[:_MOST_TEXT]!r} to an order")
        if "error" in words:
            raise StepError(f"the peer could not: {words['error']}")
        return words

    async def region(self, connection: Connection) -> RemoteRegion:
        """Memory of the peer's program, open to this side."""
        words = await self.order(connection, order("expose"))
        try:
            return RemoteRegion.from_bytes(bytes.fromhex(str(words.get("region"))))
        except ValueError as exc:
            raise StepError(f"the peer named its memory wrongly: {exc}") from None

    @contextlib.asynccontextmanager
    async def stream(
        self, port: int
    ) -> AsyncIterator[tuple[RdmaStreamReader, asyncio.StreamWriter]]:
        """A connection of streams."""
        opening = open_connection(self.host, port, local_addr=self._local_addr)
        async with asyncio.timeout(self.limit_s):
            reader, writer = await opening
        async with closing(writer, self.limit_s):
            yield reader, writer


Step = Callable[[Scene], Awaitable[str]]


async def examine_peer(scene: Scene, told: Callable[[str, Finding], None]) -> None:
    """Run all steps.

    Args:
        scene: The peer.
        told: Called with the name and the finding of each step.
    """
    try:
        seen, steps = await _meet(scene)
    except OtherProgramError as exc:
        told("peer", warn(exc.seen, exc.advice))
        told("more", skip(", ".join(ECHO), _START_ECHO))
        return
    except (StepError, OSError, RdmaError) as exc:
        told("peer", _failure(scene, exc))
        return
    told("peer", ok(seen))
    for name, step in steps.items():
        try:
            told(name, ok(await step(scene)))
        except (StepError, OSError, RdmaError) as exc:
            told(name, _failure(scene, exc))
    if steps is not ECHO:
        rest = ", ".join(name for name in ECHO if name not in steps)
        told("more", skip(f"{rest}", "start `aiordma echo` there for the rest"))


def _failure(scene: Scene, exc: BaseException) -> Finding:
    if isinstance(exc, StepError):
        return fail(exc.seen, exc.advice)
    return fail(_words(scene, exc))


def _words(scene: Scene, exc: BaseException) -> str:
    if isinstance(exc, TimeoutError) and not str(exc):
        return f"nothing came back within {scene.limit_s:g} s"
    return words_of(exc)


def _object(answer: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        words = parsed(answer)
        if isinstance(words, dict):
            return words
    return None


async def _meet(scene: Scene) -> tuple[str, dict[str, Step]]:
    """Connect, and learn which kind of server it is: its description, and the steps for it."""
    where = f"{scene.host} port {scene.port}"
    try:
        async with scene.connected() as connection:
            transport = connection.get_extra_info("transport")
            device = connection.get_extra_info("device")
            if transport != "IWARP":
                scene.mtu = int(connection.get_extra_info("mtu") or 0)
            asked = order("facts")
            begun = time.perf_counter()
            try:
                answer = await scene.ask(connection, asked)
            except TimeoutError as exc:
                seen = f"connected to {where} by {device}, but {_words(scene, exc)}"
                raise StepError(seen, f"is it another program? {_START_ECHO}") from None
            except ConnectionLostError as exc:
                if exc.errno == errno.ETIMEDOUT or exc.__cause__ is not None:
                    raise
                seen = f"connected to {where} by {device}; the program there ended it: "
                raise OtherProgramError(f"{seen}{_words(scene, exc)}", _START_ECHO) from None
            took = f"{(time.perf_counter() - begun) * 1000:.3f} ms there and back"
            facts = _object(answer)
    except AuthenticationError as exc:
        if scene.keys is not None:
            raise StepError(words_of(exc), "--key-file has to name a key of the server") from None
        seen = f"{where}: a server with keys"
        raise OtherProgramError(seen, "name the file of one by --key-file") from None
    except ConnectionRejectedError as exc:
        if serves_streams(exc):
            return f"{where}: a server of streams", SERVE
        if "no program listens" in f"{exc} {exc.hint}":
            raise StepError(words_of(exc), _START_ECHO) from None
        raise
    if answer == asked:
        return f"{where} by {device}: a server that sends messages back, {took}", PLAIN
    if facts is None or "aiordma" not in facts:
        seen = f"connected to {where} by {device}, but the program there is no `aiordma echo`: "
        raise OtherProgramError(f"{seen}it answered {answer[:_MOST_TEXT]!r}", _START_ECHO)
    scene.facts = facts
    there = f"aiordma {facts['aiordma']} on {facts.get('device')}"
    return f"{where} by {device}: {there}, {took}", ECHO


async def try_sizes(scene: Scene, one: Callable[[int], Awaitable[None]]) -> str:
    """Do `one` with all sizes.

    Raises:
        StepError: The first size that did not pass, and the reason.
    """
    passed = 0
    for size in SIZES:
        try:
            await one(size)
        except (StepError, OSError, RdmaError, asyncio.IncompleteReadError) as exc:
            seen, advice = (
                (exc.seen, exc.advice) if isinstance(exc, StepError) else (_words(scene, exc), "")
            )
            before = f"up to {_size(passed)} passed" if passed else "no size passed"
            if 64 <= passed < scene.mtu and _may_be_dropped(exc):
                scene.hole = size
            if size == scene.hole and not isinstance(exc, StepError):
                advice = (
                    f"no full packet has passed: do all networks on the way carry it? "
                    f"`ping -M do -s {scene.mtu + 32} {scene.host}`"
                )
            raise StepError(f"{_size(size)}: {seen}; {before}", advice) from None
        passed = size
    return f"{_size(SIZES[0])} to {_size(SIZES[-1])}"


def _may_be_dropped(exc: BaseException) -> bool:
    """Whether it looks as if packets do not arrive."""
    return isinstance(exc, TimeoutError) or any(
        isinstance(each, CompletionError) and each.status_name == "RETRY_EXC_ERR"
        for each in (exc, exc.__cause__)
    )


def _size(size: int) -> str:
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def _compare(words: dict[str, Any], data: bytes) -> None:
    """Whether the peer has got the bytes."""
    got = (words.get("size"), words.get("crc32"))
    if got != (len(data), zlib.crc32(data)):
        raise StepError(f"the peer got other bytes: size and CRC32 are {got[0]} and {got[1]}")


def _check(got: bytes | bytearray, wanted: bytes) -> None:
    """Whether this side has got the bytes."""
    if got != wanted:
        raise StepError(f"other bytes came: {len(got)} of them, for {len(wanted)}")


# With an `aiordma echo`


async def _messages_there(scene: Scene) -> str:
    async with scene.connected() as connection:

        async def one(size: int) -> None:
            data = pattern()[:size]
            _compare(await scene.order(connection, order("take"), data), data)

        return await try_sizes(scene, one)


async def _messages_back(scene: Scene) -> str:
    async with scene.connected() as connection:

        async def one(size: int) -> None:
            _check(await scene.ask(connection, order("give", size)), pattern()[:size])

        return await try_sizes(scene, one)


async def _reads(scene: Scene) -> str:
    async with scene.connected() as connection:
        region = await scene.region(connection)

        async def one(size: int) -> None:
            into = bytearray(size)
            async with asyncio.timeout(scene.limit_s):
                await connection.read(region, into)
            _check(into, pattern()[:size])

        return await try_sizes(scene, one)


async def _writes(scene: Scene) -> str:
    async with scene.connected() as connection:
        region = await scene.region(connection)

        async def one(size: int) -> None:
            data = pattern()[-size:]
            async with asyncio.timeout(scene.limit_s):
                await connection.write(region, data)
            _compare(await scene.order(connection, order("look", size)), data)

        return await try_sizes(scene, one)


def _stream_port(scene: Scene) -> int:
    port = scene.facts.get("stream_port")
    if type(port) is not int or not 1 <= port <= 0xFFFF:
        raise StepError(f"the peer named an invalid port for streams: {port!r}")
    return port


async def _streams_there(scene: Scene) -> str:
    async with scene.stream(_stream_port(scene)) as (reader, writer):

        async def one(size: int) -> None:
            data = pattern()[:size]
            async with asyncio.timeout(scene.limit_s):
                writer.write(STREAM_ORDER.pack(TAKE, size) + data)
                await writer.drain()
                answer = await reader.readexactly(4)
            _compare({"size": size, "crc32": int.from_bytes(answer)}, data)

        return await try_sizes(scene, one)


async def _streams_back(scene: Scene) -> str:
    async with scene.stream(_stream_port(scene)) as (reader, writer):

        async def one(size: int) -> None:
            async with asyncio.timeout(scene.limit_s):
                writer.write(STREAM_ORDER.pack(GIVE, size))
                await writer.drain()
                answer = await reader.readexactly(size)
            _check(answer, pattern()[:size])

        return await try_sizes(scene, one)


# With other servers


async def _there_and_back(scene: Scene) -> str:
    async with scene.connected() as connection:

        async def one(size: int) -> None:
            data = pattern()[:size]
            _check(await scene.ask(connection, data), data)

        return await try_sizes(scene, one)


async def _request(scene: Scene) -> str:
    """A request that `aiordma serve` refuses, and is longer than a packet."""
    async with scene.stream(scene.port) as (reader, writer):
        exchange = Exchange(reader, writer, scene.limit_s)
        await exchange.say(Get("-" * _LONG_NAME))
        try:
            await exchange.hear(Ready)
        except TransferError as exc:
            if exc.reason == Reason.NAME:
                return f"`aiordma serve` has refused a name of {_LONG_NAME} bytes, as it should"
            raise StepError(f"no answer of `aiordma serve`: {exc}") from None
        raise StepError("the server has a file whose name no file can have")


#: By the kind of server.
ECHO: dict[str, Step] = {
    "messages there": _messages_there,
    "messages back": _messages_back,
    "reads": _reads,
    "writes": _writes,
    "streams there": _streams_there,
    "streams back": _streams_back,
}
PLAIN: dict[str, Step] = {"there and back": _there_and_back}
SERVE: dict[str, Step] = {"request": _request}
