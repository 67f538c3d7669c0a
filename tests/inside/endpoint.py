"""Private parts of aiordma/endpoint/ that tests ask for."""

from __future__ import annotations

from aiordma import Connection, ConnectionEvents
from aiordma._core import MessageState
from aiordma.endpoint.large import Exposer, Fetcher
from aiordma.endpoint.link import Link
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.slots import Slots
from aiordma.memory.budget import Share, SlotBudget
from aiordma.verbs import MemoryRegion


def link_of(connection: Connection) -> Link:
    """What the connection stands on: queue pair, completion queue, memory."""
    return connection._link


def sender_of(connection: Connection) -> Sender:
    """The sending half."""
    return connection._sender


def receiver_of(connection: Connection) -> Receiver:
    """The receiving half."""
    return connection._receiver


def exposer_of(connection: Connection) -> Exposer:
    """The large messages that the peer has not read."""
    return connection._large.exposer


def is_fetching(connection: Connection) -> bool:
    """Whether a large message of the peer was ever announced."""
    return connection._large.fetcher is not None


def fetcher_of(connection: Connection) -> Fetcher:
    """The large messages of the peer that are being read."""
    fetcher = connection._large.fetcher
    assert fetcher is not None, "none was announced"
    return fetcher


def memory_of(connection: Connection) -> set[MemoryRegion]:
    """The regions that it closes at its end."""
    return connection._one_sided.memory


def iterators_of(connection: Connection) -> list[ConnectionEvents]:
    """The iterators over its events that there are."""
    hub = connection._events
    assert hub is not None, "none was asked for"
    return list(hub._iterators)


def says_goodbye(connection: Connection) -> bool:
    """Whether a task says the last word."""
    return connection._goodbye._task is not None


def state_of(connection: Connection) -> MessageState:
    """The state in C."""
    return connection._state


def slots_of(connection: Connection) -> Slots:
    """Its slots."""
    return connection._link.slots


def share_of(connection: Connection) -> Share | None:
    """Its share of a pool of slots, if it has one."""
    return connection._link.slots._share


def budget_of(connection: Connection) -> SlotBudget:
    """The slots of the pool of which it has its own."""
    share = share_of(connection)
    assert share is not None
    return share._budget
