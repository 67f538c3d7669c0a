"""What tests look at inside the library, by its private names: here, and each once.

A test asks by these functions, so that a change inside the library changes one line here.
tools/house.py counts the private names that are left elsewhere.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

from aiordma import Connection, ConnectionEvents, Listener, Message, RdmaServer
from aiordma._core import MessageState, QueueState
from aiordma.cm import ConnectionEvent, EventChannel
from aiordma.endpoint.large import Exposer, Fetcher
from aiordma.endpoint.link import Link
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.slots import Slots
from aiordma.link.acceptor import Acceptor
from aiordma.link.admission import Places
from aiordma.loop.pump import FdPump
from aiordma.memory.budget import Share, SlotBudget
from aiordma.streams.stream_port import StreamPort
from aiordma.verbs import (
    AsyncEvent,
    CompletionChannel,
    CompletionQueue,
    MemoryRegion,
    SharedReceiveQueue,
    async_event,
)
from aiordma.verbs.resource import Resource


def handle_of(resource: Resource) -> Any:
    """The C object, if the resource is open."""
    return resource._require()


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


def is_quiet(connection: Connection) -> bool:
    """Whether its completion queue is armed for solicited completions only."""
    return connection._link.completions._quiet


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


def port_of(transport: object) -> StreamPort:
    """What a stream stands on."""
    return cast("StreamPort", cast("Any", transport)._port)


def _side_of(end: Connection | Link | StreamPort) -> Link | StreamPort:
    return link_of(end) if isinstance(end, Connection) else end


def queue_of(end: Connection | Link | StreamPort) -> CompletionQueue:
    """Its completion queue."""
    return _side_of(end).completions.cq


def channel_of(end: Connection | Link | StreamPort) -> CompletionChannel:
    """The completion channel of its loop."""
    return _side_of(end).completions._channel


def acceptor_of(server: Listener | RdmaServer) -> Acceptor:
    """What admits its clients."""
    return server._acceptor


def active_of(server: RdmaServer) -> int:
    """How many of its connections there are."""
    return len(server._clients)


def tls_places_of(server: RdmaServer) -> Places:
    """The places of clients that turn to TLS."""
    return server._tls_places


def state_of_queue(cq: CompletionQueue) -> QueueState:
    """What C knows of a completion queue."""
    return cq._aio


def promised(cq: CompletionQueue) -> int:
    """The completions that are expected of a queue at most."""
    return cq._promised


# Events of a device


def token_of(queue: CompletionQueue | SharedReceiveQueue) -> int:
    """The number by which events of the device find a queue."""
    return queue._token


def tell(token: int, event: AsyncEvent) -> None:
    """As if the device had said so of a queue."""
    async_event._tell_queue(token, event)


def forget_queue(queue: CompletionQueue | SharedReceiveQueue) -> None:
    """Events of the device find it no more."""
    async_event._queues.pop(token_of(queue))


def known_queues() -> list[Any]:
    """The queues that events of a device can find."""
    return list(async_event._queues.values())


def subscriptions() -> list[Any]:
    """The iterators over events of a device."""
    return async_event._subscriptions


# Channels


def kept_of(events: EventChannel) -> Sized:
    """The requests to connect that wait to be asked for."""
    return events._kept


def publish(events: EventChannel, event: ConnectionEvent) -> None:
    """As if the connection manager had said so."""
    events._publish(event)


def pump_of(channel: CompletionChannel) -> FdPump:
    """What has the channel read by the loop."""
    assert channel._pump is not None
    return channel._pump


def safety_of(channel: CompletionChannel) -> Any:
    """The timer of the poll that nothing has asked for."""
    return channel._safety


def poll_for_safety(channel: CompletionChannel) -> None:
    """Poll now, in place of in a second."""
    assert channel._safety is not None
    channel._safety.cancel()
    channel._safety_poll()


# Messages


def is_released(message: Message) -> bool:
    """Whether its memory was given back."""
    return message._released


def exports_of(message: Message) -> int:
    """How many views of its bytes there are."""
    return message._exports
