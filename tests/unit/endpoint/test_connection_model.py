"""Connection over the fake adapter: the handshake, the end, and what a broken peer may do."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core import FRAME_HAS_IMM
from aiordma.cm.enums import EventType
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FRAME, RENDEZVOUS, FrameKind
from aiordma.errors import (
    ConnectionLostError,
    MessageTooLargeError,
    ProtocolError,
)
from tests.inside.endpoint import copied_up_to, greet, greeting_of

from ..conftest import run_on, settle
from ..memory.fake_memory import FakeRegion
from .fabric import Wire

CONFIG = ConnectionConfig(
    slot_size=64, rendezvous_threshold=0, recv_depth=4, send_depth=4, rendezvous_window=2
)


pytestmark = pytest.mark.usefixtures("fake_regions")


async def opened(config: ConnectionConfig = CONFIG) -> Wire:
    wire = Wire(config, config)
    await wire.open()
    return wire


# ---- handshake -----------------------------------------------------------------------------


async def test_the_connecting_side_sends_first() -> None:
    wire = Wire(CONFIG, CONFIG)
    wire.meet(1)
    greeting = greeting_of(wire.ends[1])
    wire.meet(0)
    await settle()
    assert wire.links[0].sent == []
    greet(wire.ends[0])
    assert [FRAME.unpack(frame)[0] for frame in wire.links[0].sent] == [FrameKind.CREDIT]
    assert wire.links[1].sent == []
    assert not greeting.done()
    wire.settle()
    await greeting
    assert wire.links[1].cm_id.notified == 1, "the confirmation may have been lost"
    await wire.close()


@pytest.mark.parametrize("size", [10, 1000])
async def test_messages_right_behind_the_greeting_wait_for_the_acceptance(size: int) -> None:
    """All of it can be in one batch of completions."""
    wire = Wire(CONFIG, CONFIG)
    wire.meet(1)
    greeting = greeting_of(wire.ends[1])
    wire.meet(0)
    greet(wire.ends[0])
    send = asyncio.create_task(wire.ends[0].send(bytes(size)))
    await settle()
    wire.settle()
    assert wire.links[1].failure is None, wire.links[1].failure
    await greeting
    await wire.run()
    message = await wire.ends[1].recv()
    assert len(message) == size
    message.release()
    await wire.run()
    await send
    await wire.close()


async def test_an_end_right_behind_the_greeting_is_not_missed() -> None:
    wire = Wire(CONFIG, CONFIG)
    wire.meet(1)
    greeting = greeting_of(wire.ends[1])
    wire.meet(0)
    greet(wire.ends[0])
    wire.settle()
    await asyncio.sleep(0)  # the greeting is there; whoever accepts has not resumed yet
    wire.links[1].cm_id.event(EventType.DISCONNECTED)
    await greeting
    with pytest.raises(ConnectionLostError):
        await wire.ends[1].recv()
    await wire.ends[1].wait_closed()
    await wire.lose()


# ---- messages ------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_size", [64, 4096], ids=["large", "in a slot"])
async def test_a_message_above_the_peers_limit_is_refused_before_it_is_sent(slot_size: int) -> None:
    config = ConnectionConfig(slot_size=slot_size, rendezvous_threshold=0, max_message_size=2048)
    wire = await opened(config)
    sent = len(wire.links[0].sent)
    with pytest.raises(MessageTooLargeError, match="2048 bytes, this has 2049"):
        await wire.ends[0].send(bytes(2049))
    assert len(wire.links[0].sent) == sent
    send = asyncio.create_task(wire.ends[0].send(bytes(2048)))
    await wire.run()
    assert len(await wire.ends[1].recv()) == 2048
    await wire.run()
    await send
    await wire.close()


async def test_large_messages_are_fetched_in_order_whatever_fits() -> None:
    """The second does not fit beside the first; the third would, and must not slip in."""
    config = ConnectionConfig(slot_size=64, rendezvous_threshold=0, receive_buffer_size=400)
    wire = await opened(config)
    sizes = (300, 380, 90, 60, 399)
    sends = [asyncio.create_task(wire.ends[0].send(bytes(n))) for n in sizes]
    await wire.run()
    for size in sizes:
        receive = asyncio.create_task(wire.ends[1].recv())
        await wire.run()
        assert receive.done(), f"recv() of {size} bytes hangs"
        message = await receive
        assert len(message) == size
        message.release()
    await wire.run()
    await asyncio.gather(*sends)
    await wire.close()


async def test_a_large_send_that_waits_when_the_connection_breaks() -> None:
    wire = await opened()
    for _ in range(4):
        await wire.ends[0].send(b"x")
    big = asyncio.create_task(wire.ends[0].send(bytes(1000)))
    await settle()
    assert wire.links[0].reads_allowed == 1
    wire.links[0].fail(ConnectionResetError(errno.ECONNRESET, "link down"))
    with pytest.raises(ConnectionLostError, match="link down"):
        await big
    await wire.ends[0].wait_closed()
    assert FakeRegion.regions == {}, "the buffer is still registered"
    await wire.lose()


async def test_a_canceled_large_send_keeps_its_buffer_until_the_peer_has_read_it() -> None:
    wire = await opened()
    buffer = bytearray(b"z" * 1000)
    big = asyncio.create_task(wire.ends[0].send(buffer))
    await settle()
    big.cancel()
    with pytest.raises(asyncio.CancelledError):
        await big
    if copied_up_to():
        buffer[:] = bytes(1000)
    else:
        with pytest.raises(BufferError):
            buffer.extend(b"more")
    await wire.run()
    message = await wire.ends[1].recv()
    assert bytes(message) == b"z" * 1000
    message.release()
    await wire.run()
    assert FakeRegion.regions == {}
    await wire.close()


# ---- the end -------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [FrameKind.DATA, FrameKind.END, FrameKind.DONE, 200])
@pytest.mark.parametrize("how", ["abort", "close", "fail"])
async def test_a_task_that_a_drain_resumes_may_end_the_connection(how: str, behind: int) -> None:
    """It releases, sends and ends it, while the drain has more to tell."""
    wire = await opened()
    link, end = wire.links[1], wire.ends[1]

    async def serve() -> None:
        message = await end.recv()
        await end.send(message)
        message.release()
        if how == "abort":
            end.abort()
        elif how == "close":
            await end.close()
        else:
            link.fail(ConnectionResetError(errno.ECONNRESET, "a cut"))

    serving = asyncio.create_task(serve())
    await settle()
    link.inject(FRAME.pack(FrameKind.DATA, 0, 0, 0, 3) + b"abc")
    link.inject(FRAME.pack(behind, 0, 0, 0, 0))
    await wire.run()
    link.fail(ConnectionResetError(errno.ECONNRESET, "the end"))
    await asyncio.wait([serving], timeout=5)
    assert serving.done()
    serving.exception()
    await wire.lose()
    assert link.closed


async def test_i05_a_peer_that_waits_for_credit_reads_the_last_large_message() -> None:
    """Of a side that closes, and takes no message any more."""
    wire = await opened(dataclasses.replace(CONFIG, receive_buffer_size=1))
    first, second = wire.ends
    large = [asyncio.create_task(end.send(bytes(1000))) for end in wire.ends]

    async def talk() -> bytes:
        for _ in range(20):
            await first.send(b"x")
        with await first.recv() as message:
            return bytes(message)

    talking = asyncio.create_task(talk())
    await wire.run()
    assert not talking.done()
    closing = asyncio.create_task(second.close())
    await wire.run()
    assert talking.done(), "it has no credit, although nothing is taken"
    assert await talking == bytes(1000)
    await large[1]
    await closing
    with pytest.raises(ConnectionLostError):
        await large[0]
    await wire.close()


async def test_a_disconnection_without_an_end_is_a_loss() -> None:
    wire = await opened()
    await wire.ends[0].send(b"one")
    wire.links[1].land()  # arrived, not processed: delivered before the disconnection
    wire.links[1].cm_id.event(EventType.DISCONNECTED)
    assert bytes(await wire.ends[1].recv()) == b"one"
    with pytest.raises(ConnectionLostError):
        await wire.ends[1].recv()
    with pytest.raises(ConnectionLostError):
        await wire.ends[1].send(b"x")
    await wire.ends[1].wait_closed()
    await wire.lose()


async def test_what_lies_behind_a_large_message_that_was_not_read_is_lost_with_it() -> None:
    """It would come out of turn."""
    wire = await opened()
    for frame in (FULL, announced(), FULL):
        wire.links[1].inject(frame)
    await settle()
    wire.links[1].fail(ConnectionResetError(errno.ECONNRESET, "a cut"))
    assert bytes(await wire.ends[1].recv()) == b"x"
    for _ in range(2):
        with pytest.raises(ConnectionLostError, match="a cut"):
            await wire.ends[1].recv()
    await wire.lose()


# ---- a peer that breaks the rules ----------------------------------------------------------

FULL = FRAME.pack(FrameKind.DATA, 0, 0, 0, 1) + b"x"


def announced(length: int = 100, number: int = 1) -> bytes:
    """A large message, at a made-up address."""
    header = FRAME.pack(FrameKind.RENDEZVOUS, 0, 0, 0, length)
    return header + RENDEZVOUS.pack(1 << 32, 1, number)


#: Frames, of which only the last one is wrong, and what is said of it.
VIOLATIONS: dict[str, tuple[list[bytes], str]] = {
    "shorter than its header": ([b"\x01\0\0"], "a message of 3 bytes is shorter than its header"),
    "an empty message": ([b""], "a message of 0 bytes is shorter than its header"),
    "a length that does not fit": (
        [FRAME.pack(FrameKind.DATA, 0, 0, 0, 5) + b"four"], "length 5 announced, 4 bytes came",
    ),
    "a kind that does not exist": ([FRAME.pack(9, 0, 0, 0, 0)], "message kind 9"),
    "an exchange that is not open": (
        [FRAME.pack(FrameKind.DONE, 0, 0, 0, 77)], "answered exchange 77",
    ),
    "a large message of 0 bytes": ([announced(0)], "it announced a message of 0 bytes"),
    "a large message beyond the limit": ([announced(1 << 40)], f"of {1 << 40} bytes"),
    "an announcement that is cut off": (
        [FRAME.pack(FrameKind.RENDEZVOUS, 0, 0, 0, 100) + b"short"], "announce",
    ),
    "a message without credit": ([FULL] * (CONFIG.recv_depth + 1), "came without credit"),
    "more large messages than the window": (
        [announced(number=number) for number in range(CONFIG.rendezvous_window + 1)],
        "more large messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_each_violation_ends_this_connection(name: str) -> None:
    wire = await opened()
    frames, words = VIOLATIONS[name]
    for frame in frames:
        assert wire.links[1].failure is None
        wire.links[1].inject(frame)
        await settle()
    assert isinstance(wire.links[1].failure, ProtocolError)
    assert words in str(wire.links[1].failure)
    wire.links[1].reads.clear()
    with pytest.raises(ProtocolError, match=words):
        await wire.ends[1].send(b"x")
    while wire.links[1].state.arrived:  # what has come before is delivered
        (await wire.ends[1].recv()).release()
    with pytest.raises(ProtocolError, match=words):
        await wire.ends[1].recv()
    await wire.lose()


@pytest.mark.parametrize("reason", [99, 1 << 63])
async def test_a_reason_that_is_not_known_is_told_as_it_came(reason: int) -> None:
    wire = await opened()
    wire.links[1].inject(FRAME.pack(FrameKind.ABORT, 0, 0, 0, reason))
    await settle()
    with pytest.raises(ConnectionLostError, match=rf"\b{reason}\b"):
        await wire.ends[1].recv()
    await wire.lose()


async def test_g03_a_flag_at_a_done_ends_the_connection() -> None:
    wire = await opened()
    big = asyncio.create_task(wire.ends[0].send(bytes(1000)))
    await settle()
    wire.links[1].inbound.clear()
    wire.links[0].unacked.append(next(iter(wire.links[0].busy)))
    wire.links[0].inject(FRAME.pack(FrameKind.DONE, 2, 0, 0, 1))
    with pytest.raises(ProtocolError, match="flags 0x2"):
        await big
    assert isinstance(wire.links[0].failure, ProtocolError)
    await wire.lose()


async def survive(frames: list[bytes], *, at_once: bool) -> None:
    """In one drain, or in one for each."""
    wire = await opened()
    for frame in frames:
        if wire.links[1].failure is not None or not wire.links[1].ready:
            break
        wire.links[1].inject(frame)
        if not at_once:
            await settle()
    await settle()
    failure = wire.links[1].failure
    assert failure is None or isinstance(failure, ProtocolError)
    wire.links[1].reads.clear()
    await wire.lose()


@given(st.lists(st.binary(max_size=64), max_size=12), st.booleans())
def test_no_bytes_of_a_peer_raise_anywhere_else(frames: list[bytes], at_once: bool) -> None:
    run_on("asyncio", survive(frames, at_once=at_once))


FRAMES = st.builds(
    lambda kind, flags, credits, argument, body: (
        FRAME.pack(kind, flags, credits, 0, argument) + body
    ),
    st.integers(0, 8),
    st.sampled_from([0, FRAME_HAS_IMM, 2, 0xFF]),
    st.sampled_from([0, 1, 0xFFFF]),
    st.sampled_from([0, 1, 16, 48, 100, (1 << 64) - 1]),
    st.sampled_from([b"", b"x", b"x" * 16, b"x" * 48, RENDEZVOUS.pack(1 << 32, 1, 1)]),
)


@given(st.lists(FRAMES, max_size=12), st.booleans())
def test_no_frames_of_a_peer_raise_anywhere_else(frames: list[bytes], at_once: bool) -> None:
    run_on("asyncio", survive(frames, at_once=at_once))
