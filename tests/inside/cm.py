"""Private parts of aiordma/cm/ that tests ask for."""

from __future__ import annotations

from collections.abc import Sized

from aiordma.cm import ConnectionEvent, EventChannel


def kept_of(events: EventChannel) -> Sized:
    """The requests to connect that wait to be asked for."""
    return events._kept


def publish(events: EventChannel, event: ConnectionEvent) -> None:
    """As if the connection manager had said so."""
    events._publish(event)
