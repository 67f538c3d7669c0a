"""Completions for the C of a connection or a stream, and a queue pair for what it posts.

`Completing` has a real drain poll a queue that the test fills.  Below both stand the functions that
an adapter's library brings, as libibverbs lays them out.
"""

from __future__ import annotations

import ctypes
import errno
import inspect
from collections.abc import Callable
from typing import Any

from aiordma._core import Drain, MessageState, StreamState
from aiordma._ffi import ffi
from aiordma.verbs.wc import WCRecord

__all__ = ["Completing", "QueuePair", "context_with", "fields"]

_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
# struct ibv_context: the device, and a table of functions.
_PLACES = {"poll": 1 + 11, "send": 1 + 25, "receive": 1 + 26}
_MOST = 16


def context_with(**functions: Any) -> Any:
    """The memory of a `struct ibv_context` with these functions: poll, send, receive."""
    memory = (ctypes.c_void_p * 64)()
    for name, function in functions.items():
        memory[_PLACES[name]] = ctypes.cast(function, ctypes.c_void_p).value
    return memory


class Completing:
    """Hands completions to a state, as the drain of its channel does it.

    Attributes:
        events: What the state's owner is to be told of.
        records: What Python was given of the last completion.
    """

    def __init__(self, state: MessageState | StreamState) -> None:
        self.events = 0
        self.records: list[WCRecord] = []
        self._state = state
        laid = self._laid = list[Any]()

        def poll(cq: int, room: int, address: int) -> int:
            out: Any = ffi.cast("struct ibv_wc *", address)
            count = min(room, len(laid))
            for i in range(count):
                out[i] = laid.pop(0)[0]
            return count

        self._call = _POLL(poll)
        self._context = context_with(poll=self._call)
        self._cq = ffi.new("struct ibv_cq *")
        self._cq.context = ffi.cast("struct ibv_context *", ctypes.addressof(self._context))
        self._drain = Drain(0, _MOST)
        self._drain.add(0, state, self._note)

    def _note(self, events: int) -> None:
        self.events |= events

    def take(self, wc: Any) -> bool:
        """Whether the state takes it; if not, it is Python's, which has seen it by now."""
        self._laid.append(wc)
        swept = self._drain.sweep(int(ffi.cast("uintptr_t", self._cq)))
        assert swept is not None
        polled, _, self.records, more = swept
        assert (polled, more) == (1, False)
        assert self._state.passed == len(self.records)
        self._state.passed = 0
        self._drain.tell()
        return not self.records


class QueuePair:
    """What a state posts to, once it is bound to `address`.

    Args:
        send: Called with each `struct ibv_send_wr *`; an errno, or 0.
        receive: Called with each `struct ibv_recv_wr *`.

    Attributes:
        wrong: What one of them has raised; C has no way to pass it on, and hears of EIO.
    """

    def __init__(
        self, send: Callable[[Any], int | None], receive: Callable[[Any], int | None] | None = None
    ) -> None:
        self.wrong: BaseException | None = None
        calls = {"send": self._called("struct ibv_send_wr *", send)}
        if receive is not None:
            calls["receive"] = self._called("struct ibv_recv_wr *", receive)
        self._calls = calls
        self._context = context_with(**calls)
        self._qp = ffi.new("struct ibv_qp *")
        self._qp.context = ffi.cast("struct ibv_context *", ctypes.addressof(self._context))

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self._qp))

    def _called(self, kind: str, function: Callable[[Any], int | None]) -> Any:
        def call(qp: int, wr: int, bad: int) -> int:
            try:
                return function(ffi.cast(kind, wr)) or 0
            except BaseException as exc:
                self.wrong = exc
                return errno.EIO

        return _POST(call)


def fields(state: MessageState | StreamState) -> dict[str, Any]:
    """All that a state tells of itself, to be compared."""
    names = [name for name, kind in vars(type(state)).items() if inspect.isdatadescriptor(kind)]
    found = {name: getattr(state, name, None) for name in names}
    if isinstance(state, MessageState):
        found["peek"] = state.peek()
    return found
