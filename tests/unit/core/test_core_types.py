"""The compiled types: what no program should do to them, memory that is out, interpreters."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import importlib.util
import os
import runpy
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import aiordma
from aiordma import _core
from aiordma._core import Drain, MessageState, Readable, Registration, StreamState
from aiordma._ffi import ffi
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.wire import FrameKind
from aiordma.loop.running import from_finalizer
from aiordma.verbs import SGE, MemoryRegion
from aiordma.verbs.resource import Resource
from tests.inside.core import (
    children_of,
    fail_after_letting_go,
    made_of,
)

from ..conftest import LIMIT_S, Run, settle
from ..endpoint.fabric import LeftToPython, new_state
from ..endpoint.operating import Place
from ..verbs.fake_resource import Fake, fresh
from ..verbs.test_memory_region import Lib, c
from .completing import SIZES, context_with
from .fake_verbs import Adapter
from .test_message_waiting import Side
from .test_wakeup import called_by_the_loop

__all__ = ["c", "fresh"]

#: Of CPython's own tests: allocations that fail, and interpreters.
_testcapi: Any = importlib.import_module("_testcapi")
NOWHERE: Any = None  # a loop that is asked for nothing
_ROOT = Path(aiordma.__file__).parents[1]
TYPES = (
    "CMEvents",
    "Drain",
    "MessageState",
    "ReceiveWakeup",
    "QueueState",
    "Readable",
    "Registration",
    "SafetyPoll",
    "StreamState",
    "Wakeup",
)


@contextmanager
def no_memory_at(number: int) -> Iterator[None]:
    """The allocation with this number, and only that, fails."""
    # What is tested is our memory; Python's own notes of where a coroutine was made are left out.
    depth = sys.get_coroutine_origin_tracking_depth()
    sys.set_coroutine_origin_tracking_depth(0)
    _testcapi.set_nomemory(number, number + 1)
    try:
        yield
    finally:
        _testcapi.remove_mem_hooks()
        sys.set_coroutine_origin_tracking_depth(depth)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which may crash."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S * 3,
        env=environment, check=False,
    )  # fmt: skip


# ---- A7: interpreters -----------------------------------------------------------------------

_REFUSED = (
    "refused: aiordma cannot be used in a subinterpreter: its compiled types belong to the main "
    "interpreter. Use a thread, or a process of its own"
)


def test_a07_a_subinterpreter_is_refused() -> None:
    """And the main interpreter has lost nothing by it."""
    done = run_python(
        "import gc, _testcapi\n"
        "from aiordma._core import Message\n"
        "before = Message(memoryview(b'abc'))\n"
        "code = '''if True:\n"
        "    try:\n"
        "        import aiordma._core._compiled\n"
        "    except ImportError as exc:\n"
        "        print('refused:', exc, flush=True)\n"
        "'''\n"
        "assert _testcapi.run_in_subinterp(code) == 0\n"
        "gc.collect()\n"
        "assert Message(memoryview(b'abc')) == before\n"
        "print('alive')\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [_REFUSED, "alive"]


#: The modules of subinterpreters: 3.14 and later have a public one.
_INTERPRETERS = (
    "concurrent.interpreters", "_interpreters", "_xxsubinterpreters",
)  # fmt: skip


def subinterpreter(code: str) -> str:
    """A program that runs code in a subinterpreter, in the way of this Python."""
    name = next(name for name in _INTERPRETERS if importlib.util.find_spec(name))
    if name == "concurrent.interpreters":
        return (
            "from concurrent import interpreters\n"
            "inner = interpreters.create()\n"
            f"inner.exec({code!r})\n"
            "inner.close()\n"
        )
    run = "run_string" if name == "_xxsubinterpreters" else "exec"
    return (
        f"import {name} as interpreters\n"
        "inner = interpreters.create()\n"
        f"failed = interpreters.{run}(inner, {code!r})\n"
        "assert failed is None, failed\n"
        "interpreters.destroy(inner)\n"
    )


@pytest.mark.parametrize("package", ["aiordma", "aiordma.verbs"])
def test_a_program_in_a_subinterpreter_is_told_so(package: str) -> None:
    """The import fails with a sentence, and not much later with one about missing libraries."""
    code = f"""if True:
        try:
            import {package}
        except ImportError as exc:
            print('refused:', exc, flush=True)
    """
    done = run_python(f"import aiordma\n{subinterpreter(code)}print('alive')\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [_REFUSED, "alive"]


def test_a07_who_imports_it_again_gets_the_same_types() -> None:
    name = "aiordma._core._compiled"
    before = sys.modules.pop(name)
    try:
        again = importlib.import_module(name)
        assert again.Message is _core.Message
        message = again.Message(memoryview(b"abc"))
        assert message == _core.Message(memoryview(b"abc"))
    finally:
        sys.modules[name] = before


def test_a07_setup_refuses_a_free_threaded_python(monkeypatch: pytest.MonkeyPatch) -> None:
    known = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else known(name)
    )
    monkeypatch.setattr(sys, "argv", ["setup.py", "--name"])
    with pytest.raises(SystemExit, match="a free-threaded Python is not supported"):
        runpy.run_path(str(_ROOT / "setup.py"))


# ---- A8: threads ----------------------------------------------------------------------------


def test_a08_finalizers_leave_to_the_loop_what_is_its(run: Run) -> None:
    async def main() -> None:
        loop, calls = asyncio.get_running_loop(), list[int]()

        def call() -> None:
            calls.append(threading.get_ident())

        from_finalizer(loop, call)
        assert calls == [threading.get_ident()], "at once"
        thread = threading.Thread(target=from_finalizer, args=(loop, call))
        thread.start()
        thread.join(LIMIT_S)
        assert len(calls) == 1
        await settle()
        assert calls == [threading.get_ident()] * 2

    run(main())
    calls: list[int] = []
    closed = asyncio.new_event_loop()
    closed.close()
    from_finalizer(closed, lambda: calls.append(1))
    assert calls == [1]


def test_a08_a_connection_that_another_thread_collects_ends_in_its_loop(run: Run) -> None:
    class Link:
        closed = False

        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()
            self.threads: list[int] = []

        def close(self) -> None:
            self.closed = True
            self.threads.append(threading.get_ident())

    class Receiver:
        def __init__(self, link: Link) -> None:
            self.drop_all = link.close

    class Left(Connection):
        def __init__(self, link: Any) -> None:
            receiver: Any = Receiver(link)
            self._link, self._receiver = link, receiver

        def __repr__(self) -> str:
            return "<Left>"

    async def main() -> None:
        link = Link()
        found: list[Any] = [Left(link)]
        found.append(found)
        del found

        def collect() -> None:
            thread = threading.Thread(target=gc.collect)
            thread.start()
            thread.join(LIMIT_S)

        with pytest.warns(ResourceWarning, match="unclosed <Left>"):
            collect()
        await settle()
        assert link.threads == [threading.get_ident()] * 2

    run(main())


def test_a08_a_sweep_keeps_the_interpreter_lock() -> None:
    """Another thread that is ready to run does not, until the sweep is over."""
    poll_type = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    seen: list[Any] = []

    def poll(cq: int, room: int, wcs: int) -> int:
        seen.append((cq, room))
        return 0

    call = poll_type(poll)
    # A function of the interpreter's own kind may only be called with the lock: PYFUNCTYPE does
    # not take it, so that this crashes if the sweep has given it away.
    context = context_with(poll=call)
    cq = ffi.new("struct ibv_cq *")
    cq.context = ffi.cast("struct ibv_context *", ctypes.addressof(context))
    address = int(ffi.cast("uintptr_t", cq))
    assert Drain(0, 5).sweep(address) == (0, 0, [], False)
    assert seen == [(address, 5)]


# ---- A9: memory that is drained --------------------------------------------------------------


class Receiver:
    """What a state keeps."""


def state_with(receiver: Any) -> MessageState:
    config = ConnectionConfig(raw=True, recv_depth=4)
    state = new_state(config, None, config.receives, 1)
    state.set_receiver(receiver)
    return state


def test_a09_a_drain_keeps_the_states_that_it_hands_completions_to() -> None:
    drain = Drain(0, 16)
    receivers = [Receiver() for _ in range(2)]
    gone = [weakref.ref(receiver) for receiver in receivers]
    for index, receiver in zip((0, 100), receivers, strict=True):  # more than there was room for
        drain.add(index, state_with(receiver), lambda events: None)
    del receiver, receivers
    gc.collect()
    assert all(reference() is not None for reference in gone)
    assert drain.n_states == 2
    drain.remove(0)
    assert [reference() is None for reference in gone] == [True, False]
    drain.remove(5)  # that never was
    drain.remove(1 << 20)
    del drain
    assert gone[1]() is None


def test_a09_a_drain_and_an_owner_that_leads_to_it_are_collected() -> None:
    drain = Drain(0, 16)
    receiver: Any = Receiver()
    receiver.drain = drain
    drain.add(3, state_with(receiver), receiver)
    gone = weakref.ref(drain), weakref.ref(receiver)
    del drain, receiver
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a09_a_channel_that_goes_while_it_is_drained_is_not_drained_on() -> None:
    told: list[int] = []
    with Adapter() as adapter:
        queue, drain = adapter.queue(late=True), adapter.drain
        state = state_with(None)
        state.await_arrival(True)
        arrival = _core.SUB_RECV << _core.SUB_SHIFT

        def close(events: int) -> None:
            told.append(events)
            state.skip()
            queue.complete(arrival)
            drain.stop()

        drain.add(0, state, close)
        queue.complete(arrival)
        Readable(drain, lambda: pytest.fail("it was simple")).run()
        assert told == [_core.EVENT_ARRIVED]
        assert queue.waiting


# ---- A10, A11: what fails half-way -----------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a10_a_transfer_ends_although_its_memory_cannot_be_let_go(
    run: Run, c: Lib, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    async def main() -> None:
        place = Place()
        task = asyncio.create_task(place.end.read(SGE(place.region, 0, 64)))
        other = asyncio.create_task(place.end.read(SGE(place.region, 64, 64)))
        await settle()
        place.region.close()
        if not waits:
            task.cancel()
            await settle()
        failures: list[Exception] = [RuntimeError("can't start new thread")]
        fail_after_letting_go(monkeypatch, MemoryRegion, failures)
        place.end.complete()

        def tell() -> None:
            with pytest.raises(RuntimeError, match="new thread"):
                place.end.tell()

        await called_by_the_loop(tell)
        async with asyncio.timeout(LIMIT_S / 4):
            assert await other == 64
            if waits:
                assert await task == 64
        await place.close()

    run(main())


@pytest.mark.parametrize("queued", [False, True])
def test_a11_no_message_is_lost_for_want_of_memory(run: Run, queued: bool) -> None:
    async def main() -> None:
        side = Side()
        side.arrives(b"one")
        side.arrives(b"two")
        side.state.delegate(queued)  # Python takes what C has
        received: list[Any] = [None]  # which takes a message without memory

        async def recv() -> None:
            received[0] = await side.whole()

        failed = 0
        for expected in (b"one", b"two"):
            received[0] = None
            for number in range(200):
                coroutine = recv()
                try:
                    with no_memory_at(number):
                        coroutine.send(None)
                except (MemoryError, StopIteration):
                    failed += received[0] is None
                coroutine.close()
                if received[0] is not None:
                    break
            assert bytes(received[0]) == expected
            received[0].release()
        assert failed > 0
        await settle()
        assert len(side.link.ready) + side.state.facts()["n_back"] == side.link.slots.recv.count, (
            "a slot is lost"
        )

    run(main())


# ---- A12 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_a12_an_object_that_was_not_made_cannot_be_had(name: str) -> None:
    made: Any = getattr(_core, name)
    with pytest.raises(TypeError):
        made.__new__(made)
    with pytest.raises(TypeError):
        made()


def test_a12_a_message_that_was_not_made_has_no_bytes() -> None:
    message: Any = _core.Message.__new__(_core.Message)
    with pytest.raises(ValueError, match="released"):
        bytes(message)
    message.release()
    assert (message == b"") is False
    assert len(message) == 0


def test_a12_a_registration_counts_no_use_that_has_not_begun() -> None:
    with pytest.raises(RuntimeError, match="no operation"):
        Registration(4096, 64, 1, 7, None).leave()


def test_a12_a_wait_outlives_what_it_waits_for(run: Run) -> None:
    async def main() -> None:
        config = ConnectionConfig()

        async def wait() -> object:
            state = new_state(config, asyncio.get_running_loop(), config.receives, 1)
            return await state.receiving(LeftToPython())

        task = asyncio.create_task(wait())
        await settle()
        gc.collect()
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(main())


def sizes(**settings: int) -> dict[str, Any]:
    return SIZES | settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"sends": 5},
        {"arrivals": 3},
        {"arrivals": 0},
        {"controls": 5},
        {"exchanges": 4, "answers": 4},
        {"answers": 2},
        {"send_depth": 0x3FFF, "controls": 1},
        {"exchanges": 0x10000, "receives": 0x20000},
        {"send_depth": 0xFFFFFFFF, "sends": 70_000},
        {"controls": 0xFFFFFFFF, "answers": 1},
        {"arrivals": 0x10000},
        {"reads": 0x1001},
    ],
    ids=str,
)
def test_a12_sizes_that_do_not_fit_one_another_are_refused(wrong: dict[str, int]) -> None:
    MessageState(NOWHERE, **sizes())
    with pytest.raises(ValueError, match="do not fit"):
        MessageState(NOWHERE, **sizes(**wrong))


def stream_with(**settings: Any) -> StreamState:
    usual: dict[str, Any] = {
        "ring": (1 << 20, 1, 64), "table": 1 << 21, "send": (1 << 22, 64, 2), "credits": 3,
        "send_depth": 8, "iwarp": False, "inline_size": 0, "memory": None,
    }  # fmt: skip
    return StreamState(**(usual | settings))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ring": (1 << 20, 1, 0)}, {"send": (1 << 22, 0, 2)}, {"credits": 0},
        {"credits": 1 << 16}, {"send_depth": 4}, {"send_depth": 5, "iwarp": True},
        {"send_depth": 1 << 14}, {"send": (1 << 22, (1 << 31) + 1, 2)},
    ],
    ids=str,
)  # fmt: skip
def test_a12_sizes_that_no_stream_has_are_refused(wrong: dict[str, Any]) -> None:
    stream_with()
    with pytest.raises(ValueError, match="no such sizes"):
        stream_with(**wrong)


def test_a12_what_is_not_there_cannot_be_taken_or_given() -> None:
    """Each would read or write beyond an array."""
    other: Any = object()
    state, stream = MessageState(NOWHERE, **sizes()), stream_with()
    too_long = bytes(state.eager_size + 1)
    for call, error in (
        (lambda: state.add_send_slot(4), ValueError),
        (lambda: [*map(state.add_send_slot, (0, 0, 0, 0))], ValueError),
        (lambda: state.send_in_turn(FrameKind.DATA, too_long, 0, None), ValueError),
        (lambda: state.send_in_turn(FrameKind.DATA, cast("Any", "text"), 0, None), TypeError),
        (lambda: state.send_in_turn(FrameKind.DATA, b"", 0, 1 << 64), ValueError),
        (lambda: state.send_control(FrameKind.DATA), ValueError),
        (lambda: state.send_control(len(FrameKind)), ValueError),
        (lambda: state.advance(cast("Any", "CLOSE")), ValueError),
        (lambda: state.advance(cast("Any", 1)), ValueError),
        (lambda: state.add_receives([1 << 16]), ValueError),
        (lambda: state.release_number(0), ValueError),
        (lambda: state.argument(99), ValueError),
        (lambda: state.argument(cast("Any", "ABORT")), TypeError),
        (lambda: state.allow_operations(0, True), ValueError),
        (lambda: state.allow_operations(0x1001, True), ValueError),
        (lambda: [*map(state.allow_operations, (1, 1), (True, True))], ValueError),
        (lambda: state.release_number(0), ValueError),
        (lambda: stream.meet(1, (0, 0, 1), (0, 0, 1), False), ValueError),
        (lambda: stream.meet(1 << 16, (0, 0, 1), (0, 0, 2), False), ValueError),
        (lambda: stream.open(), RuntimeError),
        (lambda: stream.permit(True, True, False, 3), ValueError),
        (lambda: stream.bind(0, 0, 0, 0, 0x8001), ValueError),
        (lambda: stream.seen(), RuntimeError),
        (lambda: stream.wait_for(0), RuntimeError),
        (lambda: stream.grow_after(-1), ValueError),
        (lambda: stream.widen(0, 0, 2), ValueError),
        (lambda: stream.publish(0, bytes(25), 0, 0), ValueError),
        (lambda: Drain(0, 0), ValueError),
        (lambda: Drain(0, 1 << 16), ValueError),
        (lambda: Drain(0, 1).add(0, other, print), TypeError),
        (lambda: Drain(0, 1).add((1 << 24) - 1, state, print), ValueError),
        (lambda: Drain(0, 1).sweep(0), ValueError),
    ):
        with pytest.raises(error):
            call()
    assert state.peek() is None
    state.skip()
    assert state.arrived == 0


def test_a12_a_child_that_is_not_made_is_not_counted() -> None:
    """Wherever memory is out: the parents wait for no child that there is not."""
    first, second = Fake("first"), Fake("second")
    made = None
    failed = 0
    for number in range(300):
        try:
            with no_memory_at(number):
                made = _Child.__new__(_Child)
                _Child.__init__(made, "handle", (first, second))
        except MemoryError:
            failed += 1
            made = None
            gc.collect()
            assert (children_of(first), children_of(second)) == (0, 0), number
            assert not made_of(first)
            assert not made_of(second)
        else:
            break
    assert failed > 0
    assert made is not None
    assert (children_of(first), children_of(second)) == (1, 1)
    made.close()
    first.close()
    second.close()


class _Child(Fake):
    __slots__ = ()

    def __init__(self, handle: Any, parents: tuple[Any, ...]) -> None:
        self.busy = False
        Resource.__init__(self, handle, parents)

    def _destroy(self, handle: Any) -> None:
        """There is nothing."""


def test_a12_shifts_and_copies_are_defined() -> None:
    """UBSan says more; here the numbers."""
    assert _core.crc32c(0, b"") == 0
    room = bytearray(b"abc")
    _core.copy(room, b"")
    _core.copy(room, b"de")
    assert room == b"dec"
    with pytest.raises(ValueError, match="more bytes"):
        _core.copy(room, bytes(4))
    with Adapter(most=4) as adapter:
        # Nothing, into no memory.
        assert adapter.drain.sweep(adapter.queue().address) == (0, 0, [], False)
        assert adapter.drain.undelivered == 0
        adapter.drain.deliver()
