"""Private parts of aiordma/verbs/ that tests ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma.verbs import mr, slab
from aiordma.verbs.work_queue import WorkQueue

if TYPE_CHECKING:
    import pytest

from typing import Any

from aiordma._core import QueueState
from aiordma.loop.pump import FdPump
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


# Completion channels


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


# Memory


def uses_of(region: MemoryRegion) -> int:
    """The operations that keep it registered."""
    return region._registration.uses


def forget_leaked(count: int) -> None:
    """Let go of the memory that could not be deregistered, of so many regions."""
    del mr._leaked[-count:]


def empty_slabs(patch: pytest.MonkeyPatch) -> None:
    """Keep no memory that was freed, until the test is over."""
    patch.setattr(slab, "_shelves", {})
    patch.setattr(slab, "_kept", 0)


def kept_in_slabs() -> int:
    """The bytes of such memory."""
    return slab._kept


# Requests


def last_number_of(queue: WorkQueue) -> int:
    """The id of the request that was posted last."""
    return queue._order[-1].wr_id
