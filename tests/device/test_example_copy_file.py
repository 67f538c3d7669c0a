"""examples/copy_file.py: the file arrives whole, or not at all."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiordma
from examples import copy_file
from tests.device.oracle import until
from tests.device.running import LIMIT_S, Program

pytestmark = [pytest.mark.device, pytest.mark.program]

PROGRAM = "copy_file.py"
BIG = 20 * copy_file.CHUNK + 12345  # more than two windows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where files arrive."""
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


def make(path: Path, size: int) -> bytes:
    data = random.Random(size).randbytes(size)
    path.write_bytes(data)
    return data


@pytest.fixture
async def port(folder: Path, address: str) -> AsyncIterator[int]:
    """A receiver in this process."""
    handler = functools.partial(copy_file.receive, folder)
    async with aiordma.serve(handler, address, 0) as server:
        yield server.port
        await until(lambda: not server.connections, LIMIT_S)


@pytest.mark.parametrize("size", [0, 1, copy_file.CHUNK - 1, 8 * copy_file.CHUNK, BIG])
async def test_the_bytes_arrive(
    size: int, port: int, address: str, tmp_path: Path, folder: Path
) -> None:
    data = make(tmp_path / "a", size)
    other = make(tmp_path / "b", 100)
    (folder / "b").write_bytes(b"before")
    await copy_file.send(address, port, [tmp_path / "a", tmp_path / "b"])
    assert (folder / "a").read_bytes() == data
    assert (folder / "b").read_bytes() == other
    assert sorted(os.listdir(folder)) == ["a", "b"]


async def test_several_chunks_are_on_their_way(
    port: int, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a", BIG)
    real, under_way, most = aiordma.Connection.write, 0, 0

    async def counted(self: aiordma.Connection, *args: Any, **options: Any) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await real(self, *args, **options)
        finally:
            under_way -= 1

    monkeypatch.setattr(aiordma.Connection, "write", counted)
    await copy_file.send(address, port, [tmp_path / "a"])
    assert 1 < most <= copy_file.WINDOW


async def test_damage_is_found(
    port: int, address: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has other bytes in the receiver's memory; the file of before stays."""
    make(tmp_path / "a", BIG)
    (folder / "a").write_bytes(b"before")
    real = aiordma.Connection.write

    async def damage(self: aiordma.Connection, remote: Any, data: Any, *, imm: int) -> int:
        return await real(self, remote, bytes(remote.length) if imm == 3 else data, imm=imm)

    monkeypatch.setattr(aiordma.Connection, "write", damage)
    with pytest.raises(copy_file.CopyError, match=r".*/a: arrived damaged: SHA-256"):
        await copy_file.send(address, port, [tmp_path / "a"])
    assert (folder / "a").read_bytes() == b"before"
    assert os.listdir(folder) == ["a"]


async def test_a_file_that_becomes_shorter(
    port: int, address: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a", BIG)
    real = aiordma.Connection.write

    async def cut(self: aiordma.Connection, *words: Any, imm: int) -> int:
        (tmp_path / "a").write_bytes(b"less")
        return await real(self, *words, imm=imm)

    monkeypatch.setattr(aiordma.Connection, "write", cut)
    with pytest.raises(copy_file.CopyError, match="became shorter while it was sent"):
        await copy_file.send(address, port, [tmp_path / "a"])
    await until(lambda: not os.listdir(folder), LIMIT_S)


async def test_a_write_that_fails_ends_the_copy(
    port: int, address: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a", BIG)
    real = aiordma.Connection.write

    async def fail(self: aiordma.Connection, *words: Any, imm: int) -> int:
        if imm == 3:
            raise OSError(errno.ENOMEM, "no memory")
        return await real(self, *words, imm=imm)

    monkeypatch.setattr(aiordma.Connection, "write", fail)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(OSError, match="no memory"):
            await copy_file.send(address, port, [tmp_path / "a"])
    await until(lambda: not os.listdir(folder), LIMIT_S)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/x", "a\0b"])
async def test_a_name_that_leads_elsewhere_is_refused(
    name: str, port: int, address: str, folder: Path
) -> None:
    async with aiordma.connect(address, port) as conn:
        await conn.recv()
        await conn.send(json.dumps({"name": name, "size": 1}).encode())
        with await conn.recv() as answer:
            assert "is not the name of a file" in json.loads(answer.decode())["error"]
    assert os.listdir(folder) == []


async def test_a_file_that_cannot_be_written_is_refused(
    port: int, address: str, tmp_path: Path, folder: Path
) -> None:
    make(tmp_path / "a", 10)
    (folder / "a").mkdir()
    with pytest.raises(copy_file.CopyError, match="cannot be written: Is a directory"):
        await copy_file.send(address, port, [tmp_path / "a"])
    assert os.listdir(folder) == ["a"]


async def test_garbage_harms_no_other(port: int, address: str, tmp_path: Path) -> None:
    make(tmp_path / "a", 10)
    for garbage in (b"", b"[]", b"{}", b'{"name": "a", "size": "x"}', b"\xff"):
        async with aiordma.connect(address, port) as conn:
            await conn.recv()
            await conn.send(garbage)
            with pytest.raises(aiordma.ConnectionEndedError):
                await conn.recv()
    await copy_file.send(address, port, [tmp_path / "a"])


# Programs of their own, whatever the tests' loop.

RECEIVES_LITTLE = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
runpy.run_path("examples/copy_file.py", run_name="__main__")
"""

IS_INTERRUPTED = """
import aiordma, runpy, signal
real = aiordma.Connection.write

async def write(self, *words, imm):
    if imm == 3:
        signal.raise_signal(signal.SIGINT)
    return await real(self, *words, imm=imm)

aiordma.Connection.write = write
runpy.run_path("examples/copy_file.py", run_name="__main__")
"""

OFFERS = """
import asyncio, json, sys
import aiordma

async def main(host):
    async with aiordma.connect(host, 18522) as conn:
        window = aiordma.RemoteRegion.from_bytes(bytes(await conn.recv()))
        await conn.send(json.dumps({"name": "a", "size": 1 << 30}).encode())
        await conn.recv()
        await conn.write(window[:1 << 20], bytes(1 << 20), imm=0)
        await conn.recv()
        print("a chunk has arrived", flush=True)
        await conn.recv()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def receiver(address: str, folder: Path) -> Iterator[Program]:
    with Program(PROGRAM, "receive", "--host", address, str(folder)) as program:
        assert program.line() == f"listening on {address} 18522"
        yield program


@pytest.mark.one_loop
async def test_ends_of_a_sender(
    receiver: Program, address: str, tmp_path: Path, folder: Path
) -> None:
    """Killed, or by Ctrl-C: nothing is left of its file, and the next sender is served."""
    data = make(tmp_path / "a", BIG)
    (folder / "a").write_bytes(b"before")
    with Program("-c", OFFERS, address) as killed:
        assert await asyncio.to_thread(killed.line) == "a chunk has arrived"
        assert len(os.listdir(folder)) == 2
        killed.end(signal.SIGKILL)
    await until(lambda: os.listdir(folder) == ["a"], LIMIT_S)
    send = ("send", "--host", address, str(tmp_path / "a"))
    with Program("-c", IS_INTERRUPTED, *send) as interrupted:
        status, error = interrupted.end()
        assert (status, re.sub(r"a: \d+ %\n", "", error)) == (130, "")
    await until(lambda: os.listdir(folder) == ["a"], LIMIT_S)
    assert (folder / "a").read_bytes() == b"before"
    with Program(PROGRAM, *send) as sender:
        status, error = sender.end()
        assert (status, error.splitlines()[-1]) == (0, "a: 100 %")
    assert (folder / "a").read_bytes() == data
    assert receiver.until(f"a: {BIG} bytes, sha256 ")
    status, error = receiver.end(signal.SIGINT)
    assert status == 0
    assert [line[:16] for line in error.splitlines()] == ["a: not received:"] * 2


@pytest.mark.one_loop
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
async def test_a_receiver_that_ends(
    how: signal.Signals,
    receiver: Program,
    address: str,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(tmp_path / "a", BIG)
    real = aiordma.Connection.write

    async def end(self: aiordma.Connection, *words: Any, imm: int) -> int:
        if imm == 3:
            receiver.process.send_signal(how)
        return await real(self, *words, imm=imm)

    monkeypatch.setattr(aiordma.Connection, "write", end)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(copy_file.CopyError, match="/a: the receiver is gone: "):
            await copy_file.send(address, 18522, [tmp_path / "a"])
    status, _ = receiver.end()
    assert status == (-9 if how == signal.SIGKILL else 0)
    assert "a" not in os.listdir(folder)


@pytest.mark.one_loop
def test_a_full_disk(address: str, tmp_path: Path, folder: Path) -> None:
    make(tmp_path / "a", BIG)
    words = ("receive", "--host", address, str(folder))
    with Program("-c", RECEIVES_LITTLE, *words) as receiver:
        receiver.until("listening")
        with Program(PROGRAM, "send", "--host", address, str(tmp_path / "a")) as sender:
            status, error = sender.end()
            assert status == 1
            said = f"copy_file: {tmp_path / 'a'}: cannot be written: File too large"
            assert error.splitlines()[-1] == said
        assert receiver.end(signal.SIGINT)[0] == 0
    assert os.listdir(folder) == []
