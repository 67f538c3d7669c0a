"""Events, without a device: a cancelled reader, a channel that is full, a closed listener."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from aiordma._ffi import ffi, lib, load_error
from aiordma.cm import event_channel
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.cm.event_channel import EventChannel
from aiordma.cm.step import Step
from aiordma.loop.workers import reaper
from tests.inside.cm import enroll, kept_of, pass_requests_on, publish, set_short_pause
from tests.inside.loop import all_done

from ..conftest import LIMIT_S, settle

pytestmark = pytest.mark.skipif(load_error() is not None, reason="rdma-core is not installed")


class Pump:
    """Whether the descriptor is read; the last that was made."""

    last: Pump

    def __init__(self, loop: Any, fd: int, readable: Callable[[], bool], failure: Any) -> None:
        Pump.last = self
        self.loop = loop
        self.readable = readable
        self.failed = failure
        self.reading = True

    def pause(self) -> None:
        self.reading = False

    def resume(self) -> None:
        self.reading = True

    def kick(self) -> None:
        """Nothing is there."""

    def close(self) -> None:
        self.reading = False


class Events:
    """The events in the kernel."""

    id = 0
    waiting: ClassVar[list[Any]] = []

    def __init__(self, address: int) -> None:
        """None are there."""

    def next(self) -> Any:
        return self.waiting.pop(0) if self.waiting else None

    def close(self) -> None:
        """There is nothing to free."""


class Owner:
    """A connection id."""

    def __init__(self, *, closed: bool = False) -> None:
        self.closed = closed
        self._unacked = 0
        self._step = Step()


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
    monkeypatch.setattr(event_channel, "CMEvents", Events)
    monkeypatch.setattr(event_channel, "FdPump", Pump)
    monkeypatch.setattr(Events, "waiting", [])

    def cast_handle(kind: str, value: Any) -> Any:
        return 0 if isinstance(value, SimpleNamespace) else ffi.cast(kind, value)

    stub = SimpleNamespace(cast=cast_handle, NULL=ffi.NULL)
    monkeypatch.setattr(event_channel, "ffi", stub)
    return seen


async def channel(**options: int) -> EventChannel:
    """A channel of the running loop."""
    made = EventChannel(**options)
    assert await made.get_event(0) is None
    return made


def event_of(channel: EventChannel) -> ConnectionEvent:
    owner: Any = Owner()
    return ConnectionEvent(channel, EventType.DISCONNECTED, 0, owner)


async def close(channel: EventChannel) -> None:
    channel.close()
    await channel.wait_closed()


async def test_i02_an_event_for_a_reader_that_is_cancelled_goes_to_the_next(
    calls: list[Any],
) -> None:
    events = await channel()
    first, second = (asyncio.create_task(events.get_event()) for _ in range(2))
    await settle()
    event = event_of(events)
    publish(events, event)
    first.cancel()  # it was granted the event, and has not run
    await settle(10)
    assert first.cancelled()
    assert second.done(), "it waits, and the event lies there"
    assert await second is event
    event.ack()
    await close(events)


async def test_g11_a_channel_without_memory_neither_spins_nor_goes_deaf(
    calls: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_short_pause(monkeypatch, 0.01)
    events = await channel()
    pump = Pump.last
    tries, again = 0, asyncio.Event()
    monkeypatch.setattr(pump, "resume", again.set)

    def take(_: Events) -> int | None:
        nonlocal tries
        tries += 1
        return errno.ENOMEM if tries <= 3 else None

    monkeypatch.setattr(Events, "next", take)
    for number in range(1, 4):
        assert not pump.readable()
        assert tries == number
        assert not pump.reading
        again.clear()
        await asyncio.wait_for(again.wait(), LIMIT_S)
        pump.reading = True
    assert not pump.readable()
    assert pump.reading
    assert caplog.text.count("no event can be taken") == 1
    await close(events)


async def test_a_channel_that_may_no_longer_be_read_says_so_in_a_line(
    calls: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a change of the user; the traceback of a fault would be of no help."""
    monkeypatch.setattr(Events, "waiting", [errno.EACCES])
    events = await channel()
    reader = asyncio.create_task(events.get_event())
    await settle()
    pump = Pump.last
    with pytest.raises(PermissionError, match="rdma_get_cm_event") as caught:
        pump.readable()
    pump.failed(caught.value)
    with pytest.raises(PermissionError):
        await reader
    with pytest.raises(PermissionError):
        await asyncio.wait_for(events.get_event(), LIMIT_S)  # who comes later waits for nothing
    with pytest.raises(PermissionError):
        aiter(events)
    await close(events)
    (record,) = caplog.records
    assert record.exc_info is None
    assert "credentials" in record.getMessage()


async def test_i02_a_channel_that_is_full_goes_on(calls: list[Any]) -> None:
    events = await channel(max_unread=4)
    made = [event_of(events) for _ in range(10)]
    for event in made:
        publish(events, event)
    assert len(kept_of(events)) == 4, "what is not read is kept without a bound"
    assert events.dropped_events == 6
    assert Pump.last.reading, "what comes now is never read"
    assert [await events.get_event(0) for _ in range(4)] == made[6:]
    for event in made[6:]:
        event.ack()
    await close(events)


@pytest.mark.parametrize("known", [False, True])
async def test_i02_a_request_for_a_listener_that_is_gone_is_refused(
    calls: list[Any], known: bool
) -> None:
    """The client would wait for an answer, and the id would never be destroyed."""
    events, listener = await channel(), Owner(closed=True)
    token = enroll(events, listener) if known else 7
    Events.waiting = [(int(EventType.CONNECT_REQUEST), 0, 0, token, b"", None)]
    assert not Pump.last.readable()
    assert await asyncio.to_thread(all_done, reaper, LIMIT_S)
    assert [name for name, *_ in calls] == ["create", "reject", "destroy"]
    assert not kept_of(events)
    del listener
    await close(events)


@pytest.mark.parametrize("failure", [OSError(errno.EINVAL, "gone"), RuntimeError("another loop")])
async def test_a_request_that_its_channel_cannot_take_is_refused(
    calls: list[Any], failure: Exception
) -> None:
    def take_over(*_: object) -> None:
        raise failure

    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    events, listener = await channel(), Owner()
    held: list[str] = []
    other = SimpleNamespace(
        _take_over=take_over,
        _retain=lambda: held.append("retained"),
        _let_go=lambda: held.append("let go"),
    )
    pass_requests_on(events, other)
    token = enroll(events, listener)
    Events.waiting = [(int(EventType.CONNECT_REQUEST), 0, 0, token, b"", None)]
    assert not Pump.last.readable()
    assert await asyncio.to_thread(all_done, reaper, LIMIT_S)
    assert [name for name, *_ in calls] == ["create", "reject", "destroy"]
    assert held == ["retained", "let go"], "the C id may be the other channel's"
    assert [context["exception"] for context in reported] == (
        [] if isinstance(failure, OSError) else [failure]
    )
    await close(events)
