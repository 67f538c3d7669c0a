"""Reading ahead of the connection and writing behind it: few calls, and none that is waited for."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from aiordma.cli.transfer.disk import PART, ReadAhead, WriteBehind
from aiordma.cli.transfer.failure import TransferError
from aiordma.cli.transfer.folder import Incoming, Source, local_incoming, local_source
from aiordma.cli.transfer.frames import MOST_DATA

LIMIT_S = 20.0
SIZES = [0, 1, PART - 1, PART, PART + 1, 5 * PART + 7]


def contents(size: int) -> bytes:
    return Random(size).randbytes(size)


@pytest.fixture
def incoming(tmp_path: Path) -> Iterator[Incoming]:
    file = local_incoming(tmp_path / "written")
    file.open()
    yield file
    file.discard()


async def write(behind: WriteBehind, data: bytes, piece: int) -> None:
    """Give `data` in pieces."""
    for begin in range(0, len(data), piece):
        part = data[begin : begin + piece]
        while (room := behind.room(len(part))) is None:
            await behind.flush()
        room[:] = part


@pytest.mark.parametrize("size", SIZES)
async def test_a_file_is_read_in_few_calls(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = contents(size)
    calls: list[object] = []
    (tmp_path / "x").write_bytes(data)
    source = local_source(tmp_path / "x")
    assert source.open() == size
    monkeypatch.setattr(os, "readv", counted(os.readv, calls))
    ahead, got = ReadAhead(source, size), bytearray()
    while part := await ahead.part():
        got += part
    await ahead.close()
    source.close()
    assert got == data
    assert ahead.sha256 == hashlib.sha256(data).hexdigest()
    assert len(calls) == -(-size // PART)


@pytest.mark.parametrize("size", SIZES)
async def test_a_file_is_written_in_few_calls(
    tmp_path: Path, incoming: Incoming, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = contents(size)
    calls: list[object] = []
    behind = WriteBehind(incoming, size)
    monkeypatch.setattr(os, "write", counted(os.write, calls))
    await write(behind, data, MOST_DATA)
    assert await behind.finish() == hashlib.sha256(data).hexdigest()
    await behind.close()
    incoming.commit()
    assert (tmp_path / "written").read_bytes() == data
    assert len(calls) == -(-size // PART)


async def test_pieces_of_any_size(tmp_path: Path, incoming: Incoming) -> None:
    data = contents(2 * PART + 5)
    behind = WriteBehind(incoming, len(data))
    await write(behind, data, 1_000_003)
    assert await behind.finish() == hashlib.sha256(data).hexdigest()
    incoming.commit()
    assert (tmp_path / "written").read_bytes() == data


def counted(call: object, calls: list[object]) -> object:
    """The call, which notes itself."""

    def run(*arguments: object) -> object:
        calls.append(arguments)
        return call(*arguments)  # type: ignore[operator]

    return run


class Gate:
    """A disk that does not go on before it is let."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def pass_(self) -> None:
        self.entered.release()
        assert self.open.wait(LIMIT_S)

    async def reached(self) -> None:
        """Wait until a call of the disk is under way."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=LIMIT_S)


class SlowSource(Source):
    def __init__(self, gate: Gate, end: int) -> None:
        super().__init__("slow", lambda: -1)
        self._gate, self._end, self._at = gate, end, 0

    def readinto(self, buffer: memoryview) -> int:
        if self._at:
            self._gate.pass_()
        count = min(len(buffer), self._end - self._at)
        self._at += count
        return count


class SlowIncoming(Incoming):
    def __init__(self, gate: Gate, failure: OSError | None = None) -> None:
        super().__init__("slow", lambda: -1)
        self._gate, self._failure = gate, failure

    def write(self, data: bytes | memoryview) -> None:
        self._gate.pass_()
        if self._failure is not None:
            raise self._failure


async def test_the_next_part_is_read_while_the_last_is_sent() -> None:
    gate = Gate()
    ahead = ReadAhead(SlowSource(gate, 2 * PART), 2 * PART)
    assert len(await ahead.part()) == PART
    await gate.reached()  # although nothing has asked for it yet
    gate.open.set()
    assert len(await ahead.part()) == PART
    assert not await ahead.part()


async def test_a_part_is_written_while_the_next_arrives() -> None:
    gate = Gate()
    behind = WriteBehind(SlowIncoming(gate), 3 * PART)
    await write(behind, bytes(2 * PART), MOST_DATA)  # the disk has the first half, and stands
    await gate.reached()
    assert behind.room(1) is None
    gate.open.set()
    await behind.finish()


async def test_a_full_disk_fails_the_next_flush(incoming: Incoming) -> None:
    gate = Gate()
    gate.open.set()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    behind = WriteBehind(SlowIncoming(gate, full), 3 * PART)
    with pytest.raises(TransferError, match="No space left"):
        await write(behind, bytes(3 * PART), MOST_DATA)
    await behind.close()
    last = WriteBehind(SlowIncoming(gate, full), 1)
    await write(last, b"x", 1)
    with pytest.raises(TransferError, match="No space left"):
        await last.finish()


async def test_a_file_that_shrinks_while_it_is_read() -> None:
    gate = Gate()
    gate.open.set()
    ahead = ReadAhead(SlowSource(gate, PART + 5), 3 * PART)
    assert [len(await ahead.part()) for _ in range(2)] == [PART, 5]
    with pytest.raises(TransferError, match=f"became shorter .* {2 * PART - 5} bytes are missing"):
        await ahead.part()
    await ahead.close()


@pytest.mark.parametrize("way", ["read", "write"])
async def test_closing_waits_for_the_thread_even_if_canceled(way: str) -> None:
    """The caller closes the file next, and the thread must not use the descriptor of another."""
    gate = Gate()
    disk: ReadAhead | WriteBehind
    if way == "read":
        disk = ReadAhead(SlowSource(gate, 2 * PART), 2 * PART)
        await disk.part()
    else:
        disk = WriteBehind(SlowIncoming(gate), 2 * PART)
        await write(disk, bytes(PART + 1), MOST_DATA)
    await gate.reached()
    closing = asyncio.create_task(disk.close())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.sleep(0)
    assert not closing.done()
    gate.open.set()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait([closing])
    assert closing.cancelled()
