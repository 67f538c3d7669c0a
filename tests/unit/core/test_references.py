"""Pointers of C: the object that keeps each alive, and that nothing is reached once it has gone.

The table is in the head of core.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiordma._core import (
    EVENT_ROOM,
    FOR_PYTHON,
    SUB_OPERATE,
    CMEvents,
    Drain,
    Message,
    MessageState,
    QueuedSend,
    QueueState,
    Readable,
    Registration,
    StreamState,
    Wakeup,
)
from aiordma._ffi import ffi, lib
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.wire import FrameKind
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access, Opcode
from tests.inside.endpoint import set_terms

from ..endpoint.fabric import LeftToPython, new_state
from .completing import SIZES, Completing, QueuePair, completion
from .test_message_state import One, Slots, arrival

_TP_CLEAR = 51  # the number of Py_tp_clear
_NOWHERE = (0, 0, 0, 0)
#: Objects of a type that C keeps for the next, at most (AIO_MOST_SPARE).
MOST_SPARE = 64


class Thing:
    """An object that can be watched."""


class Region:
    """Memory with a registration."""

    def __init__(self, length: int = 64) -> None:
        self._registration = self.registration = Registration(0, length, 1, 7, None)


class Refused(CompletionQueue):
    """A queue whose C object cannot be destroyed."""

    __slots__ = ()

    def __init__(self, state: QueueState) -> None:
        self._aio = state
        self._token = 0

    def end(self) -> None:
        """As the thread does that destroys it."""
        self._destroy(ffi.new("struct ibv_cq *"))


def cleared(*objects: object) -> None:
    """As the cycle collector does it: tp_clear, while other garbage still leads to the object."""
    slot = ctypes.pythonapi.PyType_GetSlot
    slot.restype, slot.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    for thing in objects:
        clear = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(slot(type(thing), _TP_CLEAR))
        assert clear(thing) == 0


def attempt(*calls: Callable[[], object]) -> None:
    """What they do does not matter, as long as they come back."""
    for call in calls:
        try:
            call()
        except Exception:
            continue


def stream(send_depth: int = 16) -> StreamState:
    memory = ffi.new("uint8_t[]", 4096)
    start = int(ffi.cast("uintptr_t", memory))
    return StreamState(
        ring=(start, 1, 1024), table=start + 1024, send=(start + 2048, 1024, 2), credits=8,
        send_depth=send_depth, iwarp=False, inline_size=0, memory=memory,
    )  # fmt: skip


#: Of a connection, when it has parted with it.
RECEIVER = SimpleNamespace(
    on_arrival=lambda starved: None,
    slot_back=lambda *_: None,
    slots=memoryview(bytes(4096)),
    _posted_again=lambda *_: None,
)


def test_a_registration_keeps_the_domain_that_it_is_compared_with() -> None:
    """Another domain at the same address would pass for it."""
    pd = Thing()
    alive = weakref.ref(pd)
    registration = Registration(addr=0, length=64, lkey=1, access=0, pd=pd)
    del pd
    assert alive() is not None
    del registration
    assert alive() is None


def test_a_connection_keeps_its_slots_until_it_is_closed() -> None:
    one, memory = One(), Thing()
    alive = weakref.ref(memory)
    one.state.bind(0, 0, 0, 0, _NOWHERE, _NOWHERE, (0, 0, 0), 0, memory)
    del memory
    gc.collect()
    assert alive() is not None
    one.state.close()
    assert alive() is None


def test_a_closed_connection_uses_neither_queue_pair_nor_slots() -> None:
    """Both are gone: a post, or a byte that is written, would crash."""
    one = One(slot_size=64, recv_depth=8)
    slots = Slots(one.state, 24)
    state = one.state
    assert one.take(slots.lay(0, FrameKind.PING))
    assert one.take(arrival(1, 4))
    slot = state.facts()["free_slots"][-1]
    assert state.remove_send_slot(slot)
    state.allow_operations(4, True)
    region = Region()
    before = slots.sent[:], slots.posted[:]
    slots.qp.handle.context = ffi.NULL  # any post would crash
    set_terms(state, credits=32, eager_size=32)
    state.close()
    state.close()
    assert state.send(b"data", None) == FOR_PYTHON
    waiting = state.send_in_turn(FrameKind.DATA, b"data", 4, None)
    assert isinstance(waiting, QueuedSend)
    assert state.send_control(FrameKind.PING) == 0
    assert state.credit() == 0
    assert (state.release_slot(0), state.repost_slot(0)) == (FOR_PYTHON, FOR_PYTHON)
    assert state.post_read(0, 0, 1, 0, 0, 0) == errno.ENOTCONN
    assert state.post_receives(4) == errno.ENOTCONN
    assert state.operate(0, Opcode.RDMA_READ, 0, 1, 0, 0, 0, 0, region) is None
    assert not one.take(completion(slot))
    state(EVENT_ROOM)
    assert (slots.sent, slots.posted, state.queued) == (*before, 1)


def test_a_closed_stream_does_not_use_its_queue_pair() -> None:
    state = stream()
    rest: list[int] = []
    state.attach(None, None, lambda data, sent: rest.append(sent), None)
    qp = QueuePair(lambda wr: None, lambda wr: None)
    state.bind(qp.address, 0, 0, 0, 0)
    state.meet(100, (0, 0, 100), (0, 0, 2), False)
    state.open()
    state.hold(False)
    assert state.send(b"data") == 4
    write = state.write  # the program may keep it
    qp.handle.context = ffi.NULL
    state.close()
    write(b"data")
    assert rest == [0]
    assert state.probe() == errno.ENOTCONN
    assert (state.send(b"data"), state.announce(True), state.say(0)) == (0, 0, 0)
    assert state.publish(0, b"", 0, 0) == 0
    assert [state.complete_receive(slot, False) for slot in range(8)] == [0] * 8


def test_a_closed_channel_has_no_events() -> None:
    """A handler may close the channel between two events that one reader takes."""
    events = CMEvents(0)
    events.close()
    assert events.next() is None


def test_a_stopped_drain_touches_neither_channel_nor_queue() -> None:
    drain = Drain(1, 4)  # a channel at address 1 would crash
    drain.stop()
    assert drain.drain()
    assert drain.sweep(1) is None


def test_a_queue_that_is_not_destroyed_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events lead to the state, by an address in the C object."""
    state = QueueState(7)
    queue = Refused(state)
    count = sys.getrefcount(state)
    monkeypatch.setattr(lib, "ibv_destroy_cq", lambda handle: errno.EBUSY)
    with pytest.raises(OSError, match="ibv_destroy_cq"):
        queue.end()
    kept = sys.getrefcount(state) - count
    assert kept == 1


def test_an_operation_completes_once() -> None:
    """A forked child may bring a completion twice."""
    config = ConnectionConfig(one_sided_depth=4)
    state = new_state(config, SimpleNamespace(is_running=lambda: True), config.receives, 4)
    qp = QueuePair(lambda wr: None)
    state.bind(qp.address, 0, 0, 0, _NOWHERE, _NOWHERE, (0, 0, 0), 0)
    state.allow_operations(4, True)
    completing = Completing(state)
    region = Region()
    number = state.take_number()
    assert number is not None
    assert state.operate(number, Opcode.RDMA_READ, 0, 1, 0, 0, 0, 0, region) is not None
    for _ in range(6):
        assert completing.take(completion(SUB_OPERATE + number))
    assert completing.take(completion(SUB_OPERATE + number + 1))
    state(completing.events)
    facts = state.facts()
    assert (facts["operating"], facts["n_operations_free"], region.registration.uses) == (0, 4, 0)
    assert facts["bytes_read"] == 1


def test_a_state_that_goes_lets_go_of_the_buffers_of_its_operations() -> None:
    config = ConnectionConfig(one_sided_depth=4)
    state = new_state(config, SimpleNamespace(is_running=lambda: True), config.receives, 4)
    qp = QueuePair(lambda wr: None)
    state.bind(qp.address, 0, 0, 0, _NOWHERE, _NOWHERE, (0, 0, 0), 0)
    state.allow_operations(4, True)
    state.operate_on(Thing, Region, RemoteRegion, None)
    state.listen_for_operations()
    region, into = Region(4096), bytearray(8)
    state.set_bounce(region)
    assert state.read(RemoteRegion(0, 64, 7, Access.REMOTE_READ), into, 0) is not None
    with pytest.raises(BufferError):
        into.append(0)
    del state
    into.append(0)
    assert region.registration.uses == 1, "the adapter may still write there"


@contextlib.contextmanager
def collected(kind: type[Any], after: int = 2) -> Iterator[None]:
    """An object of `kind` is garbage, which the collector finds `after` a few allocations."""
    gc.collect()
    cycle = kind()  # of the youngest generation, which is collected first
    cycle.itself = cycle
    del cycle
    before = gc.get_threshold()
    gc.set_threshold(after)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def returned(waiter: Iterator[Any]) -> Any:
    """The result of an awaitable that does not have to wait; None if it has to."""
    try:
        next(waiter)
    except StopIteration as ended:
        return ended.value
    return None


def all_spare_messages() -> list[Any]:
    """Messages, so many that C has no spare one left: the next is allocated."""
    one = One(slot_size=64, recv_depth=2 * MOST_SPARE, raw=True)
    one.state.set_receiver(cast("Any", RECEIVER))
    for slot in range(MOST_SPARE):
        assert one.take(arrival(slot, 1))
    return [one.state.take() for _ in range(MOST_SPARE)]


@pytest.mark.parametrize("ahead", range(4))
@pytest.mark.parametrize("by", ["C", "Python"])
def test_messages_are_dropped_by_a_function_that_the_collector_runs(by: str, ahead: int) -> None:
    """As `abort()` does in a finalizer; the message that is being made is not lost.

    How many allocations come before that of the message depends on the interpreter, so that the
    test makes 0 to 3 others `ahead`.
    """
    one = One(slot_size=64, recv_depth=8, raw=True)
    for slot in range(3):
        assert one.take(arrival(slot, slot + 1))
    state = one.state
    state.set_receiver(cast("Any", RECEIVER))
    dropped: list[int] = []

    class Dropper:
        def __del__(self) -> None:
            while first := state.peek():
                dropped.append(first[1])
                state.skip()

    take, made, spare = state.take, [Thing] * 4, all_spare_messages()
    waiter = state.receiving(LeftToPython()) if by == "C" else iter(())
    message: Any = None
    with collected(Dropper):
        for index in range(ahead):
            made[index] = cast("Any", Thing())
        message = take() if by == "Python" else returned(waiter)
    del spare
    gc.collect()
    lengths = [] if message is None else [len(message)]
    assert sorted(lengths + dropped) == [1, 2, 3]
    assert (state.arrived, state.peek(), state.take()) == (0, None, None)


@pytest.mark.parametrize("ahead", range(4))
def test_a_message_is_not_taken_twice_by_a_function_that_the_collector_runs(ahead: int) -> None:
    """From the allocation of the first message, before it is out of the ring."""
    one = One(slot_size=64, recv_depth=8, raw=True)
    for slot in range(3):
        assert one.take(arrival(slot, slot + 1))
    one.state.set_receiver(cast("Any", RECEIVER))
    taken: list[Any] = []

    class Taker:
        def __del__(self) -> None:
            taken.append(one.state.peek())
            one.state.skip()

    waiter, made = one.state.receiving(LeftToPython()), [Thing] * 4
    spare = all_spare_messages()
    with collected(Taker):
        for index in range(ahead):
            made[index] = cast("Any", Thing())
        message = returned(waiter)
    del spare
    gc.collect()
    lengths = [len(message), *(first[1] for first in taken)]
    while first := one.state.peek():
        lengths.append(first[1])
        one.state.skip()
    assert sorted(lengths) == [1, 2, 3]


def test_messages_that_the_collector_has_cleared_can_be_called() -> None:
    messages = One(slot_size=64, recv_depth=8).state.messages(LeftToPython())
    cleared(messages)
    with pytest.raises(RuntimeError, match="the connection is gone"):
        messages.__anext__()


def test_a_send_in_line_that_ends_with_its_state() -> None:
    """The state lets go of its receiver when it is deallocated, and the receiver of the send."""
    state = MessageState(cast("Any", SimpleNamespace(call_soon=print)), **SIZES)
    receiver: Any = Thing()
    receiver.sending = state.send_in_turn(FrameKind.DATA, b"data", 4, None)
    state.set_receiver(receiver)
    assert isinstance(receiver.sending, QueuedSend)
    gone = weakref.ref(receiver)
    del receiver
    assert state.queued == 1
    del state
    gc.collect()
    assert gone() is None


def test_objects_that_the_collector_has_cleared_can_be_called() -> None:
    """Garbage that is finalized later may still reach them."""
    loop = SimpleNamespace(is_running=lambda: True, call_soon=print)
    wakeup = Wakeup(cast("Any", loop))
    cleared(wakeup)
    attempt(
        lambda: next(wakeup.__await__()),
        lambda: wakeup.add_done_callback(print),
        wakeup.wake_soon,
        wakeup.cancel,
        wakeup.wake,
    )

    state = One(slot_size=64, recv_depth=8).state
    state.allow_operations(4, True)
    assert isinstance(state, MessageState)
    state.set_receiver(cast("Any", RECEIVER))
    state.operate_on(Thing, Region, RemoteRegion, None)
    state.set_bounce(Region(4096))
    state.listen_for_operations()
    remote = RemoteRegion(0, 64, 7, Access.REMOTE_WRITE)
    cleared(state, state.receive_wakeup)
    attempt(
        lambda: state(255),
        lambda: next(state.receiving(LeftToPython())),
        lambda: state.send(b"data", None),
        lambda: state.send_in_turn(FrameKind.DATA, b"data", 4, None),
        lambda: state.operate(0, 0, 0, 1, 0, 0, 0, 0, None),
        lambda: state.ended(0, None),
        lambda: state.read(None, None, 0),
        lambda: state.write(remote, b"data", 0, None),
        lambda: state.write(remote, Region(), 0, None),
        lambda: state.receive_wakeup.cancel(),
        state.take,
    )

    port = stream()
    cleared(port, port.park(cast("Any", loop)))
    attempt(
        lambda: port(255),
        lambda: next(port.take(1, 4).__await__()),
        lambda: port.write(b"data"),
        lambda: port.write(None),
        lambda: port.cut(4),
    )

    drain = Drain(1, 4)
    drain.add(0, state, state)
    readable = Readable(drain, print)
    drain.stop()
    cleared(drain, readable)
    attempt(drain.deliver, drain.drain, lambda: drain.remove(0), readable.run)

    message = Message(memoryview(b"data"), 1, lambda exported: None)
    cleared(message)
    attempt(lambda: bytes(message), lambda: repr(message), lambda: message.imm, message.release)


def parked_of(kind: str) -> tuple[MessageState | StreamState, Wakeup]:
    """A state, and the object that tasks wait on for it."""
    if kind == "messages":
        config = ConnectionConfig(raw=True, recv_depth=4)
        state = new_state(config, None, config.receives, 1)
        return state, state.receive_wakeup
    port = stream()
    return port, port.park(cast("Any", None))


@pytest.mark.parametrize("kind", ["messages", "stream"])
def test_the_method_that_a_task_asks_for_goes_with_the_state(kind: str) -> None:
    state, parked = parked_of(kind)
    method = parked.add_done_callback
    assert parked.add_done_callback is method, "it is made once"
    gc.disable()
    try:
        before = sys.getrefcount(parked)
        del state
        assert parked.add_done_callback is not method
        del method
        assert sys.getrefcount(parked) == before - 2, "of the state, and of the method"
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["messages", "stream"])
def test_the_collector_sees_the_method_that_a_task_asks_for(kind: str) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.state, self.parked = parked_of(kind)
            method: Any = self.parked.add_done_callback
            method(self)

    gone = weakref.ref(Cycle())
    gc.collect()
    assert gone() is None
