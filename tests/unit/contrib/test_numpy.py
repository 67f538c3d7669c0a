"""Arrays as messages, over the fake adapter: every kind of dtype and order, and hostile headers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import Connection
from aiordma.contrib.numpy import ArrayError, recv_array, send_array
from aiordma.endpoint.config import ConnectionConfig
from aiordma.errors import MessageTooLargeError
from tests.inside.contrib import arrived_of, header_of, read_header

from ..conftest import settle
from ..endpoint.fabric import Wire, use_fake_regions

CONFIG = ConnectionConfig(slot_size=4096, max_message_size=4 << 20, rendezvous_threshold=0)
LARGE = 40_000  # of 8 bytes each
ARRAYS = {
    "no dimension": np.array(7, "f4"),
    "no element": np.zeros((3, 0)),
    "a view": np.arange(6).reshape(2, 3)[:, ::2],
    "backwards": np.arange(6)[::-1],
    "an element of a view": np.arange(10)[::5][:1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "three dimensions": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "big endian": np.arange(4, dtype=">u2"),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "times": np.array([1, 2], "m8[ms]"),
    "dates": np.array(["2026-01-01", "NaT"], "M8[25us]"),
    "complex": np.array([1 + 2j]),
    "truth": np.array([True, False]),
    "half": np.array([1.5], "e"),
    "void": np.array([b"abc"], "V3"),
    "structure": np.zeros(2, np.dtype([("x", "f4", (3,)), ("y", [("z", "u1")])], align=True)),
    "padded": np.zeros(2, np.dtype([("x", "u1"), ("y", "f8")], align=True)),
    "large": np.arange(LARGE).reshape(200, 200),
    "large, Fortran order": np.asfortranarray(np.arange(LARGE, dtype="f8").reshape(400, 100)),
    "large view": np.arange(2 * LARGE)[::2],
    "large, dates": np.arange(LARGE).astype("M8[s]"),
}


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[Connection, Connection]]:
    """Two ends whose adapters work by themselves."""
    wire = Wire(CONFIG, CONFIG)
    await wire.open()

    async def work() -> None:
        while True:
            wire.settle()
            await asyncio.sleep(0)

    worker = asyncio.create_task(work())
    try:
        yield wire.ends[0], wire.ends[1]
    finally:
        worker.cancel()
        await wire.close()


@pytest.fixture(autouse=True)
def regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the fake adapter."""
    use_fake_regions(monkeypatch)


def same(arrived: Any, array: Any) -> bool:
    return bool(
        arrived.dtype == array.dtype
        and arrived.shape == array.shape
        and np.ascontiguousarray(arrived).tobytes() == np.ascontiguousarray(array).tobytes()
    )


@pytest.mark.parametrize("name", list(ARRAYS))
async def test_arrays_arrive_as_they_are(name: str) -> None:
    array = ARRAYS[name]
    is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    async with joined() as (client, server):
        for out in (None, np.empty_like(array), np.empty(array.shape, array.dtype, "F")):
            sending = asyncio.create_task(send_array(client, array))
            arrived = await recv_array(server, out)
            await sending
            assert same(arrived, array)
            assert arrived is out or (out is None and arrived.flags.owndata)
            if out is None:
                assert arrived.flags.writeable
                assert arrived.flags.f_contiguous if is_fortran else arrived.flags.c_contiguous


async def test_arrays_of_many_tasks() -> None:
    """The two messages of an array stay together, whatever the tasks are."""
    async with joined() as (client, server):
        arrays = [np.full(LARGE if n % 2 else 10, n) for n in range(12)]
        sends = [asyncio.create_task(send_array(client, each)) for each in arrays]
        receives = [asyncio.create_task(recv_array(server)) for _ in arrays]
        for array, receive in zip(arrays, receives, strict=True):
            assert same(await receive, array)
        await asyncio.gather(*sends)


@pytest.mark.parametrize("step", range(1, 40, 3))
@pytest.mark.parametrize("size", [10, LARGE])
async def test_a_canceled_receive_loses_no_array(step: int, size: int) -> None:
    async with joined() as (client, server):
        array = np.arange(size)
        sending = asyncio.create_task(send_array(client, array))
        receiving = asyncio.create_task(recv_array(server))
        await settle(step)
        receiving.cancel()
        got = None
        with contextlib.suppress(asyncio.CancelledError):
            got = await receiving
        if got is None:
            got = await recv_array(server)
        assert same(got, array)
        await sending


@pytest.mark.parametrize("step", range(1, 30, 2))
async def test_a_canceled_send_leaves_no_half(step: int) -> None:
    async with joined() as (client, server):
        first, second = np.arange(LARGE), np.arange(LARGE) + 1
        sending = asyncio.create_task(send_array(client, first))
        receiving = asyncio.create_task(recv_array(server))
        await settle(step)
        sending.cancel()
        await asyncio.wait((sending,))
        again = asyncio.create_task(send_array(client, second))
        got = await receiving
        assert same(got, first) or same(got, second)
        if same(got, first):
            assert same(await recv_array(server), second)
        await again


async def test_out_has_to_fit() -> None:
    async with joined() as (client, server):
        read_only = np.zeros(3)
        read_only.flags.writeable = False
        for out, error in (
            ([1], TypeError), (np.array([None]), TypeError), (read_only, ValueError),
        ):  # fmt: skip
            wrong: Any = out
            with pytest.raises(error):
                await recv_array(server, wrong)
        for array in (np.arange(4), np.arange(LARGE)):
            sending = asyncio.create_task(send_array(client, array))
            for out in (np.zeros(4, "f4"), np.zeros((2, 2), int), np.zeros(LARGE + 1, int)):
                with pytest.raises(ValueError, match="the next array"):
                    await recv_array(server, out)
            right = np.zeros_like(array)
            assert await recv_array(server, right) is right
            assert same(right, array)
            await sending
            assert arrived_of(server) is None


@pytest.mark.parametrize(
    "array",
    [
        [1, 2], np.float64(1), np.array([None]), np.zeros(2, [("a", "O")]),
        np.ma.array([1], mask=[True]), np.zeros(3, "V0"),
        np.zeros(1, np.dtype([(("title", "a"), "i4")])),
        np.zeros(1, [("a" * 70_000, "i4")]),
    ],
    ids=["list", "scalar", "objects", "field", "masked", "empty", "titles", "long"],
)  # fmt: skip
async def test_what_is_not_sent(array: Any) -> None:
    async with joined() as (client, server):
        with pytest.raises(TypeError):
            await send_array(client, array)
        await send_array(client, np.arange(3))
        assert same(await recv_array(server), np.arange(3))


async def test_an_array_that_the_peer_does_not_take() -> None:
    """Nothing of it is sent, not even the header."""
    async with joined() as (client, server):
        with pytest.raises(MessageTooLargeError):
            await send_array(client, np.zeros((4 << 20) + 1, "u1"))
        await send_array(client, np.arange(3))
        assert same(await recv_array(server), np.arange(3))


def head(words: Any, *, flags: int = 0, magic: bytes = b"NPA1") -> bytes:
    text = words if isinstance(words, bytes) else json.dumps(words).encode()
    return magic + bytes([flags, 0]) + len(text).to_bytes(2, "big") + text


def told(descr: Any = "<f8", shape: Any = (1,), order: Any = "C") -> Any:
    return {"descr": descr, "shape": shape, "order": order}


HOSTILE = {
    "nothing": b"",
    "short": b"NPA1",
    "magic": head(told(), magic=b"NPA2"),
    "flags": head(told(), flags=2),
    "cut off": head(told())[:-1],
    "no JSON": head(b"\xff{"),
    "a number": head(7),
    "a list": head([]),
    "no shape": head({"descr": "<f8", "order": "C"}),
    "nested": head(b"[" * 60_000),
    "objects": head(told("|O")),
    "object field": head(told([["a", "|O"]])),
    "no dtype": head(told("no")),
    "words": head(told("f8,f8")),
    "python": head(told("__import__('os')")),
    "empty dtype": head(told("|V0", [1 << 40])),
    "empty text": head(told("<U0", [1 << 40])),
    "a huge dtype": head(told("|V999999999", [1 << 40])),
    "a number as dtype": head(told(7)),
    "a dictionary as dtype": head(told({"names": ["a"], "formats": ["O"]})),
    "a field": head(told([["a"]])),
    "a field of four": head(told([["a", "<f8", [1], 2]])),
    "a field twice": head(told([["a", "<f8"], ["a", "<f8"]])),
    "a huge field": head(told([["a", "<f8", [1 << 40, 1 << 40]]])),
    "more than there is": head(told("<f8", [1 << 40])),
    "less than there is": head(told("<f8", [0])),
    "negative": head(told("<f8", [-1, -1])),
    "no number": head(told("<f8", ["x"])),
    "truth": head(told("<f8", [True])),
    "a fraction": head(told("<f8", [1.0])),
    "dimensions": head(told("<f8", [1] * 100)),
    "order": head(told(order="A")),
    "order of another kind": head(told(order=None)),
    "a small array that follows": head(told(), flags=1),
}


@pytest.mark.parametrize("name", list(HOSTILE))
async def test_hostile_headers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ArrayError, and no memory is taken; the next array comes."""

    def refuse(*args: Any) -> Any:
        raise AssertionError(f"memory: {args}")

    async with joined() as (client, server):
        sending = asyncio.create_task(client.send(HOSTILE[name] + bytes(8)))
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", refuse)
            with pytest.raises(ArrayError):
                await recv_array(server)
        await sending
        await send_array(client, np.arange(3))
        assert same(await recv_array(server), np.arange(3))


@pytest.mark.parametrize("size", [0, 1, 100, 300_001])
async def test_a_body_of_another_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header promises 300,000 bytes, which no array is made for."""

    def refuse(*args: Any) -> Any:
        raise AssertionError(f"memory: {args}")

    async with joined() as (client, server):
        await client.send(head(told("|u1", [300_000]), flags=1))
        sending = asyncio.create_task(client.send(bytes(size)))
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", refuse)
            with pytest.raises(ArrayError, match=f"300000 bytes is followed by .* {size}"):
                await recv_array(server)
        if size > 1:
            assert len(await server.recv()) == size
        await sending
        await send_array(client, np.arange(3))
        assert same(await recv_array(server), np.arange(3))


async def test_a_shape_that_no_array_has() -> None:
    async with joined() as (client, server):
        await client.send(head(told("<f8", [0, 1 << 47, 1 << 47])))
        with pytest.raises(ArrayError, match="no array has the shape"):
            await recv_array(server)
        await send_array(client, np.arange(3))
        assert same(await recv_array(server), np.arange(3))


@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_are_a_header_or_an_error(junk: bytes, in_text: bool) -> None:
    message = head(junk) if in_text else b"NPA1" + junk
    with contextlib.suppress(ArrayError):
        read_header(message)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just("<f8"),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=8,
    ),
    st.lists(st.integers(-1, 1 << 60), max_size=4),
)
def test_any_words_are_a_header_or_an_error(descr: Any, shape: list[int]) -> None:
    with contextlib.suppress(ArrayError):
        dtype, _ = read_header(head(told(descr, shape)))
        assert not dtype.hasobject


@pytest.mark.parametrize("name", list(ARRAYS))
def test_the_header_is_of_whole_units(name: str) -> None:
    """So that the bytes behind it are as aligned as the message."""
    assert len(header_of(ARRAYS[name])) % 64 == 0
