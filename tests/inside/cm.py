"""Private parts of aiordma/cm/ that tests ask for."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from aiordma.cm import ConnectionEvent, EventChannel, connection_id, event_channel

if TYPE_CHECKING:
    import pytest


def kept_of(events: EventChannel) -> Sized:
    """The requests to connect that wait to be asked for."""
    return events._kept


def publish(events: EventChannel, event: ConnectionEvent) -> None:
    """As if the connection manager had said so."""
    events._publish(event)


def enroll(events: EventChannel, connection_id: Any) -> int:
    """Have the events with this number go to a connection id."""
    return events._enroll(connection_id)


def set_short_pause(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """For how long a channel takes no events after it has found no memory."""
    patch.setattr(event_channel, "_SHORT_PAUSE_S", seconds)


def set_confirmation(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """For how long the confirmation of an accepted connection is waited for."""
    patch.setattr(connection_id, "_CONFIRMATION_S", seconds)
