"""Private parts of aiordma/datagram/ that tests ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from aiordma.datagram import endpoint
from aiordma.datagram.config import Key
from aiordma.datagram.destinations import Destination, Destinations
from aiordma.datagram.groups import Groups
from aiordma.datagram.port import DatagramOwner
from aiordma.datagram.transport import RdmaDatagramTransport

if TYPE_CHECKING:
    import pytest


async def start(transport: RdmaDatagramTransport, protocol: asyncio.DatagramProtocol) -> None:
    """Begin to receive, as a transport does that has a connection id."""
    await transport._start(protocol)


async def connect(transport: RdmaDatagramTransport, address: tuple[str, int]) -> None:
    """Send to this address only, as `remote_addr` has it."""
    await transport._connect(address)


def callbacks_of(owner: DatagramOwner) -> tuple[Callable[..., None], ...]:
    """What a port calls: a datagram has come, has left; all posts are lost; the end."""
    return owner._on_received, owner._on_sent, owner._on_restarted, owner._on_failed


def unanswered_of(transport: RdmaDatagramTransport) -> int:
    """The bytes that wait for a source to be found."""
    return transport._outbox._unanswered


# Destinations


def set_way(
    patch: pytest.MonkeyPatch, way: Callable[[Destination], Coroutine[Any, Any, None]]
) -> None:
    """Find destinations by a function of the test."""
    patch.setattr(Destinations, "_way", lambda _, destination: way(destination))


def set_ways(
    patch: pytest.MonkeyPatch,
    make: Callable[..., Coroutine[Any, Any, Any]],
    request: Callable[[Destination], Coroutine[Any, Any, None]],
) -> None:
    """Make the address handles of sources, and find services, by functions of the test."""
    patch.setattr(Destinations, "_make", lambda _, *args: make(*args))
    patch.setattr(Destinations, "_request", lambda _, destination: request(destination))


def asked_of(destinations: Destinations) -> Collection[Key]:
    """The services and groups that are known, or looked for."""
    return destinations._asked


def answered_of(destinations: Destinations) -> Collection[Key]:
    """The same, of the sources that are answered."""
    return destinations._answered


def line_of(destinations: Destinations) -> Collection[Destination]:
    """The sources that wait to be looked for."""
    return destinations._line


def sources_of(destinations: Destinations) -> Collection[tuple[bytes, int]]:
    """The senders that are remembered."""
    return destinations._sources


# Names and groups


async def numeric(address: tuple[str, int], name: str, *rest: Any) -> Any:
    """Look an address up."""
    return await endpoint._numeric(address, name, *rest)


def one_of(groups: Groups) -> asyncio.Lock:
    """What is held by the step of a group that is under way."""
    return groups._one


def known_services(transport: RdmaDatagramTransport) -> int:
    """How many services a transport knows by the source of their datagrams."""
    return len(transport._outbox.destinations._services)


def catch_deliveries(patch: pytest.MonkeyPatch, caught: Callable[[BaseException], object]) -> None:
    """Give the exceptions that leave a delivery to a function, in place of the loop."""
    real = RdmaDatagramTransport._deliver

    def deliver(transport: RdmaDatagramTransport) -> None:
        try:
            real(transport)
        except BaseException as exc:
            caught(exc)

    patch.setattr(RdmaDatagramTransport, "_deliver", deliver)
