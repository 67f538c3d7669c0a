"""What was sent before an abort, or before the loop ends, arrives; and why a connection ended."""

from __future__ import annotations

import asyncio
import errno

import pytest

from aiordma.cm.enums import EventType
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FRAME, AbortReason, FrameKind
from aiordma.errors import ConnectionEndedError, ConnectionLostError, ProtocolError
from aiordma.loop import background
from tests.inside.endpoint import end_with, say_last

from ..conftest import LOOPS, run_on, settle
from .fabric import FakeLink, Wire

#: Longer than a test may take: what waits for it has not ended by itself.
NEVER_S = 3600.0


def frame(kind: FrameKind, argument: int = 0) -> bytes:
    return FRAME.pack(kind, 0, 0, 0, argument)


def kinds(frames: list[bytes]) -> list[FrameKind]:
    return [FrameKind(FRAME.unpack_from(each)[0]) for each in frames]


def note_losses(link: FakeLink) -> list[int]:
    """How many sends were under way when the side disconnected, or gave everything back."""
    lost: list[int] = []
    disconnect, close = link.cm_id.start_disconnect, link.close

    def disconnecting() -> None:
        lost.append(len(link.busy))
        disconnect()

    def closing() -> None:
        if not link.closed:
            lost.append(len(link.busy))
        close()

    link.cm_id.start_disconnect = disconnecting
    link.close = closing  # type: ignore[method-assign]
    return lost


async def opened(close_timeout_s: float = NEVER_S) -> Wire:
    background.prepare()
    config = ConnectionConfig(close_timeout_s=close_timeout_s)
    wire = Wire(config, config)
    await wire.open()
    await wire.run()
    return wire


async def told(wire: Wire) -> BaseException:
    """What recv() raises; nothing is left afterwards."""
    end = wire.ends[0]
    with pytest.raises((ConnectionLostError, ConnectionEndedError, ProtocolError)) as caught:
        await end.recv()
    await end.close()
    await wire.lose()
    return caught.value


async def test_b04_what_was_sent_before_an_abort_arrives() -> None:
    wire = await opened()
    link = wire.links[1]
    lost = note_losses(link)
    await wire.ends[1].send(b"last words")
    wire.ends[1].abort()
    wire.ends[1].abort()  # is no hurry
    await settle(20)
    assert lost == [], "it has disconnected, and ABORT may not have arrived"
    await wire.run()
    assert kinds(link.sent)[-2:] == [FrameKind.DATA, FrameKind.ABORT]
    assert lost
    assert not any(lost)
    assert bytes(await wire.ends[0].recv()) == b"last words"
    assert "the peer aborted" in str(await told(wire))


async def test_b04_a_close_that_is_given_up_leaves_what_was_sent() -> None:
    wire = await opened()
    lost = note_losses(wire.links[1])
    await wire.ends[1].send(b"last words")
    closing = asyncio.create_task(wire.ends[1].close())
    await settle()
    closing.cancel()
    await settle(20)
    assert closing.cancelled()
    assert lost == [], "the message may not have arrived"
    await wire.run()
    assert lost
    assert not any(lost)
    assert bytes(await wire.ends[0].recv()) == b"last words"
    assert "disconnected without a word" in str(await told(wire))


async def test_b04_what_the_peer_did_wrong_is_told_before_the_disconnection() -> None:
    wire = await opened()
    link = wire.links[1]
    lost = note_losses(link)
    cause = ProtocolError(errno.EPROTO, "the peer broke the protocol")
    assert say_last(wire.ends[1], cause)
    end_with(wire.ends[1], cause)
    await settle(20)
    assert lost == []
    await wire.run()
    assert kinds(link.sent)[-1] == FrameKind.ABORT
    assert lost
    assert not any(lost)
    assert isinstance(await told(wire), ProtocolError)


async def test_b04_a_wire_that_carries_nothing_is_waited_for_so_long() -> None:
    wire = await opened(close_timeout_s=0.05)
    wire.ends[1].abort()
    await wire.ends[1].wait_closed()
    assert wire.links[1].busy
    await wire.lose()


@pytest.mark.parametrize("end", ["failure", "disconnection"])
async def test_b04_an_adapter_that_fails_ends_the_wait(end: str) -> None:
    wire = await opened()
    wire.ends[1].abort()
    await settle(20)
    assert not wire.links[1].closed
    if end == "failure":
        wire.links[1].fail(ConnectionResetError(errno.ECONNRESET, "a cut"))
    else:
        wire.links[1].cm_id.event(EventType.DISCONNECTED)
    await wire.ends[1].wait_closed()
    await wire.lose()


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("way", ["aborts", "closes", "leaves it open"])
def test_h02_what_was_sent_before_the_loop_ends_arrives(name: str, way: str) -> None:
    """As asyncio.run ends it: all tasks are canceled, those of the connection, too."""

    async def main() -> tuple[Wire, list[int]]:
        wire = await opened()
        link, loop = wire.links[1], asyncio.get_running_loop()
        lost = note_losses(link)
        await wire.ends[1].send(b"last words")
        if way == "aborts":
            wire.ends[1].abort()
        elif way == "closes":
            closing = asyncio.create_task(wire.ends[1].close())
            await settle()
            assert not closing.done()
        turns = iter(range(50))

        def work() -> None:
            """Some turns of the loop later, the adapters do what they do without a task."""
            if next(turns, None) is not None:
                loop.call_soon(work)
            else:
                assert lost == [], "the loop has not waited"
                wire.settle()

        loop.call_soon(work)
        return wire, lost

    wire, lost = run_on(name, main())
    assert not wire.links[1].busy
    assert bool(lost) == (way != "leaves it open")
    assert not any(lost)
    assert FrameKind.DATA in kinds(wire.links[1].sent)
    for link in wire.links:
        link.close()


async def test_b04_a_peer_that_gives_no_reason_has_vanished() -> None:
    wire = await opened()
    wire.links[0].cm_id.event(EventType.DISCONNECTED)
    assert "disconnected without a word" in str(await told(wire))


async def test_b04_the_reason_of_an_abort_comes_first() -> None:
    wire = await opened()
    wire.links[0].inject(frame(FrameKind.ABORT, AbortReason.MEMORY))
    wire.links[0].cm_id.event(EventType.DISCONNECTED)
    assert "it ran out of memory" in str(await told(wire))


class Secret(Exception):
    """An error of a program, whose text is nobody's concern."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Secret("password"), "the peer aborted the connection: its program raised Secret"),
        (asyncio.CancelledError(), "the peer aborted the connection: its program was canceled"),
        (type("N" * 40, (Exception,), {})(), f"raised {'N' * 31}"),
        (type("é" * 40, (Exception,), {})(), f"raised {'é' * 15}"),
        (type("no name\n", (Exception,), {})(), "the peer aborted the connection"),
    ],
    ids=lambda value: type(value).__name__.strip(),
)
async def test_an_exception_of_the_program_is_named_to_the_peer(
    error: BaseException, said: str
) -> None:
    """By its class alone."""
    wire = await opened()

    async def program() -> None:
        async with wire.ends[1]:
            raise error

    running = asyncio.create_task(program())
    await wire.run()
    assert b"password" not in b"".join(wire.links[1].sent)
    text = str(await told(wire))
    assert text.endswith(said)
    with pytest.raises(type(error)):
        await running


@pytest.mark.parametrize(
    "words", [b"", b"Not a name", b"\xff\x00", b"\x1b[31m", b"Error\n", b"Error" * 20]
)
async def test_words_of_a_peer_that_are_no_name_are_not_shown(words: bytes) -> None:
    wire = await opened()
    wire.links[0].inject(frame(FrameKind.ABORT) + words)
    wire.links[0].cm_id.event(EventType.DISCONNECTED)
    text = str(await told(wire))
    cut = words[:31].decode(errors="ignore")
    shown = f": its program raised {cut}" if cut.isidentifier() else ""
    assert text == f"[Errno {errno.ECONNRESET}] the peer aborted the connection{shown}"


async def test_words_count_behind_the_reason_of_a_program_alone() -> None:
    wire = await opened()
    wire.links[0].inject(frame(FrameKind.ABORT, AbortReason.MEMORY) + b"Error")
    wire.links[0].cm_id.event(EventType.DISCONNECTED)
    assert str(await told(wire)).endswith("it ran out of memory")


async def test_b04_after_the_end_the_peer_has_closed() -> None:
    wire = await opened()
    wire.links[0].inject(frame(FrameKind.END))
    wire.links[0].cm_id.event(EventType.DISCONNECTED)
    with pytest.raises(ConnectionLostError, match="the peer closed the connection"):
        await wire.ends[0].send(b"x")
    assert isinstance(await told(wire), ConnectionEndedError)
