"""The disconnection of a peer may overtake its ABORT: which of them `recv()` tells of, and when."""

from __future__ import annotations

import asyncio

import pytest

from aiordma.cm.enums import EventType
from aiordma.endpoint import core
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FRAME, AbortReason, FrameKind
from aiordma.errors import ConnectionEndedError, ConnectionLostError
from aiordma.loop import background

from .conftest import LOOPS, Run, run_on, settle
from .fabric import Wire

#: Longer than a test may take: what waits for it has not ended by itself.
NEVER_S = 3600.0


def frame(kind: FrameKind, argument: int = 0) -> bytes:
    return FRAME.pack(kind, 0, 0, 0, argument)


async def opened() -> Wire:
    background.prepare()
    wire = Wire(ConnectionConfig(), ConnectionConfig())
    await wire.open()
    await wire.run()
    return wire


def disconnected(wire: Wire) -> asyncio.TimerHandle:
    """The connection is told of the disconnection: the timer with which it waits for ABORT."""
    wire.links[0].cm_id.event(EventType.DISCONNECTED)
    timer = wire.ends[0]._abort_timer
    assert timer is not None, "it does not wait for the reason"
    assert not wire.links[0].closed
    return timer


async def told(wire: Wire) -> BaseException:
    """What recv() raises; nothing is left afterwards."""
    end = wire.ends[0]
    with pytest.raises((ConnectionLostError, ConnectionEndedError)) as caught:
        await end.recv()
    assert not getattr(asyncio.get_running_loop(), background._ATTRIBUTE).closing
    await end.close()
    await wire.lose()
    return caught.value


def test_b04_the_reason_of_an_abort_that_was_overtaken_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_LAST_WORD_S", NEVER_S)

    async def main() -> None:
        wire = await opened()
        receiving = asyncio.create_task(told(wire))
        await settle()
        timer = disconnected(wire)
        await settle(20)
        assert not receiving.done(), "it has not waited for the reason"
        wire.links[0].inject(frame(FrameKind.ABORT, AbortReason.MEMORY))
        assert "it ran out of memory" in str(await receiving)
        assert timer.cancelled()

    run(main())


def test_b04_a_peer_that_gives_no_reason_has_vanished(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_LAST_WORD_S", 0.05)

    async def main() -> None:
        wire = await opened()
        assert disconnected(wire) is disconnected(wire)
        assert "disconnected without a word" in str(await told(wire))

    run(main())


def test_b04_after_the_end_nothing_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_LAST_WORD_S", NEVER_S)

    async def main() -> None:
        wire = await opened()
        wire.links[0].inject(frame(FrameKind.END))
        wire.links[0].cm_id.event(EventType.DISCONNECTED)
        with pytest.raises(ConnectionLostError, match="the peer closed the connection"):
            await wire.ends[0].send(b"x")
        assert isinstance(await told(wire), ConnectionEndedError)

    run(main())


def test_b04_this_side_may_close_meanwhile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_LAST_WORD_S", NEVER_S)

    async def main() -> None:
        for end in ("close", "abort"):
            wire = await opened()
            timer = disconnected(wire)
            if end == "close":
                await wire.ends[0].close()
            else:
                wire.ends[0].abort()
                await wire.ends[0].wait_closed()
            assert timer.cancelled()
            assert wire.links[0].closed
            await wire.lose()

    run(main())


@pytest.mark.parametrize("name", LOOPS)
def test_b04_a_loop_that_ends_meanwhile_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_LAST_WORD_S", NEVER_S)

    async def main() -> tuple[Wire, asyncio.TimerHandle]:
        wire = await opened()
        timer = disconnected(wire)
        wire.ends[1].abort()
        await wire.ends[1].wait_closed()
        return wire, timer

    wire, timer = run_on(name, main())
    assert timer.cancelled()
    assert wire.links[0].closed
