"""Completions for the C of a connection or a stream, and a queue pair for what it posts.

`Queue` is a queue that the test fills, polled by a real drain; `Completing` adds a state.  Below
all stand the functions that an adapter's library brings, as libibverbs lays them out.
"""

from __future__ import annotations

import ctypes
import errno
import inspect
from collections.abc import Callable
from socket import htonl
from typing import Any

from aiordma._core import SUB_SHIFT, Drain, MessageState, StreamState
from aiordma._ffi import ffi
from aiordma.verbs.enums import WCFlags, WCOpcode
from aiordma.verbs.wc import WCRecord

__all__ = ["SIZES", "Completing", "Queue", "QueuePair", "completion", "context_with", "fields"]

_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
# struct ibv_context: the device, and a table of functions.
_PLACES = {"poll": 1 + 11, "send": 1 + 25, "receive": 1 + 26}
_MOST = 16
#: Of a small connection: the arguments of a `MessageState` but for its loop.
SIZES = {
    "sends": 1,
    "receives": 4,
    "send_depth": 4,
    "arrivals": 4,
    "controls": 1,
    "exchanges": 1,
    "answers": 1,
    "reads": 1,
    "eager_size": 64,
    "largest": 64,
    "raw": False,
    "grows": False,
}


def context_with(**functions: Any) -> Any:
    """The memory of a `struct ibv_context` with these functions: poll, send, receive."""
    memory = (ctypes.c_void_p * 64)()
    for name, function in functions.items():
        memory[_PLACES[name]] = ctypes.cast(function, ctypes.c_void_p).value
    return memory


def completion(
    sub: int,
    opcode: WCOpcode = WCOpcode.SEND,
    length: int = 0,
    imm: int | None = None,
    *,
    status: int = 0,
) -> Any:
    """A `struct ibv_wc *` of the request with this sub-index."""
    wc = ffi.new("struct ibv_wc *")
    wc.wr_id, wc.status, wc.opcode, wc.byte_len = sub << SUB_SHIFT, status, int(opcode), length
    if imm is not None:
        wc.wc_flags, wc.imm_data = int(WCFlags.WITH_IMM), htonl(imm)
    return wc


class Queue:
    """A completion queue that the test fills, and a real drain that polls it.

    Attributes:
        drain: Tells the owners of states, once the test has it do so.
    """

    def __init__(self) -> None:
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
        self.drain = Drain(0, _MOST)

    def sweep(self, *wcs: Any) -> list[WCRecord]:
        """The completions out of `wcs` that the drain leaves to Python.

        Events of states wait for `drain.deliver`.
        """
        self._laid.extend(wcs)
        swept = self.drain.sweep(int(ffi.cast("uintptr_t", self._cq)))
        assert swept is not None
        polled, _, records, more = swept
        assert (polled, more) == (len(wcs), False)
        return records


class Completing(Queue):
    """Hands completions to a state, as the drain of its channel does it.

    Attributes:
        events: What the state's owner is to be told of.
        records: What Python was given of the last completion.
    """

    def __init__(self, state: MessageState | StreamState) -> None:
        super().__init__()
        self.events = 0
        self.records: list[WCRecord] = []
        self._state = state
        self.drain.add(0, state, self._note)

    def _note(self, events: int) -> None:
        self.events |= events

    def take(self, wc: Any) -> bool:
        """Whether the state takes it; if not, it is Python's, which has seen it by now."""
        self.records = self.sweep(wc)
        if isinstance(self._state, StreamState):
            for _ in self.records:
                self._state.seen()
        self.drain.deliver()
        return not self.records


class QueuePair:
    """What a state posts to, once it is bound to `address`.

    Args:
        send: Called with each `struct ibv_send_wr *`; an errno, or 0.
        receive: Called with each `struct ibv_recv_wr *`.

    Attributes:
        handle: A `struct ibv_qp *`.
        bad: Where `send` tells the first request that it refuses.
        wrong: What one of them has raised; C has no way to pass it on, and hears of EIO.
    """

    def __init__(
        self, send: Callable[[Any], int | None], receive: Callable[[Any], int | None] | None = None
    ) -> None:
        self.wrong: BaseException | None = None
        self.bad: Any = None
        calls = {"send": self._called("struct ibv_send_wr *", send)}
        if receive is not None:
            calls["receive"] = self._called("struct ibv_recv_wr *", receive)
        self._calls = calls
        self._context = context_with(**calls)
        self.handle = ffi.new("struct ibv_qp *")
        self.handle.context = ffi.cast("struct ibv_context *", ctypes.addressof(self._context))

    @property
    def address(self) -> int:
        return int(ffi.cast("uintptr_t", self.handle))

    def _called(self, kind: str, function: Callable[[Any], int | None]) -> Any:
        def call(qp: int, wr: int, bad: int) -> int:
            self.bad = ffi.cast(f"{kind}*", bad)
            try:
                return function(ffi.cast(kind, wr)) or 0
            except BaseException as exc:
                self.wrong = exc
                return errno.EIO

        return _POST(call)


def fields(state: MessageState | StreamState) -> dict[str, Any]:
    """All that a state tells of itself, to be compared."""
    if isinstance(state, MessageState):
        return {**state.facts(), "peek": state.peek()}
    names = [name for name, kind in vars(type(state)).items() if inspect.isdatadescriptor(kind)]
    return {name: getattr(state, name, None) for name in names}
