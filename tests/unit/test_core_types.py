"""The compiled types: what no program should do to them, memory that is out, interpreters."""

from __future__ import annotations

import asyncio
import gc
import importlib
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
from aiordma._ffi import fast, ffi, lib
from aiordma._ffi.fast import Owner, Parked, Readable, Reader, Registration
from aiordma.endpoint.connection import Connection
from aiordma.loop.running import from_finalizer
from aiordma.verbs import SGE, MemoryRegion
from aiordma.verbs.sinks import Sinks

from .conftest import LIMIT_S, Run, settle
from .fake_resource import Fake, fresh
from .operating import Place
from .test_mail_waiting import Side
from .test_memory_region import Lib, c
from .test_wakeup import called_by_the_loop

__all__ = ["c", "fresh"]

#: Of CPython's own tests: allocations that fail, and interpreters.
_testcapi: Any = importlib.import_module("_testcapi")
_ROOT = Path(aiordma.__file__).parents[1]
TYPES = (
    "CMEvents",
    "Mail",
    "Parked",
    "Readable",
    "Reader",
    "Registration",
    "StreamCalls",
    "Wakeup",
)


@contextmanager
def no_memory_at(number: int) -> Iterator[None]:
    """The allocation with this number, and only that, fails."""
    # Python 3.13 crashes where it cannot note where a coroutine was made.
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


def test_a07_a_subinterpreter_is_refused() -> None:
    """And the main interpreter has lost nothing by it."""
    done = run_python(
        "import gc, _testcapi\n"
        "from aiordma._ffi.fast import Message\n"
        "before = Message(memoryview(b'abc'))\n"
        "code = '''if True:\n"
        "    try:\n"
        "        import aiordma._ffi._fast\n"
        "    except ImportError as exc:\n"
        "        print('refused:', exc, flush=True)\n"
        "'''\n"
        "assert _testcapi.run_in_subinterp(code) == 0\n"
        "gc.collect()\n"
        "assert Message(memoryview(b'abc')) == before\n"
        "print('alive')\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused: aiordma cannot be used in a subinterpreter", "alive",
    ]  # fmt: skip


def test_a07_who_imports_it_again_gets_the_same_types() -> None:
    name = "aiordma._ffi._fast"
    before = sys.modules.pop(name)
    try:
        again = importlib.import_module(name)
        assert again.Message is fast.Message
        message = again.Message(memoryview(b"abc"))
        assert message == fast.Message(memoryview(b"abc"))
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
            self._link, self._receiver = link, cast("Any", Receiver(link))

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
    import ctypes

    sweep_type = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
    )
    seen: list[Any] = []

    def sweep(drain: int, cq: int, wcs: int, room: int) -> int:
        seen.append((drain, cq, wcs, room))
        return 7

    call = sweep_type(sweep)
    address = ctypes.cast(call, ctypes.c_void_p).value
    assert address
    # A function of the interpreter's own kind may only be called with the lock: PYFUNCTYPE does
    # not take it, so that this crashes if the sweep has given it away.
    reader = Reader(16, 32, 5, 0, address, ())
    assert reader.sweep(48) == 7
    assert seen == [(16, 48, 32, 5)]


# ---- A9: memory that is drained --------------------------------------------------------------


def test_a09_a_reader_keeps_the_memory_that_it_drains() -> None:
    drain = ffi.new("struct aio_drain *")
    sinks = Sinks(drain, 16)
    memory = (drain, sinks.memory)
    reader = Reader(int(ffi.cast("uintptr_t", drain)), 0, 16, 0, 0, memory)
    sinks.reader = reader
    gone = weakref.ref(sinks.ready), weakref.ref(drain)
    lane = ffi.new("struct aio_sink *")
    sinks.add(100, lane, lambda news: None)  # more than there was room for
    larger = weakref.ref(sinks._sinks)
    del sinks, memory, drain
    gc.collect()
    assert all(reference() is not None for reference in (*gone, larger))
    del reader
    gc.collect()
    assert all(reference() is None for reference in (*gone, larger))


def test_a09_a_channel_that_goes_while_it_is_drained_is_not_drained_on() -> None:
    import ctypes

    run_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    rounds: list[int] = []
    drain = ffi.new("struct aio_drain *")
    ready = ffi.new("uint32_t[]", [0 | 1 << 24])
    drain.ready = ready

    def run(*_: int) -> int:
        rounds.append(1)
        drain.n_ready = 1
        return 1 << 16 | 1 << 29  # one has news, and ask again

    call = run_type(run)
    address = ctypes.cast(call, ctypes.c_void_p).value
    assert address
    reader = Reader(int(ffi.cast("uintptr_t", drain)), 0, 4, address, 0, (drain, ready, call))

    def close(news: int) -> None:
        reader.stopped = True

    reader.own(0, close)
    Readable(reader, lambda: pytest.fail("it was simple")).run()
    assert len(rounds) == 1


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
        let_go = Fake._let_go
        failures = [RuntimeError("can't start new thread")]

        def refuse(region: Any, *args: Any) -> None:
            if isinstance(region, MemoryRegion) and failures:
                let_go(region, *args)
                raise failures.pop()
            let_go(region, *args)

        monkeypatch.setattr(MemoryRegion, "_let_go", refuse, raising=False)
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
        side.by_c(b"one")
        side.by_c(b"two")
        if queued:  # Python takes what C has
            side.lane.rare = True
        received: list[Any] = [None]  # which takes a message without memory

        async def recv() -> None:
            received[0] = await Connection.recv(cast("Connection", side))

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
        assert len(side.link.posted) + side.lane.n_back == side.link.recv.count, "a slot is lost"

    run(main())


# ---- A12 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_a12_an_object_that_was_not_made_cannot_be_had(name: str) -> None:
    made: Any = getattr(fast, name)
    with pytest.raises(TypeError):
        made.__new__(made)
    with pytest.raises(TypeError):
        made()


def test_a12_an_owner_that_was_not_made_is_of_no_use() -> None:
    owner: Any = Owner.__new__(Owner)
    for use in (owner._require, owner._retain, lambda: owner._let_go(Owner.__new__(Owner))):
        with pytest.raises((AttributeError, KeyError)):
            use()
    assert owner.closed
    assert Owner.__new__(Owner)._made == {}


def test_a12_a_message_that_was_not_made_has_no_bytes() -> None:
    message: Any = fast.Message.__new__(fast.Message)
    with pytest.raises(ValueError, match="released"):
        bytes(message)
    message.release()
    assert (message == b"") is False
    assert len(message) == 0


def test_a12_a_registration_does_not_outlive_its_region(run: Run, c: Lib) -> None:
    async def main() -> None:
        place = Place()

        class Short:
            """A region that has gone, of which a registration is left."""

        region = Short()
        left = Registration(4096, 1, 7, place.pd, region)
        holder = type("Holder", (), {"_registration": left})()
        posted = place.end.mail.operate(-1, 4, 4096, 64, 1 << 40, 77, 0, 0, holder)
        assert isinstance(posted, fast.Operation)
        place.end.complete()
        place.end.tell()
        del region, posted
        gc.collect()
        if gone := place.end.mail.operate(-1, 4, 4096, 64, 1 << 40, 77, 0, 0, holder):
            pytest.fail(f"posted for a region that has gone: {gone}")
        with pytest.raises(RuntimeError, match="no operation"):
            left.leave()
        await place.close()

    run(main())


def test_a12_one_parked_is_for_one_mail(run: Run) -> None:
    async def main() -> None:
        parked = Parked(asyncio.get_running_loop())
        fast.Mail(0, 0, 0, 0, 0, cast("Any", object()), parked)
        gc.collect()
        kept = fast.Mail(0, 0, 0, 0, 0, cast("Any", object()), parked)
        with pytest.raises(ValueError, match="another Mail"):
            fast.Mail(0, 0, 0, 0, 0, cast("Any", object()), parked)
        del kept

    run(main())


def test_a12_a_child_that_is_not_made_is_not_counted() -> None:
    """Wherever memory is out: the parents wait for no child that there is not."""
    first, second = Fake("first"), Fake("second")
    made = None
    failed = 0
    for number in range(300):
        try:
            with no_memory_at(number):
                made = Owner.__new__(_Child)
                cast("Any", made).__init__("handle", (first, second))
        except MemoryError:
            failed += 1
            made = None
            gc.collect()
            assert (first._children, second._children) == (0, 0), number
            assert not first._made
            assert not second._made
        else:
            break
    assert failed > 0
    assert made is not None
    assert (first._children, second._children) == (1, 1)
    made.close()
    first.close()
    second.close()


class _Child(Fake):
    __slots__ = ()

    def __init__(self, handle: Any, parents: tuple[Any, ...]) -> None:
        self.busy = False
        Owner.__init__(self, handle, parents)

    def _destroy(self, handle: Any) -> None:
        """There is nothing."""


def test_a12_a_parent_that_is_none_is_refused_and_leaves_nothing() -> None:
    first = Fake("first")
    child = Owner.__new__(_Child)
    with pytest.raises(TypeError, match="a parent is a Resource"):
        Owner.__init__(child, "handle", (first, cast("Any", object())))
    assert first._children == 0
    assert child._state.value == "gone"
    first.close()


def test_a12_shifts_and_copies_are_defined() -> None:
    """UBSan says more; here the numbers."""
    assert lib.aio_crc32c(0, ffi.NULL, 0) == 0
    drain = ffi.new("struct aio_drain *")
    reader = Reader(int(ffi.cast("uintptr_t", drain)), 0, 4, 0, 0, drain)
    reader.keep()  # nothing, into no memory
    assert reader.untold == 0
