"""Private parts of aiordma/cm/ that tests ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

from aiordma.cm import (
    ConnectionEvent,
    ConnectionId,
    EventChannel,
    connection_id,
    event_channel,
    multicast,
    resolving,
)
from aiordma.cm.address import Address

if TYPE_CHECKING:
    import pytest


def kept_of(events: EventChannel) -> Sized:
    """The requests to connect that wait to be asked for."""
    return events._kept


def publish(events: EventChannel, event: ConnectionEvent) -> None:
    """As if the connection manager had said so."""
    events._publish(event)


def dispatch(events: EventChannel, taken: Any) -> None:
    """Dispatch a taken event."""
    events._dispatch(*taken)


def take_events(cm_id: ConnectionId, sink: Callable[[ConnectionEvent], bool]) -> None:
    """Give the events of an id to a function, which tells whether it has taken an event."""
    cm_id._sink = sink


def after_each_event(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Have a call made after an id has taken an event."""
    real = ConnectionId._on_event

    def on_event(cm_id: ConnectionId, event: ConnectionEvent) -> bool:
        taken = real(cm_id, event)
        call()
        return taken

    patch.setattr(ConnectionId, "_on_event", on_event)


def closing_threads(patch: pytest.MonkeyPatch) -> set[int]:
    """The threads in which a channel gives up its reader and its table from now on."""
    threads: set[int] = set()
    real = EventChannel._on_close

    def on_close(events: EventChannel) -> None:
        threads.add(threading.get_ident())
        real(events)

    patch.setattr(EventChannel, "_on_close", on_close)
    return threads


def before_leaving_groups(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Have a call made before a multicast group is left, in the thread of that call."""
    real = multicast._leave_now

    def leave_now(handle: Any, member: Any) -> None:
        call()
        real(handle, member)

    patch.setattr(multicast, "_leave_now", leave_now)


def enroll(events: EventChannel, connection_id: Any) -> int:
    """Have the events with this number go to a connection id."""
    return events._enroll(connection_id)


def pass_requests_on(events: EventChannel, channel: Any) -> None:
    """Have the ids of the requests that a channel gets belong to another channel."""
    events._requests_go_to = channel


def ends_of(cm_id: ConnectionId) -> tuple[Address | None, Address | None]:
    """The peername and the sockname of an id."""
    return cm_id._ends()


def set_short_pause(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """For how long a channel takes no events after it has found no memory."""
    patch.setattr(event_channel, "_SHORT_PAUSE_S", seconds)


def set_confirmation(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """For how long the confirmation of an accepted connection is waited for."""
    patch.setattr(connection_id, "_CONFIRMATION_S", seconds)


def look_for_ibacm_every(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the presence of ibacm looked up so often, in place of once a second."""
    patch.setattr(resolving, "_FRESH_S", seconds)
