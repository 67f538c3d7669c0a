"""Peers that break the rsockets protocol on the wire: their connection ends, no other suffers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest

import aiordma
from aiordma.errors import (
    ConnectionFailedError,
    ConnectionLostError,
    ProtocolError,
)
from aiordma.rsocket import Descriptor
from tests.device.oracle import until
from tests.device.rsocket_peer import CREDITS, Peer
from tests.device.stream_scene import DEPTH, HALF, LIMIT_S, SEED, Scene, playing
from tests.rsocket_hostile import (
    DISCONNECT,
    SHUTDOWN,
    descriptor,
    private_data,
    right_word,
    word,
)

pytestmark = pytest.mark.device

# On iWARP, where connecting takes long, a fifth of them.
CASES, PARTS = (100, 1) if os.environ.get("AIORDMA_SOFTROCE_DEVICE") == "siw" else (500, 5)


@pytest.fixture
async def scene(address: str) -> AsyncIterator[Scene]:
    async with playing(address) as scene:
        yield scene


# -- one sin each


def across_the_halves(peer: Peer) -> None:
    peer.data(b"x" * 4000)
    peer.data(b"y" * 97, 4000)


def after_the_end(peer: Peer) -> None:
    peer.say(SHUTDOWN)
    peer.say(1)


def third_buffer(peer: Peer) -> None:
    peer.advertise(1, peer.second_half.pack(False))
    peer.advertise(0, peer.second_half.pack(False))


ENDLESS = Descriptor((1 << 64) - 1, 1, 2).pack(False)
SINS: dict[str, tuple[Callable[[Peer], None], str]] = {
    "a reserved kind": (lambda peer: peer.say(0x20000005), "reserved kind 1"),
    "empty data": (lambda peer: peer.say(0), "0 bytes of data"),
    "a byte too long": (lambda peer: peer.say(HALF + 1), f"{HALF + 1} bytes of data for {HALF}"),
    "huge": (lambda peer: peer.say((1 << 29) - 1), "536870911 bytes of data"),
    "across the halves": (across_the_halves, "97 bytes of data for 96"),
    "data after the end": (after_the_end, "after its end"),
    "a limit that goes back": (lambda peer: peer.say(0x80000000 | CREDITS - 1), "message limit"),
    "a limit too far": (lambda peer: peer.say(0x80000000 | CREDITS + 1), "message limit"),
    "a mapping": (lambda peer: peer.say(0xC0000000), "slot 0"),
    "a third buffer": (third_buffer, "third buffer"),
    "an endless buffer": (lambda peer: peer.advertise(1, ENDLESS), "a buffer of 2 bytes"),
    "no word": (lambda peer: peer.message(b""), "without a word"),
}


@pytest.mark.parametrize("sin", SINS)
async def test_a_sin_ends_the_connection_of_the_sinner(
    scene: Scene, sin: str, caplog: pytest.LogCaptureFixture
) -> None:
    commit, words = SINS[sin]
    caplog.set_level(logging.WARNING, "aiordma")
    peer, victim = await scene.peer()
    try:
        victim.half_open = True
        commit(peer)
        exc = await victim.end()
    finally:
        peer.close()
    assert isinstance(exc, ProtocolError), exc
    assert words in str(exc)
    # The protocol of rsockets has no word for it: the log is where both sides' operators look.
    assert "this side ends the connection with" in caplog.text
    assert words in caplog.text


async def test_messages_without_a_credit(scene: Scene) -> None:
    """The victim reads nothing: it has announced 16 messages, and more never wait."""
    peer, victim = await scene.peer()
    try:
        victim.transport.pause_reading()
        for number in range(DEPTH + 1):
            peer.data(b"%c" % number, number)
        exc = await victim.end()
    finally:
        peer.close()
    assert isinstance(exc, ProtocolError), exc
    assert "16 messages wait" in str(exc)
    assert not victim.received


async def test_bytes_that_were_never_written_are_no_one_elses(scene: Scene) -> None:
    """The word says that they are there: the program gets zeros, not what memory held before."""
    for _ in range(3):
        peer, victim = await scene.peer()
        try:
            peer.say(HALF)
            peer.say(DISCONNECT)
            assert await victim.end() is None or victim.received
        finally:
            peer.close()
        assert victim.received == bytes(HALF)


@pytest.mark.parametrize("offset", [-1, 2 * HALF])
async def test_a_write_outside_of_the_ring(scene: Scene, offset: int) -> None:
    """The adapter refuses it; what the memory around holds stays as it is."""
    peer, victim = await scene.peer()
    try:
        peer.data(b"!", offset)
        exc = await victim.end()
    finally:
        peer.close()
    assert isinstance(exc, ConnectionLostError)
    assert not victim.received


async def test_a_read_of_the_ring(scene: Scene) -> None:
    """Nobody may read there; who asks loses the connection."""
    peer = await scene.stranger()
    try:
        victim = await scene.introduce(peer, reads=True)
        peer.data(b"secret")
        theirs = peer.theirs
        with pytest.raises(aiordma.CompletionError):
            async with asyncio.timeout(LIMIT_S):
                await peer.qp.read(peer.mr, theirs.buffer_addr, theirs.buffer_key)
        assert b"secret" not in bytes(peer.mr.view[:HALF])
        assert isinstance(await victim.end(), ConnectionLostError)
    finally:
        peer.close()


async def test_a_read_that_was_not_promised(scene: Scene, is_siw: bool) -> None:
    """rsockets' depths are 0: a read is refused before it is posted."""
    peer, victim = await scene.peer()
    try:
        theirs = peer.theirs
        reading = peer.qp.read(peer.mr, theirs.buffer_addr, theirs.buffer_key)
        if is_siw:  # there the depth is 1, and the key's rights are looked at
            with pytest.raises(aiordma.CompletionError):
                await asyncio.wait_for(reading, LIMIT_S)
        else:
            with pytest.raises(aiordma.NotSupportedError, match="initiator_depth 0"):
                await reading
            peer.data(b"behind")
            await until(lambda: bytes(victim.received) == b"behind")
            assert not victim.lost.is_set()
    finally:
        peer.close()
    assert isinstance(await victim.end(), ConnectionLostError)


# -- all of them


def misbehave(peer: Peer, rng: Random) -> None:
    """Say ten things or so; how many of them are wrong depends on the seed."""
    malice = rng.choice((0.0, 0.3, 0.6))
    limit, used, entry = CREDITS, 0, 1
    for _ in range(rng.randint(1, 20)):
        what = rng.randrange(6)
        left = HALF - used
        if what < 3:
            good = rng.random() >= malice
            value = (right_word if good else word)(rng, limit=limit, left=min(left, 300))
            length = value if value <= left else 0
            if length:
                peer.data(rng.randbytes(length), used)
                used += length
            else:
                peer.say(value)
        elif what == 3 and rng.random() < malice:
            peer.advertise(rng.randrange(2), descriptor(rng, peer.second_half), limit)
        elif what == 3 and entry == 1:
            peer.advertise(entry, peer.second_half.pack(False), limit)
            entry = 0
        elif what == 4 and rng.random() < malice / 4:
            peer.data(b"!", rng.choice((-1, 2 * HALF, 1 << 40)))
        elif what == 5 and rng.random() < malice / 4:
            peer.message(rng.randbytes(rng.choice((0, 3, 4, 8))))
    match rng.randrange(4):
        case 0:
            peer.say(DISCONNECT)
        case 1:
            peer.say(SHUTDOWN)
            peer.say(DISCONNECT)


@pytest.mark.one_device
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
async def test_hostile_peers(scene: Scene, part: int) -> None:
    # What asyncio's debug mode notes of each handle would take minutes here.
    asyncio.get_running_loop().set_debug(False)
    print(f"seed {SEED}; AIORDMA_TEST_SEED changes it")
    ends: Counter[str] = Counter()

    async def one(index: int) -> None:
        rng = Random(f"{SEED}/{index}")
        victim = None
        peer = await scene.stranger()
        try:
            data = private_data(rng, peer.hello)[:56] if not rng.randrange(4) else None
            try:
                victim = await scene.introduce(peer, data)
            except ConnectionFailedError:
                ends["refused"] += 1
                return
            misbehave(peer, rng)
            if rng.randrange(4):  # otherwise it goes in the midst of it
                await peer.finished()
        except BaseException as error:
            error.add_note(f"case {SEED}/{index}")
            raise
        finally:
            peer.close()
        ends[type(await victim.end()).__name__] += 1

    for index in range(part, CASES, PARTS):
        await one(index)
    print(ends)
    # A generator that is always refused, or never, would show nothing.
    assert ends["refused"]
    assert ends["ProtocolError"]
