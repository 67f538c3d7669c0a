"""The confirmation of a client, which may come late, or never because the client has gone."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma.cm import connection_id
from aiordma.cm.connection_id import ConnectionId, Stage
from aiordma.cm.enums import EventType
from aiordma.cm.step import Step
from aiordma.errors import ConnectionLostError, ConnectTimeoutError, ResourceClosedError
from aiordma.loop.timers import Timer
from tests.inside.cm import set_confirmation
from tests.inside.endpoint import confirm


class Id:
    """As much of a ConnectionId as the confirmation needs."""

    notify_established: Any = ConnectionId.notify_established
    _confirm = ConnectionId._confirm

    def __init__(self, failure: BaseException | None = None) -> None:
        self.stage = Stage.ACCEPTED
        self.closed = False
        self.failure = failure
        self._confirming: Timer | None = None

    def _require(self) -> str:
        return "the id"

    async def _accept(self, offer: object, private_data: bytes, timeout: object) -> None:
        if self.failure is not None:
            raise self.failure


class Library:
    IBV_EVENT_COMM_EST = 4

    def __init__(self) -> None:
        self.told: list[object] = []

    def rdma_notify(self, handle: object, event: int) -> int:
        self.told.append(handle)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(connection_id, "lib", library)
    set_confirmation(monkeypatch, 0.01)
    return library


@pytest.mark.parametrize("what", ["never", "late", "closed", "collected", "already"])
async def test_a02_a_confirmation_is_waited_for(library: Library, what: str) -> None:
    """Where the kernel is told too early, the id may stay for 66 seconds."""
    cm_id = Id()
    if what == "already":
        cm_id.stage = Stage.CONNECTED
    for _ in range(3):  # of many messages
        cm_id.notify_established()
    assert library.told == []
    if what == "late":
        cm_id.stage = Stage.CONNECTED
    elif what == "closed":
        cm_id.closed = True
    elif what == "collected":
        gone = weakref.ref(cm_id)
        del cm_id
        gc.collect()
        assert gone() is None, "the timer keeps it"
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, passed.set)
    await passed.wait()
    assert library.told == (["the id"] if what == "never" else [])


class Channel:
    def __init__(self) -> None:
        self._ids = {7: "the id"}

    def _drop(self, _: object) -> None:
        pass


class Closing(Id):
    """As much of a ConnectionId as its end needs, too."""

    _on_close = ConnectionId._on_close
    _on_event = ConnectionId._on_event
    _stop_confirming = ConnectionId._stop_confirming

    def __init__(self) -> None:
        super().__init__()
        self._channel, self._token = Channel(), 7
        self._memberships = self._sink = None
        self._step = Step()

    def _fail(self, _: BaseException) -> None:
        pass


@pytest.mark.parametrize("end", ["closed", "confirmed"])
async def test_a02_no_timer_is_left_of_what_is_not_waited_for(
    library: Library, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    set_confirmation(monkeypatch, 3600.0)
    cm_id: Any = Closing()
    before = timer_descriptors()
    cm_id.notify_established()
    assert timer_descriptors() == before + 1
    if end == "closed":
        cm_id._on_close()
    else:
        cm_id._on_event(SimpleNamespace(type=EventType.ESTABLISHED, ah_attr=None))
    assert timer_descriptors() == before


def timer_descriptors() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("timerfd" in os.readlink(link) for link in links if os.path.lexists(link))


class Request:
    def __init__(self, failure: BaseException | None) -> None:
        self.cm_id = Id(failure)


@pytest.mark.parametrize("spoken", [True, False])
@pytest.mark.parametrize(
    "failure", [None, ConnectionLostError, ResourceClosedError, ConnectTimeoutError]
)
async def test_h02_a_client_that_has_spoken_may_be_gone(
    spoken: bool, failure: type[OSError] | None
) -> None:
    """What it has sent is for the program: it gets the connection.

    ResourceClosedError: it has aborted, and that has closed the connection id.
    """
    request = Request(None if failure is None else failure(104, "gone"))
    confirmed = confirm(request, spoken=spoken)
    if failure is None or (spoken and failure is not ConnectTimeoutError):
        await confirmed
    else:
        with pytest.raises(failure):
            await confirmed
