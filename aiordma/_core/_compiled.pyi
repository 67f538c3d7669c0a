"""The compiled types of the data path; core.h has their fields, module.c the module.

Fields without an explanation here are those of struct aio_message_state and struct
aio_stream_state in protocol.h, which has one for each.  Addresses are of C objects, as numbers.
"""

import collections.abc
import types
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextvars import Context
from typing import (
    Any,
    ClassVar,
    Final,
    Protocol,
    Self,
    SupportsIndex,
    TypeVar,
    final,
    overload,
)
from weakref import ref

from aiordma.loop.job import Job

INDEX_BITS: Final[int]
SUB_SHIFT: Final[int]
SUB_RECV: Final[int]
SUB_READ: Final[int]
SUB_OPERATE: Final[int]
EVENT_ARRIVED: Final[int]
EVENT_OPERATED: Final[int]
EVENT_ROOM: Final[int]
EVENT_SENT: Final[int]
EVENT_FRAMES: Final[int]
EVENT_FAILED: Final[int]
EVENT_IDLE: Final[int]
FRAME_SIZE: Final[int]
FRAME_HAS_IMM: Final[int]
FRAME_MORE: Final[int]
FRAME_CREDIT: Final[int]
FRAME_DATA: Final[int]
FRAME_RENDEZVOUS: Final[int]
FRAME_DONE: Final[int]
FRAME_PING: Final[int]
FRAME_PONG: Final[int]
FRAME_END: Final[int]
FRAME_ABORT: Final[int]
FRAME_FREE: Final[int]
LANDING_SHIFT: Final[int]
LANDINGS: Final[int]
LANDING_SIZE: Final[int]
WRONG_SHORT: Final[int]
WRONG_LENGTH: Final[int]
WRONG_CREDIT: Final[int]
WRONG_KIND: Final[int]
WRONG_WRITE: Final[int]
WRONG_DONE: Final[int]
WRONG_SIZE: Final[int]
WRONG_ORDER: Final[int]
WRONG_BARE: Final[int]
WRONG_NUMBER: Final[int]
WRONG_TURN: Final[int]
CHAIN: Final[int]
WORD_SGL: Final[int]
STREAM_DATA: Final[int]
STREAM_ROOM: Final[int]
STREAM_FAILED: Final[int]
STREAM_IDLE: Final[int]
STREAM_GROW: Final[int]
STREAM_RECV: Final[int]
STREAM_MESSAGE: Final[int]
STREAM_CONTROLS: Final[int]
STREAM_CONTROL_SIZE: Final[int]
STREAM_PROBE: Final[int]
LARGEST_REQUEST: Final[int]

@final
class Loan:
    """Bytes of a message that the library holds."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Message:
    """A received message.

    Offers the buffer protocol: `bytes(m)`, `memoryview(m)`, numpy; DLPack, for
    `torch.from_dlpack(m)`; and, as bytes do, `m[0]`, `m[4:]`, which is a copy, `x in m`,
    `m == x`, `m.tobytes()` and `m.decode()`.

    Ownership: the bytes lie in memory of the connection, which is used again after `release()`,
    after a `with` block, or when the last reference goes.  A message whose buffer the program has
    exported cannot be released; a message that outlives its connection stays readable.  A `with`
    block that an exception ends is left with that exception in any case: if the buffer is exported
    then, the memory goes back when the last export ends.  `len()` tells the bytes, also after the
    release.
    """

    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __init__(
        self,
        view: memoryview | bytes,
        imm: int | None = None,
        give_back: Callable[[bool], object] | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The bytes as a tensor of uint8: `torch.from_dlpack(m)`, `numpy.from_dlpack(m)`.

        The tensor is read-only, and keeps the message from being released.  A consumer that does
        not know read-only tensors (`max_version` below 1) gets a copy.

        Raises:
            BufferError: Such a consumer wants no copy, or a tensor on another device.
            ValueError: The message was released.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """The processor: `(1, 0)` of DLPack."""

    def __eq__(self, other: object, /) -> bool: ...
    @overload
    def __getitem__(self, index: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __iter__(self) -> Iterator[int]: ...
    def __contains__(self, wanted: object, /) -> bool: ...
    def tobytes(self) -> bytes:
        """A copy of the bytes, as `memoryview.tobytes`."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The text of the bytes, as `bytes.decode` has it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    @property
    def imm(self) -> int | None:
        """The sender's 32-bit immediate, or None."""

    @property
    def _released(self) -> bool: ...
    @property
    def _exports(self) -> int: ...
    _kept: bool
    @property
    def _in_slot(self) -> bool: ...
    def _detach(self) -> None: ...
    def _lend(self, view: memoryview, /) -> Loan: ...
    def release(self) -> None:
        """Give the memory back.  Idempotent.

        Raises:
            BufferError: A memoryview or array still looks at it; release that first.
        """

@final
class Held:
    """The bytes of a contiguous buffer, for C; the buffer stays exported as long as this lives."""

    def __init__(self, buffer: object) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Wakeup:
    """The awaitable of a task, a single task at a time; `wake` resumes the task."""

    def __new__(cls, loop: AbstractEventLoop) -> Self: ...
    waiting: Final[bool]
    def __await__(self) -> Generator[Wakeup]: ...
    def wake(self) -> bool: ...
    def wake_soon(self) -> bool: ...
    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: Context | None = None
    ) -> None: ...
    def cancel(self, msg: object = None) -> bool: ...
    def result(self) -> None: ...
    def close(self) -> None: ...
    def throw(self, *error: Any) -> None: ...

@final
class Parked(Wakeup):
    """The Wakeup of a task that waits for a message."""

    @property
    def add_done_callback(self) -> Callable[..., None]: ...

@final
class Waiting(Wakeup):
    """The Wakeup of a task that waits to send."""

    def __await__(self) -> Generator[Wakeup, None, int]: ...  # type: ignore[override]

_T_co = TypeVar("_T_co", covariant=True)

@final
class Coroutine(collections.abc.Coroutine[Any, Any, _T_co]):
    """A send or a receive of a connection, awaited by one task; as a coroutine of Python."""

    __name__: Final[str]
    __qualname__: Final[str]
    cr_await: Final[object]
    cr_code: Final[types.CodeType | None]
    cr_frame: Final[types.FrameType | None]
    cr_origin: Final[None]
    cr_running: Final[bool]
    cr_state: Final[str]
    cr_suspended: Final[bool]
    @staticmethod
    def _set_frames(
        send: types.FrameType, recv: types.FrameType, anext: types.FrameType, /
    ) -> None: ...
    def __await__(self) -> Generator[Any, Any, _T_co]: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def send(self, value: None, /) -> Any: ...
    def throw(self, *error: Any) -> Any: ...
    def close(self) -> None: ...

@final
class Messages:
    """The messages of a connection, for `async for`."""

    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Coroutine[Message]: ...

class _Keeper(Protocol):
    # Of a connection that receives also on_arrival().
    @property
    def slots(self) -> memoryview: ...
    def slot_back(self, slot: int, exported: Message | None, kept: bool, /) -> None: ...
    def _posted_again(self, slot: int, code: int, /) -> None: ...

_Slots = tuple[int, int, int, int]

@final
class MessageState:
    """The messages and operations of one connection."""

    def __new__(
        cls,
        loop: AbstractEventLoop,
        sends: int,
        receives: int,
        send_depth: int,
        arrivals: int,
        controls: int,
        exchanges: int,
        answers: int,
        reads: int,
        raw: bool,
        grows: bool,
    ) -> Self: ...
    def __call__(self, events: int, /) -> None: ...
    receiver: _Keeper | None
    handler: Callable[[int], object] | None
    room: Callable[[], object]
    sge: type
    region: type
    lent: Final[Any]
    remote: type
    pd: object
    may_read: bool
    events: int
    waiting: bool
    dead: bool
    discarding: bool
    asking: bool
    grows: Final[bool]
    grown: bool
    numbered: bool
    python: bool
    requested: bool
    requesting: bool
    blocked: bool
    watched: bool
    slot_awaited: bool
    flushing: bool
    flush_at: int
    alive: bool
    eager_size: int
    fragmented_size: int
    bare_size: int
    largest: int
    written_size: int
    landed_size: int
    landing_wanted: int
    credits: int
    sent: int
    completed: int
    flushed: int
    posted: int
    unused: int
    granted: int
    receives: int
    held: int
    over: bool
    attended: bool
    operations_wanted: bool
    messages_sent: int
    bytes_sent: int
    messages_received: int
    bytes_received: int
    bytes_read: int
    bytes_written: int
    atomics: int
    parked: Final[Parked]
    id: Final[int]
    landing: Final[int]
    peer_landing: Final[int]
    stage_size: Final[int]
    closed: Final[bool]
    raw: Final[bool]
    queued: Final[int]
    large_waiting: int
    has_room: Final[bool]
    lacks_slot: Final[bool]
    said: Final[int]
    peer_reason: Final[int]
    error: Final[int]
    recv_failed: Final[bool]
    wrong: Final[tuple[int, int, int]]
    inline_size: Final[int]
    n_free: Final[int]
    n_control_free: Final[int]
    n_freed: Final[int]
    n_unposted: Final[int]
    large: Final[int]
    has_pending: Final[int]
    control: int
    due: Final[int]
    half: Final[int]
    n_back: Final[int]
    chain: Final[int]
    n_operations: Final[int]
    n_operations_free: Final[int]
    operating: Final[int]
    free_slots: Final[list[int]]
    free_numbers: Final[list[int]]
    done: Final[int]
    under_way: Final[int]
    arrived: Final[int]
    def bind(
        self,
        qp: int,
        id: int,
        send_flags: int,
        inline_size: int,
        send: _Slots,
        recv: _Slots,
        control: tuple[int, int, int],
        crowded: int,
        memory: object = None,
        /,
    ) -> None: ...
    def close(self) -> None: ...
    def fit(
        self,
        receives: bool,
        more_addr: int,
        step: int,
        keys: list[int],
        leaving: bool,
        full: bool,
        /,
    ) -> None: ...
    def size(self, window: int, /) -> None: ...
    def land(self, number: int, addr: int, rkey: int, memory: object, /) -> int: ...
    def set_stage(self, addr: int, lkey: int, size: int, /) -> None: ...
    def send(self, data: object, /) -> int | Waiting: ...
    def sending(self, connection: object, data: object, /) -> Coroutine[None]: ...
    def receiving(self, connection: object, /) -> Coroutine[Message]: ...
    def iterating(self, connection: object, /) -> Coroutine[Message]: ...
    def messages(self, connection: object, /) -> Messages: ...
    def send_buffer(self, data: object, imm: int | None, /) -> int: ...
    def send_pieces(self, items: list[Any], imm: int | None, /) -> int: ...
    def stand_in_line(
        self, kind: int, data: object, argument: int, imm: int | None, /
    ) -> int | Waiting: ...
    def end_waits(self, make: Callable[[], BaseException], seconds: float, /) -> float | None: ...
    def send_control(self, kind: int, argument: int = 0, flags: int = 0, /) -> int: ...
    def credit(self) -> int: ...
    def drop(self) -> None: ...
    def post_chain(self) -> int: ...
    def take(self) -> Message | None: ...
    def take_into(self, buffer: memoryview, /) -> int | None: ...
    def peek(self) -> tuple[int | None, int, int | None, bool] | None: ...
    def skip(self) -> None: ...
    def cut(self, count: int, /) -> None: ...
    def next_large(self, receives: int, /) -> tuple[int, int | None, bytes, int] | None: ...
    def next_done(self) -> tuple[int, int] | None: ...
    def take_reads(self) -> list[int]: ...
    def post_read(
        self, number: int, addr: int, length: int, lkey: int, remote_addr: int, rkey: int, /
    ) -> int: ...
    def post_receives(self, slots: list[int] | int, /) -> int: ...
    def back(self, slot: int, /) -> int: ...
    def back_now(self, slot: int, /) -> int: ...
    def take_freed(self) -> list[int]: ...
    def take_unposted(self) -> list[int]: ...
    def give_slot(self, slot: int, /) -> None: ...
    def withdraw_slot(self, slot: int, /) -> bool: ...
    def allow_operations(self, depth: int, /) -> None: ...
    def take_number(self) -> int: ...
    def give_number(self, number: int, /) -> None: ...
    def forget_done(self) -> None: ...
    def operate(
        self,
        number: int,
        opcode: int,
        addr: int,
        length: int,
        remote_addr: int,
        rkey: int,
        compare_add: int,
        swap: int,
        region: Any,
        /,
    ) -> Operation | int | None: ...
    def operate_copied(
        self,
        number: int,
        opcode: int,
        buffer: object,
        remote_addr: int,
        rkey: int,
        compare_add: int,
        swap: int,
        /,
    ) -> Operation | int | None: ...
    def read(self, remote: object, memory: object, offset: int, /) -> Operation | None: ...
    def write(self, remote: object, memory: object, offset: int, /) -> Operation | None: ...
    def lend(self, region: object, /) -> None: ...
    def ended(self, number: int, error: BaseException | None, /) -> Any: ...
    def show_life_to(self, group: bytearray | None, /) -> None: ...
    def spin_with(self, messages: Spin, operations: Spin, /) -> None: ...

@final
class Registration:
    """Registered memory, and how many operations use it."""

    def __new__(
        cls, addr: int, length: int, lkey: int, access: int, pd: object, memory: int = 0
    ) -> Self:
        """`memory`: the processor's address of the bytes, if what lands there is looked at."""
    uses: Final[int]
    def shut(self) -> bool: ...
    def leave(self) -> bool: ...

@final
class Operation(Wakeup):
    """A READ, WRITE or atomic under way; awaited by one task, it ends with the bytes.

    0 bytes: a READ or atomic that the adapter has completed without all of its data.
    """

    def __await__(self) -> Generator[Wakeup, None, int]: ...  # type: ignore[override]
    opcode: Final[int]

class _Stream(Protocol):
    """A stream, as its state sees it."""

    def _on_attention(self) -> None: ...
    def _on_events(self, events: int, /) -> None: ...
    def _on_raised(self, exc: BaseException, /) -> None: ...

@final
class StreamState:
    """The data and credits of one stream."""

    def __new__(
        cls,
        ring: tuple[int, int, int],
        table: int,
        send: tuple[int, int, int],
        credits: int,
        send_depth: int,
        iwarp: bool,
        inline_size: int,
        memory: object,
    ) -> Self: ...
    def __call__(self, events: int, /) -> None: ...
    handler: _Stream | None
    protocol: Any
    run: Callable[..., Any] | None
    rest: Callable[[Any, int], None] | None
    elsewhere: Callable[[], None] | None
    events: int
    passed: int
    first_waiting: int
    dead: bool
    flushing: bool
    receiving: bool
    sending: bool
    held: bool
    crediting: bool
    owing: bool
    swapped: bool
    alive: bool
    plain: bool
    waiter: bool
    stopped: bool
    posted: int
    largest: int
    addr: int
    key: int
    left: int
    spare_addr: int
    spare_key: int
    spare_left: int
    allowed: int
    limit: int
    sequence: int
    data_out: int
    data_limit: int
    data_wrs: int
    control_out: int
    entry: int
    peer_entry: int
    table_addr: int
    table_key: int
    table_length: int
    offset: int
    readable: int
    want: int
    ring_left: int
    ring_buffers: int
    ring_allowed: int
    ring_free: int
    ring_next: int
    credits: int
    consumed: int
    due: int
    inline_size: Final[int]
    error: Final[int]
    recv_failed: Final[bool]
    send_free: Final[int]
    head: Final[int]
    progress: Final[int]
    bytes_sent: Final[int]
    bytes_received: Final[int]
    ring_size: int
    ring_rkey: int
    ring_addr: int
    wider_addr: int
    wider_rkey: int
    wider_size: int
    moved: bool
    grow_at: int
    waiting_count: Final[int]
    def bind(self, qp: int, wr_id: int, words: int, lkey: int, /) -> None: ...
    def close(self) -> None: ...
    def write(self, data: object, /) -> None: ...
    def send(self, data: object, /) -> int: ...
    def room(self) -> int: ...
    def send_from(self, ring: int, size: int, lkey: int, /) -> None: ...
    def send_ring(self, length: int, /) -> int: ...
    def control(
        self, word: int, wrs: int, payload: bytes, to: int, key: int, signaled: bool, /
    ) -> int: ...
    def probe(self) -> int: ...
    def reach(self, sub: int, /) -> int: ...
    def retire(self) -> int: ...
    def drop(self) -> None: ...
    def cut(self, length: int, /) -> bytes | None: ...
    def read(self, into: object, most: int, /) -> int: ...
    def take(self, least: int | bytes, most: int, /) -> Awaitable[bytes | None]: ...
    def park(self, loop: AbstractEventLoop, /) -> Wakeup: ...
    def done(self) -> None: ...
    def spin_with(self, spin: Spin, /) -> None: ...
    def fill(self, count: int, /) -> int: ...
    def used(self, slot: int, /) -> int: ...
    def push_waiting(self, length: int, /) -> None: ...
    def pop_waiting(self) -> None: ...

# A completion, as verbs/wc.py has it.
_Record = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]

@final
class QueueState:
    """The drain's state of a completion queue, which it outlives."""

    def __new__(cls, token: int) -> Self: ...
    managed: int
    solicited: int
    armed: int
    listeners: int
    arm_late: int
    spins: Final[int]
    token: Final[int]
    unacknowledged: Final[int]
    events: Final[int]
    address: Final[int]
    def retire(self, cq: int, /) -> None: ...

@final
class Poller:
    """Polls the queues of a channel before they are armed."""

    def __new__(cls, ask: Callable[[], object] | None, yields: bool) -> Self: ...
    ask: Callable[[], object] | None
    asked: Final[bool]
    yields: bool
    waiting: Final[int]
    n_queues: Final[int]

@final
class Spin:
    """How the waits of one connection begin with polling."""

    def __new__(
        cls, poller: Poller, queue: QueueState, cq: int, bound_ns: int, adaptive: bool
    ) -> Self: ...
    bound_ns: Final[int]
    recent_ns: Final[int]
    waiting: Final[int]
    def close(self) -> None: ...

@final
class Drain:
    """Drains one completion channel."""

    def __new__(cls, channel: int, most: int) -> Self: ...
    poller: Poller | None
    draining: bool
    deferred: bool
    stopped: bool
    soon: bool
    spare: int
    n_pending: Final[int]
    undelivered: Final[int]
    n_states: Final[int]
    def add(
        self, wr_id: int, state: MessageState | StreamState, owner: Callable[[int], object], /
    ) -> None: ...
    def remove(self, wr_id: int, /) -> None: ...
    def drain(self) -> bool: ...
    def result(self) -> tuple[list[tuple[int, list[_Record] | None]], bool, int, str]: ...
    def sweep(self, cq: int, /) -> tuple[int, int, list[_Record], bool] | None: ...
    def deliver(self) -> None: ...
    def forget(self, cq: int, /) -> None: ...

@final
class Readable:
    """Called by the loop when a completion channel is readable."""

    def __new__(cls, drain: Drain, slow: Callable[[], object]) -> Self: ...
    def run(self) -> None: ...
    def spin(self) -> None: ...

@final
class SafetyPoll:
    """Polls the queues of a channel when an alarm has come."""

    calm: bool

    def __new__(cls, drain: Drain) -> Self: ...
    def by(self, fd: int, slow: Callable[[], object], /) -> Callable[[], None]: ...
    def stop(self) -> None: ...
    def add(self, cq: int, /) -> None: ...
    def discard(self, cq: int, /) -> None: ...
    def new_events(self) -> int: ...
    def take(self) -> list[tuple[int, int, tuple[int, int, list[_Record], bool]]]: ...
    def run(self) -> None: ...

class Owner:
    """The counting part of a Resource."""

    _handle: Any
    _state: Any
    _parents: tuple[Any, ...]
    _children: int
    _ending: Job[None] | None
    _outcome: OSError | MemoryError | bool | None
    def __init__(self, handle: object, parents: tuple[Owner, ...] = ()) -> None: ...
    @property
    def _made(self) -> dict[int, ref[Any]]: ...
    @property
    def closed(self) -> bool: ...
    def _require(self) -> Any: ...
    def _retain(self, child: Owner | None = None, /) -> None: ...
    def _let_go(self, child: Owner | None = None, /) -> None: ...
    @staticmethod
    def _set_rules(
        open: object,
        closing: object,
        destroying: object,
        acquire: Callable[[], object],
        release: Callable[[], object],
        guard: Callable[[Any], object],
    ) -> None: ...

_Numbers = tuple[int, int, int, int, int, int, int]

@final
class CMEvents:
    """The events of a channel of the connection manager."""

    def __new__(cls, channel: int) -> Self: ...
    id: Final[int]
    ah_attr: Final[int]
    def close(self) -> None: ...
    def next(self) -> tuple[int, int, int, int, bytes, _Numbers | None] | int | None: ...
    @staticmethod
    def ends(id: int, /) -> tuple[tuple[str, int], tuple[str, int]] | None: ...
    @staticmethod
    def resolve(
        id: int, source: int, destination: int, limit_ms: int, token: int, route_ms: int, /
    ) -> int: ...

def totals() -> tuple[int, int, int, int, int, int, int, int, int]:
    """Messages and bytes sent, received; bytes read, written; atomics; stream bytes."""

def alarm_open() -> int: ...
def alarm_set(fd: int, when: float, every: float = 0, /) -> None: ...
def crc32c(crc: int, data: object, /) -> int: ...
def crc32c_table(crc: int, data: object, /) -> int: ...
def crc32c_hardware() -> bool: ...
def copy(to: object, data: object, /) -> None: ...
