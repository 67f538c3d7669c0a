"""Private parts of aiordma/verbs/ that tests ask for."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiordma._core import Drain, QueueState
from aiordma.link.shared_queues import SharedQueue, SharedQueues
from aiordma.loop import registry
from aiordma.loop.pump import FdPump
from aiordma.loop.weak import living
from aiordma.verbs import (
    CompletionChannel,
    CompletionQueue,
    Context,
    ExtendedCompletionQueue,
    MemoryRegion,
    PreparedPost,
    QueuePair,
    SharedReceiveQueue,
    WCFields,
    async_event,
    device_memory,
    mr,
    safety,
    slab,
)
from aiordma.verbs.async_event import AsyncEvent
from aiordma.verbs.cq import _Room
from aiordma.verbs.cq_ex import ExtendedCompletion
from aiordma.verbs.resource import Resource, ResourceState
from aiordma.verbs.wc import WCRecord
from aiordma.verbs.work_queue import WorkQueue

if TYPE_CHECKING:
    import pytest


def handle_of(resource: Resource) -> Any:
    """The C object, if the resource is open."""
    return resource._require()


def is_gone(resource: Resource) -> bool:
    """Whether the C object is destroyed."""
    return resource._state is ResourceState.GONE


def destroying_threads(patch: pytest.MonkeyPatch) -> set[str]:
    """The names of the threads that destroy C objects from now on, but small memory regions."""
    threads: set[str] = set()
    real = Resource._finish

    def finish(resource: Resource) -> None:
        if not isinstance(resource, MemoryRegion):
            threads.add(threading.current_thread().name)
        real(resource)

    patch.setattr(Resource, "_finish", finish)
    return threads


def state_of_queue(cq: CompletionQueue) -> QueueState:
    """What C knows of a completion queue."""
    return cq._aio


def promised(cq: CompletionQueue) -> int:
    """The completions that are expected of a queue at most."""
    return cq._room.promised


def expected(cq: CompletionQueue) -> int:
    """The completions that may arrive with the slots that are there now."""
    return cq._room.expected - (cq.left if isinstance(cq, SharedQueue) else 0)


class RingOnly(SharedQueue):
    """A shared queue without an adapter: the completions that it has room for, and holds."""

    def __init__(self, shared: SharedQueues, size: int, most: int) -> None:
        self.shared = shared
        self.left = 0
        self._error = None
        self._room = _Room(size, most)
        self.held = 0

    def _resize(self, cqe: int) -> None:
        if cqe > self._room.most:
            raise OSError(errno.EINVAL, "above the device's limit")
        self._room.size = cqe

    @property
    def size(self) -> int:
        """Completions that it has room for."""
        return self._room.size

    def promise(self, depth: int, expected: int) -> None:
        """As a new queue pair does."""
        self._promise(depth, expected)

    def expect(self, more: int) -> None:
        """As a queue pair does that gets more slots."""
        self._expect(more)

    def gone(self, depth: int, expected: int) -> None:
        """As a queue pair does that is destroyed."""
        self._unpromise(depth, expected)


def promise_nothing(patch: pytest.MonkeyPatch) -> None:
    """Have the room in completion queues not counted, so that a queue can overrun."""
    for name in ("_promise", "_unpromise"):
        patch.setattr(CompletionQueue, name, lambda cq, *completions: None)


def untaken(cq: CompletionQueue) -> int:
    """How many drained completions the program has not taken."""
    return len(cq._queue)


# Events of a device


def token_of(queue: CompletionQueue | SharedReceiveQueue | QueuePair) -> int:
    """The number by which events of the device find a queue."""
    return next(token for token, known in async_event._queues.items() if known() is queue)


def read_device_events(context: Context) -> None:
    """Have the loop read the events of a device, as if its descriptor were readable."""
    entries = registry._entries_of(asyncio.get_running_loop())
    entries["async_events", id(context)].shared._pump.kick()


def tell(token: int, event: AsyncEvent) -> None:
    """As if the device had said so of a queue."""
    async_event._tell_queue(token, event)


def forget_queue(queue: CompletionQueue | SharedReceiveQueue) -> None:
    """Events of the device find it no more."""
    async_event._queues.pop(token_of(queue))


def known_queues() -> list[Any]:
    """The queues that events of a device can find."""
    return living(async_event._queues.copy().values())


def subscriptions() -> list[Any]:
    """The iterators over events of a device."""
    return async_event._subscriptions


# Completion channels


def pump_of(channel: CompletionChannel) -> FdPump:
    """What has the channel read by the loop."""
    assert channel._pump is not None
    return channel._pump


def drain_once(channel: CompletionChannel) -> bool:
    """Drain as the loop does when the descriptor is readable; whether there is more."""
    return channel._on_readable()


def safety_of(channel: CompletionChannel) -> Any:
    """The timer after which completions without an event count as lost, or None."""
    return channel._safety._verification


def poll_for_safety(channel: CompletionChannel) -> None:
    """Poll now, in place of in a second."""
    assert channel._safety._alarm is not None
    channel._safety._on_alarm()


def poll_for_safety_every(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the alarms that are set from now on poll so often."""
    patch.setattr(safety, "_SAFETY_S", seconds)


def poll_an_idle_channel_every(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the alarms that are set from now on poll so often, and take the channel for idle."""
    patch.setattr(safety, "_SAFETY_S", seconds)
    patch.setattr(safety, "_IDLE_SAFETY_S", seconds)


def watch_again(channel: CompletionChannel) -> None:
    """Set the alarm of the safety poll anew."""
    channel._safety.poll_in(0.0)


# Memory


def holds_on(resource: Resource) -> int:
    """How many objects and requests keep it from being destroyed."""
    return resource._children


def uses_of(region: MemoryRegion) -> int:
    """The operations that keep it registered."""
    return region._registration.uses


def forget_leaked(count: int) -> None:
    """Let go of the memory that could not be deregistered, of so many regions."""
    del mr._leaked[-count:]


def note_regions(patch: pytest.MonkeyPatch, access: int = 0) -> list[MemoryRegion]:
    """The regions that are registered from now on, and give all these rights."""
    found: list[MemoryRegion] = []
    real = MemoryRegion._register

    def registered(region: MemoryRegion, *args: Any) -> None:
        real(region, *args)
        if region.access & access == access:
            found.append(region)

    patch.setattr(MemoryRegion, "_register", registered)
    return found


def count_regions(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that tells how many regions exist of those that are registered from now on."""
    found: list[weakref.ref[MemoryRegion]] = []
    real = MemoryRegion._register

    def registered(region: MemoryRegion, *args: Any) -> None:
        real(region, *args)
        found.append(weakref.ref(region))

    patch.setattr(MemoryRegion, "_register", registered)
    return lambda: sum(ref() is not None for ref in found)


def trust_iova(patch: pytest.MonkeyPatch) -> None:
    """Have every adapter asked for addresses of the program's choice."""
    patch.setattr(mr, "_IGNORES_IOVA", ())


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


# Queue pairs


def change_rules(qp: QueuePair, **rules: Any) -> None:
    """Change what a queue pair refuses by itself."""
    qp._rules = dataclasses.replace(qp._rules or qp._choose_rules(), **rules)


def end_flush_grace(qp: QueuePair) -> None:
    """As if the time were over in which the adapter has to flush a queue pair in error."""
    for queue in qp._queues or ():
        queue.give_up()


def on_first_failure(qp: QueuePair, call: Callable[[BaseException], None]) -> None:
    """Have the first cause of its failure told to a function."""
    qp._on_first_failure = call


def last_receive_of(qp: QueuePair) -> threading.Event:
    """Set by the adapter's report that it has taken the last receive of a shared queue."""
    assert qp._last_receive is not None
    return qp._last_receive


def set_executions(post: PreparedPost, count: int) -> None:
    """As if a prepared list of a single request had been executed so often, and completed."""
    post._c.executions = count
    (entry,) = post._entries
    entry.retired = count


def awaits_low_water(srq: SharedReceiveQueue) -> bool:
    """Whether a task waits for a low number of receives."""
    return bool(srq._marks)


def extended_completion(fields: WCFields, record: WCRecord, extra: Any) -> ExtendedCompletion:
    """The completion that an extended queue with these fields makes of what C has polled."""
    queue: Any = SimpleNamespace(fields=fields, _extra=extra)
    completion = ExtendedCompletionQueue._completion(queue, record, None)
    assert isinstance(completion, ExtendedCompletion)
    return completion


def export_by(patch: pytest.MonkeyPatch, function: Callable[[int, int], tuple[int, int]]) -> None:
    """Have another function make dmabufs of a GPU's memory."""
    patch.setattr(device_memory, "_export", function)


def export_by_cuda(address: int, nbytes: int) -> tuple[int, int]:
    """As the library does by default."""
    return device_memory._export_cuda(address, nbytes)


def kept_by(region: MemoryRegion) -> object:
    """The object whose memory a region has registered."""
    keep: object = region._keep
    return keep


def moves(qp: QueuePair) -> bool:
    """Whether a thread makes a change of its state."""
    return qp._moving is not None and qp._moving.under_way


def steps_of_an_alarm() -> list[str]:
    """What the alarm of an idle channel does, in order, if C has polled a completion by then."""
    steps: list[str] = []
    own = SimpleNamespace(events=0, spins=False)

    class Queue:
        managed, closed, _token, _aio = True, False, 7, own

    queue: Any = Queue()
    queues: Any = weakref.WeakValueDictionary({7: queue})

    class Channel:
        drain, _cqs, _home, _failure = Drain(0, 4), queues, None, None

        def _kick(self) -> None:
            steps.append("takes events")

        def _sweep(self, _: object, polled: Any) -> tuple[int, int, int]:
            steps.append(f"dispatches {polled}")
            return 1, 0, 1

    channel: Any = Channel()
    poll: Any = safety.Safety(channel)
    poll._poll = SimpleNamespace(
        take=lambda: [(7, 0, "what C has")], new_events=lambda: 0, expect_calm=lambda _: None
    )
    poll._verification = SimpleNamespace(run=lambda: steps.append("verifies"))
    poll._on_alarm()
    return steps
