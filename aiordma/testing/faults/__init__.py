"""Faults of RDMA on demand, for tests of what a program does when RDMA misbehaves.

    from aiordma.testing import faults

    with faults.fail("ibv_reg_mr") as fault:
        ...
    assert fault.struck == 1

Each function sets a fault at once, and returns a `Fault`: it is taken back at the end of a `with`
block or by `clear()`.  `docs/faults.md` is the manual.

Theory of operation
    Over the fabric (`docs/fabric.md`) the adapter is a library in this process, which has the
    faults: `fabric_fault_add` and its sisters in `aiordma/testing/fabric/lib/world.c`.  On a device
    a small library (`_shim.c`) is put between the program and rdma-core while there is a fault.  It
    sees all objects of the process, whoever made them: aiordma, pyverbs, a module in C.  What
    happens just before a request is posted (`end_connection` and `kill_peer` with `after`) goes
    through that library on both.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import errno as _errno
import functools
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from aiordma._ffi import ffi, load_error
from aiordma.arguments import check_seconds, whole
from aiordma.endpoint.connection import Connection
from aiordma.errors import NotSupportedError, ResourceClosedError
from aiordma.streams.transport import RdmaTransport
from aiordma.verbs.context import Context
from aiordma.verbs.device import devices

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "CALLS",
    "CALLS_OF_DEVICES",
    "Fault",
    "UnsupportedFault",
    "delay_completions",
    "end_connection",
    "fail",
    "kill_peer",
    "lose_event",
    "packet_loss",
    "partition",
]

#: The calls that `fail` knows on a device.
CALLS_OF_DEVICES: frozenset[str] = frozenset({
    "ibv_alloc_mw", "ibv_alloc_pd", "ibv_attach_mcast", "ibv_bind_mw", "ibv_create_ah",
    "ibv_create_comp_channel", "ibv_create_cq", "ibv_create_qp", "ibv_create_srq", "ibv_modify_qp",
    "ibv_open_device", "ibv_poll_cq", "ibv_post_recv", "ibv_post_send", "ibv_post_srq_recv",
    "ibv_reg_mr", "ibv_req_notify_cq", "rdma_accept", "rdma_bind_addr", "rdma_connect",
    "rdma_create_event_channel", "rdma_create_id", "rdma_disconnect", "rdma_establish",
    "rdma_join_multicast", "rdma_listen", "rdma_reject", "rdma_resolve_addr", "rdma_resolve_route",
})  # fmt: skip
#: Those that it knows over the fabric.
CALLS: frozenset[str] = CALLS_OF_DEVICES | {
    "ibv_close_device", "ibv_get_device_list", "ibv_query_device", "ibv_query_gid",
    "ibv_query_gid_ex", "ibv_query_gid_table", "ibv_query_pkey", "ibv_query_port",
    "ibv_wr_complete", "rdma_reject_ece",
}  # fmt: skip

#: The name of it in both libraries.
_EVENT = "completion event"
#: Of those that go through `ibv_context.ops`, and not through the table of an object.
_OPS = frozenset({
    "ibv_alloc_mw", "ibv_bind_mw", "ibv_poll_cq", "ibv_post_recv", "ibv_post_send",
    "ibv_post_srq_recv", "ibv_req_notify_cq",
})  # fmt: skip
_NS, _MILLION = 1_000_000_000, 1_000_000
_LONGEST_S = 3600.0
_MOST = (1 << 31) - 1
_SHIM = Path(__file__).with_name("_shim.so")
_lock = threading.RLock()


class UnsupportedFault(NotSupportedError):
    """The device of this process cannot have this fault; the text says where it can be had."""


class _Process(Protocol):
    """A process as `subprocess`, `multiprocessing` and `asyncio` have it."""

    @property
    def pid(self) -> int | None: ...


class Fault:
    """A fault that is set, until the end of the `with` block or `clear()`.

    The functions of this module return it.  One that is forgotten is taken back, with a
    ResourceWarning.
    """

    def __init__(self, name: str, struck: Callable[[], int], undo: Callable[[], object]) -> None:
        self._name = name
        self._count = struck
        self._undo: Callable[[], object] | None = undo
        self._last = 0

    @property
    def struck(self) -> int:
        """How often it has struck: how many calls have failed, events were lost, and so on.

        It is 0 for a fault that lasts (`packet_loss`, `partition`), and keeps its value at the end.
        """
        with _lock:
            if self._undo is not None:
                self._last = self._count()
            return self._last

    def clear(self) -> None:
        """Take the fault back; idempotent.  What it has done stays done."""
        with _lock:
            self._last = self.struck
            undo, self._undo = self._undo, None
            if undo is not None:
                undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def __del__(self) -> None:
        if getattr(self, "_undo", None) is not None:
            text = f"a fault was not cleared: {self._name}"
            try:
                warnings.warn(text, ResourceWarning, 2, source=self)
            finally:
                self.clear()  # also where warnings are errors

    def __repr__(self) -> str:
        state = "set" if self._undo is not None else "cleared"
        return f"<Fault {self._name} {state} struck={self.struck}>"


def fail(call: str, *, after: int = 0, times: int | None = 1, errno: int = _errno.ENOMEM) -> Fault:
    """Make calls of verbs or of the connection manager fail, without being done.

    It counts the calls of all threads and objects of this process.  `ibv_reg_mr` stands for
    `ibv_reg_mr_iova` and `ibv_reg_mr_iova2`, too, and `rdma_join_multicast` for
    `rdma_join_multicast_ex`.  Posting a list is one call; if it fails, no request is posted.

    Args:
        call: A name of `CALLS`, such as `"ibv_post_send"`.
        after: How many calls still succeed.
        times: How many fail then; None: all.
        errno: The error that the call fails with.

    Raises:
        UnsupportedFault: The call can fail only over the fabric, or not on this processor.
        ValueError: There is no such call, or a number is out of its range.
        OSError: ENOSPC: 64 faults are set.
    """
    if call not in CALLS:
        near = difflib.get_close_matches(call, CALLS, 1)
        hint = f"; did you mean {near[0]}?" if near else f": CALLS has {', '.join(sorted(CALLS))}"
        raise ValueError(f"call: {call!r} cannot be made to fail{hint}")
    whole("errno", errno, 1, 4095)
    fabric = _fabric()
    if fabric is None:
        if call not in CALLS_OF_DEVICES:
            raise _unsupported(f"{call} can be made to fail over the fabric only")
        if call not in _OPS:
            _need_hooks(call)
    return _add(f"fail({call!r})", call, after, times, errno)


def lose_event(*, after: int = 0, times: int | None = 1) -> Fault:
    """Lose events of completion queues, so that nothing announces their completions.

    The queue is no longer armed then, as after an event that has come, so that only a program that
    polls once more finds what is in it.  On a device the descriptor of the channel becomes
    readable, and there is nothing to read.

    Args:
        after: How many events still come, of all queues of this process.
        times: How many are lost then; None: all.

    Raises:
        UnsupportedFault: This processor is neither x86-64 nor aarch64, and this is not the fabric.
        ValueError: A number is out of its range.
        OSError: ENOSPC: 64 faults are set.
    """
    if _fabric() is None:
        _need_hooks("an event")
    return _add("lose_event()", _EVENT, after, times, _errno.EAGAIN)


def delay_completions(seconds: float) -> Fault:
    """Delay completions, each by the same time, with their events.

    Over the fabric it delays only the completions, of all queues of this process: the bytes are
    there in time.  On a device the adapter gets requests to send late, so that the peer sees them
    late, too, and completions of receives are as late as the peer's requests.  A request that the
    adapter refuses then ends the connection.

    At the end, what is under way over the fabric still takes its time; on a device it is posted.
    Of two delays the inner one holds; `struck` counts requests on a device, and is 0 over the
    fabric.

    Args:
        seconds: Seconds, above zero, up to 3600.

    Raises:
        UnsupportedFault: This processor is neither x86-64 nor aarch64, and this is not the fabric.
        ValueError: The time is out of its range.
    """
    check_seconds("seconds", seconds, none=False)
    if seconds > _LONGEST_S:
        raise ValueError(f"seconds: expected at most {_LONGEST_S:.0f}, got {seconds}")
    name = f"delay_completions({seconds})"
    delay = max(1, round(seconds * _NS))
    if (fabric := _fabric()) is not None:
        return _lasting(name, "completion_delay_ns", delay, fabric)
    _need_hooks("completions")  # those of a queue pair that is destroyed have to be forgotten
    shim = _begin()
    with _lock:
        before = shim.shim_delayed()
        _delays.append(delay)
        if shim.shim_delay(delay):
            _delays.pop()
            _end()
            raise OSError(_errno.EAGAIN, "no thread can be started for late requests")

    def undo() -> None:
        _delays.remove(delay)
        shim.shim_delay(_delays[-1] if _delays else 0)
        _end()

    return Fault(name, lambda: int(shim.shim_delayed()) - before, undo)


def end_connection(target: object, *, after: int | None = None, silently: bool = False) -> Fault:
    """End a connection abruptly, in the adapter: neither program is asked, and none says goodbye.

    This end finds its requests flushed.  The other end gets what was acknowledged, and then hears
    that the connection is over, as if this process had been killed.  With `silently` it hears
    nothing, as if this machine had lost its power: its own requests fail after their retries, and
    while it sends none it goes on waiting.  On iWARP it always hears.

    Calls can be canceled, and the connection closed and aborted, as always.

    Args:
        target: A `Connection`; a stream: its writer, its transport, or (reader, writer); a native
            `ConnectionId` that has a queue pair.
        after: None: now. Else how many requests to send the connection still posts; it ends just
            before the next one. The protocols post more than messages: credits, and the end of a
            stream.  A list of requests counts as one.
        silently: The peer is not told.

    Raises:
        UnsupportedFault: With `after`, on a processor that is neither x86-64 nor aarch64.
        ResourceClosedError: The connection is over already.
        TypeError: `target` is none of these.
        ValueError: A number is out of its range.
        OSError: ENOSPC: 64 moments are set.
    """
    # A queue pair that is gone has to be known of, also where the adapter is the fabric.
    handle, qp = _parts_of(target)
    its_id, its_qp = _address(handle), _address(qp)
    if silently:
        its_id = 0
    if after is None:
        error = _shim().shim_end_connection(its_qp, its_id)
        if error:
            raise OSError(error, os.strerror(error), "ibv_modify_qp")
        return _over("end_connection()")
    whole("after", after, 0, _MOST)
    _need_hooks("a connection at a moment")
    name = f"end_connection(after={after})"
    return _moment(name, its_qp, after, its_id, 0, (handle, qp))


def kill_peer(process: int | _Process, *, after: int | None = None) -> Fault:
    """Kill another process with SIGKILL, now or when this one is about to post.

    It is `os.kill` at a moment that a test can repeat.  Over the fabric and on a device alike the
    kernel closes what the process had open; its peers hear of the end, once it is noticed.

    Args:
        process: A process ID, or a process of `subprocess`, `multiprocessing` or `asyncio`, for
            which the caller waits.
        after: None: now. Else how many requests to send this process still posts, on all of its
            connections together; the kill comes just before the next one. Do not wait for the
            process before the end of the block: another one could get its ID.

    Raises:
        ProcessLookupError: It is over.
        PermissionError: It belongs to somebody else.
        UnsupportedFault: With `after`, on a processor that is neither x86-64 nor aarch64.
        TypeError: `process` is no process.
        ValueError: A number is out of its range.
        OSError: ENOSPC: 64 moments are set.
    """
    number = process if isinstance(process, int) else getattr(process, "pid", None)
    if number is None:
        raise TypeError(f"process: expected a process or its ID, got {process!r}")
    whole("process", number, 1, _MOST)
    if number == os.getpid():
        raise ValueError("process: this is the process itself")
    ended = getattr(process, "returncode", getattr(process, "exitcode", None))
    if ended is not None:
        raise ProcessLookupError(_errno.ESRCH, f"process {number} is over: {ended}")
    os.kill(number, signal.SIGKILL if after is None else 0)
    if after is None:
        return _over("kill_peer()")
    whole("after", after, 0, _MOST)
    _need_hooks("a process at a moment")
    return _moment(f"kill_peer(after={after})", 0, after, 0, number, (process,))


def packet_loss(part: float) -> Fault:
    """Lose a part of the packets that this process sends, at random; over the fabric only.

    These include packets that acknowledge what others send, and those of the connection manager.  A
    connection sends again what was lost, and is slow, or ends after too many retries.  Of two
    losses the inner one holds.

    Args:
        part: From 0 to 1: 0.01 is one percent.

    Raises:
        UnsupportedFault: This is a device: `--net` of softroce loses packets there.
        ValueError: `part` is out of its range.
    """
    if not 0 <= part <= 1:
        raise ValueError(f"part: expected 0 to 1, got {part}")
    fabric = _fabric()
    if fabric is None:
        raise _unsupported(
            "packets can be lost over the fabric only; between two devices of softroce "
            f'--net "netem loss {part:.0%}" does it'
        )
    return _lasting(f"packet_loss({part})", "loss", round(part * _MILLION), fabric)


def partition(one: str | None = None, other: str | None = None) -> Fault:
    """Let no packet cross between two devices, in either direction; over the fabric only.

    This holds for packets that this process sends, and for those that it is sent.  In a partition
    nothing is refused: whoever sends gets no answer.

    Args:
        one: Name of a device, such as `fab0`; None: each one.
        other: Likewise. A device can be cut off from itself, by `partition("fab0", "fab0")`;
            without an argument no packet gets anywhere.

    Raises:
        UnsupportedFault: This is a device: unplug it.
        ValueError: There is no such device.
    """
    fabric = _fabric()
    if fabric is None:
        raise _unsupported("networks can be partitioned over the fabric only")
    names = [device.name for device in devices()]
    for word, name in (("one", one), ("other", other)):
        if name is not None and name not in names:
            raise ValueError(f"{word}: there is no device {name}, only {', '.join(names)}")
    ones, others = (
        [number for number, each in enumerate(names) if name in (None, each)]
        for name in (one, other)
    )
    cuts = {pair for a in ones for b in others for pair in ((a, b), (b, a))}
    with _lock:
        for pair in cuts:
            _cuts[pair] = _cuts.get(pair, 0) + 1
            fabric.fabric_cut(*pair, 1)

    def undo() -> None:
        for pair in cuts:
            _cuts[pair] -= 1
            if not _cuts[pair]:
                fabric.fabric_cut(*pair, 0)

    return Fault("partition()", lambda: 0, undo)


# ---- the libraries


@functools.cache
def _fabric() -> ctypes.CDLL | None:
    """The library that stands in place of libibverbs; None: that is rdma-core's."""
    if (missing := load_error()) is not None:
        raise missing
    library = ctypes.CDLL("libibverbs.so.1")
    if not hasattr(library, "fabric_fault_add"):
        return None
    library.fabric_fault_add.argtypes = [
        ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int
    ]  # fmt: skip
    library.fabric_fault_struck.restype = ctypes.c_int64
    library.fabric_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.fabric_cut.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
    return library


@functools.cache
def _shim() -> ctypes.CDLL:
    if (missing := load_error()) is not None:
        raise missing
    if not _SHIM.exists():
        raise _unsupported(
            f"{_SHIM} is not there: `make setup` builds it in a checkout, elsewhere "
            "`pip install --force-reinstall aiordma`"
        )
    library = ctypes.CDLL(str(_SHIM))
    library.shim_fault_add.argtypes = [
        ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int
    ]  # fmt: skip
    library.shim_fault_struck.restype = ctypes.c_int64
    library.shim_moment_add.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    ]  # fmt: skip
    library.shim_moment_struck.restype = ctypes.c_int64
    library.shim_end_connection.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.shim_adopt.argtypes = [ctypes.c_void_p]
    library.shim_delay.argtypes = [ctypes.c_int64]
    library.shim_delayed.restype = ctypes.c_int64
    return library


def _unsupported(sentence: str) -> UnsupportedFault:
    return UnsupportedFault(_errno.EOPNOTSUPP, sentence)


def _need_hooks(what: str) -> None:
    if not _shim().shim_has_hooks():
        raise _unsupported(f"on this processor, faults of {what} are there over the fabric only")


#: Faults that need the library between the program and rdma-core.
_users = 0


def _begin() -> ctypes.CDLL:
    """Put the library between; also between what was loaded and opened since the last time."""
    global _users
    shim = _shim()
    with _lock:
        _users += 1
        shim.shim_begin()
        for each in gc.get_objects():
            if isinstance(each, Context):
                with contextlib.suppress(ResourceClosedError):
                    shim.shim_adopt(_address(each))
    return shim


def _end() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            _shim().shim_end()


# ---- faults of the two


def _add(name: str, call: str, after: int, times: int | None, errno: int) -> Fault:
    whole("after", after, 0, _MOST)
    if times is not None:
        whole("times", times, 1, _MOST)
    words = (call.encode(), after, -1 if times is None else times, errno)
    if (fabric := _fabric()) is not None:
        number = fabric.fabric_fault_add(*words)
        _check_room(number)
        return Fault(
            name,
            lambda: int(fabric.fabric_fault_struck(number)),
            lambda: fabric.fabric_fault_clear(number),
        )
    return _of_shim(name, "fault", words)


def _moment(
    name: str, qp: int, after: int, cm_id: int, process: int, kept: Iterable[object]
) -> Fault:
    return _of_shim(name, "moment", (qp, after, cm_id, process), kept)


def _of_shim(name: str, kind: str, words: Iterable[Any], kept: Iterable[object] = ()) -> Fault:
    shim = _begin()
    number = getattr(shim, f"shim_{kind}_add")(*words)
    try:
        _check_room(number)
    except OSError:
        _end()
        raise

    def undo(_kept: Iterable[object] = kept) -> None:
        getattr(shim, f"shim_{kind}_clear")(number)
        _end()

    return Fault(name, lambda: int(getattr(shim, f"shim_{kind}_struck")(number)), undo)


def _check_room(number: int) -> None:
    if number < 0:
        raise OSError(_errno.ENOSPC, "too many faults are set at a time")


#: Values that hold, by their names in the fabric; the last one is the inner one.
_values: dict[str, list[int]] = {}
_delays: list[int] = []
_cuts: dict[tuple[int, int], int] = {}


def _lasting(name: str, of_fabric: str, value: int, fabric: ctypes.CDLL) -> Fault:
    with _lock:
        stack = _values.setdefault(of_fabric, [])
        stack.append(value)
        fabric.fabric_set(of_fabric.encode(), value)

    def undo() -> None:
        stack.remove(value)
        fabric.fabric_set(of_fabric.encode(), stack[-1] if stack else 0)

    return Fault(name, lambda: 0, undo)


def _over(name: str) -> Fault:
    """A fault that has struck, and of which nothing is to be taken back."""
    fault = Fault(name, lambda: 1, lambda: None)
    fault.clear()
    return fault


def _parts_of(target: Any) -> tuple[Any, Any]:
    """The connection id and the queue pair of what has them."""
    if isinstance(target, tuple) and len(target) == 2:  # of open_connection
        target = target[1]
    transport: asyncio.Transport | None = getattr(target, "transport", None)
    owner: Any = target if transport is None else transport
    if isinstance(owner, RdmaTransport):
        port = owner._port
        return port.cm_id, port.qp
    if isinstance(owner, Connection):
        return owner.cm_id, owner.qp
    if getattr(owner, "qp", None) is not None and hasattr(owner, "start_disconnect"):
        return owner, owner.qp
    raise TypeError(f"target: expected a Connection, a stream or a ConnectionId, got {target!r}")


def _address(resource: Any) -> int:
    """Where the C object is.

    Raises:
        ResourceClosedError: There is none any more.
    """
    return int(ffi.cast("uintptr_t", resource._require()))
