"""Events, without a device: a cancelled reader, a channel that is full, a closed listener."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiordma._ffi import ffi, lib, load_error
from aiordma.cm import event_channel
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.cm.event_channel import EventChannel
from aiordma.loop.workers import reaper
from tests.inside.cm import kept_of, publish

from ..conftest import LIMIT_S, Run, settle

pytestmark = pytest.mark.skipif(load_error() is not None, reason="rdma-core is not installed")


class Pump:
    """Whether the descriptor is read."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.reading = True

    def pause(self) -> None:
        self.reading = False

    def resume(self) -> None:
        self.reading = True

    def kick(self) -> None:
        """Nothing is there."""

    def close(self) -> None:
        self.reading = False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What librdmacm was asked for."""
    seen: list[tuple[Any, ...]] = []

    def noting(name: str, answer: Any = 0) -> Any:
        def call(*args: Any) -> Any:
            seen.append((name, *args[:1]))
            return answer

        return call

    monkeypatch.setitem(
        lib.__dict__, "rdma_create_event_channel", noting("create", SimpleNamespace(fd=-1))
    )
    monkeypatch.setitem(lib.__dict__, "rdma_destroy_event_channel", noting("close"))
    monkeypatch.setitem(lib.__dict__, "rdma_reject", noting("reject"))
    monkeypatch.setitem(lib.__dict__, "rdma_destroy_id", noting("destroy"))
    monkeypatch.setattr(event_channel, "check_pointer", lambda handle, call: handle)
    monkeypatch.setattr(event_channel, "CMEvents", lambda *args: SimpleNamespace(id=0))

    def cast_handle(kind: str, value: Any) -> Any:
        return 0 if isinstance(value, SimpleNamespace) else ffi.cast(kind, value)

    stub = SimpleNamespace(cast=cast_handle, NULL=ffi.NULL)
    monkeypatch.setattr(event_channel, "ffi", stub)
    return seen


def channel() -> EventChannel:
    made = EventChannel()
    made._pump = cast("Any", Pump())
    return made


def event_of(channel: EventChannel) -> ConnectionEvent:
    return ConnectionEvent(channel, EventType.DISCONNECTED, 0, None)


async def close(channel: EventChannel) -> None:
    channel._unacked = 0  # these events are of no id that counts them
    channel.close()
    await channel.wait_closed()


def test_i02_an_event_for_a_reader_that_is_cancelled_goes_to_the_next(
    run: Run, calls: list[Any]
) -> None:
    async def main() -> None:
        events = channel()
        first, second = (asyncio.create_task(events.get_event()) for _ in range(2))
        await settle()
        event = event_of(events)
        publish(events, event)
        first.cancel()  # it was granted the event, and has not run
        await settle(10)
        assert first.cancelled()
        assert second.done(), "it waits, and the event lies there"
        assert await second is event
        await close(events)

    run(main())


def test_g11_a_channel_without_memory_neither_spins_nor_goes_deaf(
    run: Run, calls: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_channel, "_SHORT_PAUSE_S", 0.01)

    async def main() -> None:
        events = channel()
        pump = cast("Pump", events._pump)
        tries, again = 0, asyncio.Event()
        monkeypatch.setattr(pump, "resume", again.set)

        def take() -> int | None:
            nonlocal tries
            tries += 1
            return errno.ENOMEM if tries <= 3 else None

        events._events.next = take  # type: ignore[method-assign]
        for number in range(1, 4):
            assert not events._on_readable()
            assert tries == number
            assert not pump.reading
            again.clear()
            await asyncio.wait_for(again.wait(), LIMIT_S)
            pump.reading = True
        assert not events._on_readable()
        assert pump.reading
        assert caplog.text.count("no event can be taken") == 1
        await close(events)

    run(main())


def test_i02_a_channel_that_is_full_goes_on(run: Run, calls: list[Any]) -> None:
    async def main() -> None:
        events = channel()
        events._max_unread = 4
        made = [event_of(events) for _ in range(10)]
        for event in made:
            publish(events, event)
        assert len(kept_of(events)) == 4, "what is not read is kept without a bound"
        assert events.dropped_events == 6
        assert cast("Pump", events._pump).reading, "what comes now is never read"
        assert [await events.get_event(0) for _ in range(4)] == made[6:]
        await close(events)

    run(main())


@pytest.mark.parametrize("listener", [None, SimpleNamespace(closed=True)])
def test_i02_a_request_for_a_listener_that_is_gone_is_refused(
    run: Run, calls: list[Any], listener: Any
) -> None:
    """The client would wait for an answer, and the id would never be destroyed."""

    async def main() -> None:
        events = channel()
        cast("Any", events)._ids = {} if listener is None else {7: listener}
        events._dispatch(int(EventType.CONNECT_REQUEST), 0, 0, 7, b"", None)
        assert await asyncio.to_thread(reaper.drain, LIMIT_S)
        assert [name for name, *_ in calls] == ["create", "reject", "destroy"]
        assert not kept_of(events)
        cast("Any", events)._ids = {}
        await close(events)

    run(main())
