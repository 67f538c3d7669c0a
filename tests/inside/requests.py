"""Private parts of aiordma/requests/ that tests ask for."""

from __future__ import annotations

import asyncio
from typing import Any

from aiordma import Connection, Request
from aiordma.requests.calls import Calls
from aiordma.requests.exchange import Exchange
from aiordma.requests.served import Served


def exchange_of(connection: Connection) -> Exchange:
    """The requests of a connection that has some."""
    exchange = connection._receiver.exchange
    assert exchange is not None
    return exchange


def held_by(calls: Calls) -> tuple[int, int, int]:
    """Calls with a number, calls that count against the grant, and their bytes."""
    return len(calls._table), calls._table.taken, calls._table.taken_bytes


def is_waiting(calls: Calls, task: asyncio.Task[Any]) -> bool:
    """Whether the task waits for anything but an answer that comes as a message."""
    return task in calls._waits or bool(_places(calls, task))


def _places(calls: Calls, task: asyncio.Task[Any]) -> list[Any]:
    return [place for place in calls._line.places if place[0] is getattr(task, "_fut_waiter", None)]


def expire(calls: Calls, task: asyncio.Task[Any]) -> None:
    """As if the deadline of a task that waits had passed."""
    if task in calls._waits:
        calls._waits[task] = 0.0
    else:
        (place,) = _places(calls, task)
        line = calls._line.places
        line[line.index(place)] = (*place[:2], (0.0, 0.0))
    calls._expire()


def ring(calls: Calls) -> None:
    """As if the timer of all calls had rung."""
    assert calls._alarm is not None
    calls._alarm.cancel()
    calls._expire()


def held_of(served: Served) -> tuple[int, int, int, int]:
    """Numbers that are not answered, requests in line, requests that count, and their bytes."""
    queued = len(served.queue)
    return len(served.numbers), queued, served.taken + queued, served.held


def number_of(request: Request) -> int:
    """The number that the peer gave it."""
    return request._number


def set_number(calls: Calls, number: int) -> None:
    """As if the last request had had this number."""
    calls._table.number_from(number + 1)
