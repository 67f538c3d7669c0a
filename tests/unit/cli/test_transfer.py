"""Copying a file over a stream.  TCP serves here: the two roles do not know what carries it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from aiordma.cli import serve
from aiordma.cli.output import print_hint, print_line, printable
from aiordma.cli.transfer import client
from aiordma.cli.transfer.disk import in_thread
from aiordma.cli.transfer.exchange import Exchange, closing
from aiordma.cli.transfer.failure import TransferError
from aiordma.cli.transfer.folder import Folder, local_incoming, local_source
from aiordma.cli.transfer.frames import MOST_DATA, Done, Get, Put, Ready, Reason, data_header, pack
from aiordma.cli.transfer.server import Quota, Served, serve_one
from aiordma.streams.stream_reader import READER_LIMIT, RdmaStreamReader

Streams = tuple[RdmaStreamReader, asyncio.StreamWriter]
LIMIT_S = 20.0
SIZES = [0, 1, MOST_DATA - 1, MOST_DATA, 3 * MOST_DATA + 5]
SHA_OF_NOTHING = hashlib.sha256().hexdigest()


@contextlib.asynccontextmanager
async def connected(
    answer: Callable[[RdmaStreamReader, asyncio.StreamWriter], Awaitable[None]],
    limit_s: float = LIMIT_S,
) -> AsyncIterator[Exchange]:
    """The client's side of a connection whose server side `answer` has."""
    over = asyncio.Event()

    async def serve(reader: Any, writer: asyncio.StreamWriter) -> None:
        try:
            async with closing(writer, LIMIT_S):
                await answer(reader, writer)
        finally:
            over.set()

    loop = asyncio.get_running_loop()

    def a_reader() -> RdmaStreamReader:
        return RdmaStreamReader(limit=READER_LIMIT, loop=loop)

    server = await loop.create_server(
        lambda: asyncio.StreamReaderProtocol(a_reader(), serve, loop=loop), "127.0.0.1", 0
    )
    async with server:
        reader = a_reader()
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        address = server.sockets[0].getsockname()
        transport, _ = await loop.create_connection(lambda: protocol, *address)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        async with closing(writer, LIMIT_S):
            yield Exchange(reader, writer, limit_s)
        await asyncio.wait_for(over.wait(), LIMIT_S)


class Service:
    """A server of a folder, and what it did."""

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self.path = path
        self.writable = writable
        self.done: list[Served | str] = []

    async def __call__(self, reader: RdmaStreamReader, writer: asyncio.StreamWriter) -> None:
        folder = Folder(self.path)
        exchange = Exchange(reader, writer, LIMIT_S)
        try:
            self.done.append(await serve_one(exchange, folder, writable=self.writable))
        except (TransferError, OSError) as exc:
            self.done.append(str(exc))
            await exchange.hear_out()
        finally:
            folder.close()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    (tmp_path / "served").mkdir()
    return Service(tmp_path / "served")


def a_file(path: Path, size: int) -> str:
    data = Random(size).randbytes(size)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


async def put(exchange: Exchange, path: Path, name: str, size: int | None = None) -> str:
    source = local_source(path)
    try:
        real = await in_thread(source.open)
        return await client.put(
            exchange, source, real if size is None else size, name, lambda _: None
        )
    finally:
        source.close()


async def get(exchange: Exchange, name: str, path: Path) -> tuple[int, str]:
    incoming = local_incoming(path)
    try:
        await in_thread(incoming.open)
        return await client.get(exchange, name, incoming, lambda _: None, lambda _: None)
    finally:
        incoming.discard()


@pytest.mark.parametrize("size", SIZES)
async def test_put(service: Service, tmp_path: Path, size: int) -> None:
    digest = a_file(tmp_path / "x", size)
    async with connected(service) as exchange:
        assert await put(exchange, tmp_path / "x", "y") == digest
        assert (service.path / "y").read_bytes() == (tmp_path / "x").read_bytes()
    assert service.done == [Served("put", "y", size, digest)]


@pytest.mark.parametrize("size", SIZES)
async def test_get(service: Service, tmp_path: Path, size: int) -> None:
    digest = a_file(service.path / "x", size)
    async with connected(service) as exchange:
        assert await get(exchange, "x", tmp_path / "y") == (size, digest)
    assert (service.path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    assert service.done == [Served("get", "x", size, digest)]


async def test_progress_adds_up(service: Service, tmp_path: Path) -> None:
    a_file(service.path / "x", SIZES[-1])
    counts: list[int] = []
    incoming = local_incoming(tmp_path / "y")
    incoming.open()
    async with connected(service) as exchange:
        await client.get(exchange, "x", incoming, counts.append, counts.append)
    incoming.discard()
    assert counts[0] == SIZES[-1] == sum(counts[1:])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../x", Reason.NAME),
        ("/x", Reason.NAME),
        ("none", Reason.NOT_FOUND),
        ("none/none", Reason.NOT_FOUND),
        ("link", Reason.SYSTEM),
        ("", Reason.NAME),
    ],
)
async def test_get_is_refused(service: Service, tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    (service.path / "link").symlink_to("../x")
    async with connected(service) as exchange:
        with pytest.raises(TransferError) as caught:
            await get(exchange, name, tmp_path / "y")
    assert caught.value.reason == reason
    assert sorted(os.listdir(tmp_path)) == ["served", "x"]
    assert len(service.done) == 1


async def test_put_is_refused_by_a_server_that_gives_only(service: Service, tmp_path: Path) -> None:
    a_file(tmp_path / "x", MOST_DATA)
    service.writable = False
    async with connected(service) as exchange:
        with pytest.raises(TransferError, match="takes no files") as caught:
            await put(exchange, tmp_path / "x", "x")
    assert caught.value.reason == Reason.READ_ONLY
    assert os.listdir(service.path) == []


async def test_a_client_that_ends_in_the_middle(service: Service, tmp_path: Path) -> None:
    a_file(service.path / "x", 5)
    async with connected(service) as exchange:
        writer = exchange.writer
        writer.write(pack(Put("x", 100_000)))
        await exchange.hear(Ready)
        writer.write(data_header(1000) + bytes(10))
        writer.close()
    assert service.done == ["the peer ended the connection before the end of the file"]
    assert os.listdir(service.path) == ["x"]
    assert (service.path / "x").stat().st_size == 5


async def test_a_server_that_ends_in_the_middle(tmp_path: Path) -> None:
    async def half(reader: RdmaStreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(pack(Ready(100)) + data_header(50) + bytes(50))

    async with connected(half) as exchange:
        with pytest.raises(TransferError, match="ended the connection"):
            await get(exchange, "x", tmp_path / "x")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (pack(Ready(1)) + data_header(1) + b"x" + pack(Done(SHA_OF_NOTHING)), "SHA-256"),
        (pack(Ready(2)) + data_header(1) + b"x" + pack(Done(SHA_OF_NOTHING)), "1 bytes less"),
        (pack(Ready(1)) + data_header(2) + b"xy", "more than it announced"),
        (pack(Done(SHA_OF_NOTHING)), "Done out of turn"),
        (data_header(1) + b"x", "data out of turn"),
        (b"HTTP/1.1 400 Bad Request", "does not speak"),
    ],
)
async def test_servers_that_break_the_rules(tmp_path: Path, answer: bytes, words: str) -> None:
    async def say(reader: RdmaStreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        await reader.read()

    async with connected(say) as exchange:
        with pytest.raises(TransferError, match=words):
            await get(exchange, "x", tmp_path / "x")
    assert os.listdir(tmp_path) == []


async def test_a_server_that_fails_in_the_middle_of_a_put(tmp_path: Path) -> None:
    async def full(reader: RdmaStreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = Exchange(reader, writer, LIMIT_S)
        await exchange.hear_request()
        await exchange.say(Ready(64 * MOST_DATA))
        await reader.readexactly(MOST_DATA)
        await exchange.apologize(TransferError(Reason.SYSTEM, "no space left"))
        await exchange.hear_out()

    with (tmp_path / "x").open("wb") as file:
        file.truncate(64 * MOST_DATA)
    async with connected(full) as exchange:
        with pytest.raises(TransferError, match="no space left"):
            await put(exchange, tmp_path / "x", "x")


async def test_a_client_that_fails_in_the_middle_of_a_get(service: Service, tmp_path: Path) -> None:
    with (service.path / "x").open("wb") as file:
        file.truncate(1024 * MOST_DATA)
    async with connected(service) as exchange:
        await exchange.say(Get("x"))
        await exchange.hear(Ready)
        await exchange.apologize(TransferError(Reason.SYSTEM, "no space left"))
        await exchange.hear_out()
    assert service.done == ["no space left"], "the server heard it, and sent no more"


async def test_a_file_that_shrinks(service: Service, tmp_path: Path) -> None:
    a_file(tmp_path / "x", 10)
    async with connected(service) as exchange:
        with pytest.raises(TransferError, match="became shorter"):
            await put(exchange, tmp_path / "x", "x", size=20)
    assert os.listdir(service.path) == []
    assert service.done == ["the file became shorter while it was read: 10 bytes are missing"]


async def test_a_file_that_grows_is_copied_as_far_as_it_was(
    service: Service, tmp_path: Path
) -> None:
    a_file(tmp_path / "x", 10)
    async with connected(service) as exchange:
        await put(exchange, tmp_path / "x", "x", size=7)
    assert (service.path / "x").read_bytes() == (tmp_path / "x").read_bytes()[:7]


async def test_a_peer_that_says_nothing(tmp_path: Path) -> None:
    async def mute(reader: RdmaStreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with connected(mute, limit_s=0.05) as exchange:
        with pytest.raises(TransferError, match=r"sends nothing for 0\.05 s"):
            await get(exchange, "x", tmp_path / "x")


async def test_a_server_that_does_not_confirm(tmp_path: Path) -> None:
    async def forget(reader: RdmaStreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = Exchange(reader, writer, LIMIT_S)
        await exchange.hear_request()
        await exchange.say(Ready(0))
        ours.limit_s = 0.05  # of what follows
        await reader.read()

    (tmp_path / "x").touch()
    async with connected(forget) as ours:
        with pytest.raises(TransferError, match="does not confirm"):
            await put(ours, tmp_path / "x", "x")


async def test_cancel_leaves_no_file_on_either_side(service: Service, tmp_path: Path) -> None:
    half = asyncio.Event()

    async def slow(reader: RdmaStreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(pack(Ready(100)) + data_header(50) + bytes(50))
        half.set()
        await reader.read()

    async with connected(slow) as exchange:
        task = asyncio.create_task(get(exchange, "x", tmp_path / "x"))
        await half.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert os.listdir(tmp_path) == ["served"]


async def test_more_than_four_gibibytes_can_be_announced(service: Service, tmp_path: Path) -> None:
    """Not sent here; that the size is no 32-bit number on the way."""
    with (service.path / "x").open("wb") as file:
        file.truncate((4 << 30) + 1)
    async with connected(service) as exchange:
        sizes: list[int] = []
        incoming = local_incoming(tmp_path / "y")
        incoming.open()

        def enough(size: int) -> None:
            sizes.append(size)
            raise TransferError(Reason.SYSTEM, "enough")

        with pytest.raises(TransferError, match="enough"):
            await client.get(exchange, "x", incoming, enough, enough)
        incoming.discard()
        exchange.writer.transport.abort()
    assert sizes == [(4 << 30) + 1]


# ---- what a client may make the server do ---------------------------------------------------

BAR = (lambda _: None, lambda _: None)
EVIL = "a\x1b[31m\x9b\x07\u202ename\u2028x"


def a_service(path: Path, *, most_clients: int = 4, quota: Quota | None = None) -> serve.Service:
    quota = quota or Quota(1 << 20, 100, 1 << 20)
    return serve.Service(Folder(path), True, False, LIMIT_S, most_clients, quota)


async def test_g06_names_and_texts_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client's name in the server's log, and a server's text in the client's error."""
    forged = f"{EVIL}\nput forged 1 bytes"
    service = a_service(tmp_path)
    async with connected(service.client) as exchange:
        with pytest.raises(TransferError) as refused:
            await client.get(exchange, forged, local_incoming(tmp_path / "x"), *BAR)
    service.folder.close()
    print_hint(f"aiordma cp: {refused.value}")
    out, err = capsys.readouterr()
    for text in (out, err):
        lines = text.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].isprintable()
        assert r"a\x1b[31m\x9b\x07\u202ename\u2028x\nput forged" in lines[0]


def test_g06_a_line_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_line((EVIL, "bold"), (" ok\r\n", ""))
    print_hint(EVIL, "two")
    out, err = capsys.readouterr()
    assert out == "a\\x1b[31m\\x9b\\x07\\u202ename\\u2028x ok\\r\\n\n"
    assert err.splitlines()[1:] == ["two"]
    assert all(each.isprintable() for each in printable("".join(map(chr, range(0x300)))))
    assert printable("grün 漢字 \\") == "grün 漢字 \\"


def test_g06_quotas() -> None:
    quota = Quota(most_bytes=100, most_files=3, most_file_bytes=60)

    def refused(size: int, why: str) -> None:
        with pytest.raises(TransferError, match=why) as caught:
            quota.take(size)
        assert caught.value.reason == Reason.FULL

    refused((1 << 63) - 1, "may have at most 60 bytes here")
    refused(61, "may have at most 60 bytes here")
    quota.take(60)
    refused(41, "takes 40 bytes more")
    quota.take(40)
    quota.take(0)
    refused(0, "has taken 3 files")
    quota.give_back(40)
    refused(41, "takes 40 bytes more")
    quota.take(40)


async def test_g06_the_quota_is_kept_on_the_wire(tmp_path: Path) -> None:
    """A file that does not come counts no more; one that has come does."""
    (tmp_path / "served").mkdir()
    a_file(tmp_path / "file", 600)
    source = local_source(tmp_path / "file")
    service = a_service(tmp_path / "served", quota=Quota(1000, 10, 700))
    async with connected(service.client) as exchange:
        await exchange.say(Put("half", 700))
        await exchange.hear(Ready)
    for name, fits in (("one", True), ("two", False)):
        async with connected(service.client) as exchange:
            size = await in_thread(source.open)
            if fits:
                await client.put(exchange, source, size, name, BAR[1])
            else:
                with pytest.raises(TransferError, match="takes 400 bytes more"):
                    await client.put(exchange, source, size, name, BAR[1])
            await in_thread(source.close)
    async with connected(service.client) as exchange:
        await exchange.say(Put("huge", (1 << 63) - 1))
        with pytest.raises(TransferError, match="may have at most 700 bytes here"):
            await exchange.hear(Ready)
    service.folder.close()
    assert os.listdir(tmp_path / "served") == ["one"]


async def test_g06_clients_at_once(tmp_path: Path) -> None:
    service = a_service(tmp_path, most_clients=3)
    async with connected(service.client), connected(service.client):
        await until(lambda: len(service.clients) == 2)
        async with connected(service.client) as late:
            with pytest.raises(TransferError, match="has 2 clients already from 127"):
                await late.hear(Ready)
        await until(lambda: len(service.clients) == 2)
        assert not service.why_full("192.0.2.1"), "another source gets in"
    await until(lambda: not service.clients)
    async with connected(service.client) as next_:
        with pytest.raises(TransferError, match="No such file"):
            await client.get(next_, "none", local_incoming(tmp_path / "x"), *BAR)
    service.folder.close()


async def test_g02_a_client_that_asks_for_nothing_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "SILENT_S", 0)
    service = a_service(tmp_path, most_clients=1)
    async with connected(service.client):
        await until(lambda: service.holders)
        async with connected(service.client) as next_:
            with pytest.raises(TransferError, match="No such file"):
                await client.get(next_, "none", local_incoming(tmp_path / "x"), *BAR)
    service.folder.close()


async def test_g02_refusals_by_serve_are_not_all_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = a_service(tmp_path, most_clients=1)
    async with connected(service.client):
        await until(lambda: service.holders)
        for _ in range(9):
            async with connected(service.client) as late:
                with pytest.raises(TransferError, match="has 1 clients already"):
                    await late.hear(Ready)
    await until(lambda: not service.clients)
    service.folder.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "refused" in line]
    assert [int(line.split("(")[-1].split()[0]) for line in lines] == [1, 2, 4, 8]


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)
