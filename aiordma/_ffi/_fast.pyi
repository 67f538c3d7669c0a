"""The compiled module `_fast`; see fast.h."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Generator
from typing import Any, ClassVar, Protocol, Self, final
from weakref import ref

from aiordma.loop.job import Job

@final
class Loan:
    """Bytes of a message that the library holds."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Message:
    """A received message.  Offers the buffer protocol: `bytes(m)`, `memoryview(m)`, numpy.

    Ownership: the bytes lie in memory of the connection, which is used again after `release()`,
    after a `with` block, or when the last reference goes.  A message whose buffer the program has
    exported cannot be released; one that outlives its connection stays readable.  A `with` block
    that an exception ends is left with that exception in any case: if the buffer is exported then,
    the memory goes back when the last export ends.  `len()` tells the bytes, also after the
    release.
    """

    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __init__(
        self,
        view: memoryview,
        imm: int | None = None,
        give_back: Callable[[bool], object] | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __eq__(self, other: object, /) -> bool: ...
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

class _Keeper(Protocol):
    def on_news(self) -> None: ...
    def on_due(self) -> None: ...
    def slot_view(self, slot: int, length: int, /) -> memoryview: ...
    def slot_back(self, slot: int, exported: Message | None, kept: bool, /) -> None: ...
    def _posted_again(self, slot: int, code: int, /) -> None: ...

@final
class Mail:
    """The data path of one connection."""

    room: Callable[[], object]
    sge: type
    remote: type
    pd: object
    may_read: bool
    def __init__(
        self,
        lane: int,
        send: int,
        next: int,
        back: int,
        operate: int,
        receiver: _Keeper,
        parked: Parked,
    ) -> None: ...
    def send(self, data: object, /) -> int: ...
    def __await__(self) -> Generator[Any, None, Any]: ...
    def message(self, slot: int, length: int, imm: int | None, /) -> Message: ...
    def __call__(self, news: int, /) -> None: ...
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
    def read(self, remote: object, piece: object, offset: int, /) -> Operation | None: ...
    def write(self, remote: object, piece: object, offset: int, /) -> Operation | None: ...
    def ended(self, number: int, error: BaseException | None, /) -> Any: ...

class Wakeup:
    """What one task at a time waits on, and is resumed from by `wake`."""

    def __init__(self, loop: AbstractEventLoop) -> None: ...
    @property
    def waiting(self) -> bool: ...
    def __await__(self) -> Generator[Wakeup]: ...
    def wake(self) -> bool: ...
    def wake_soon(self) -> bool: ...

@final
class Parked(Wakeup):
    """What a task that waits for a message is parked on."""

@final
class Registration:
    """Registered memory, and how many operations use it."""

    def __init__(self, addr: int, lkey: int, access: int, pd: object, region: object) -> None: ...
    @property
    def uses(self) -> int: ...
    def shut(self) -> bool: ...
    def leave(self) -> bool: ...

@final
class Operation(Wakeup):
    """A READ, WRITE or atomic under way; awaited by one task, it ends with the bytes."""

    def __await__(self) -> Generator[Wakeup, None, int]: ...  # type: ignore[override]
    @property
    def opcode(self) -> int: ...

@final
class Reader:
    """Drains one completion channel."""

    def __init__(
        self,
        drain: int,
        completions: int,
        room: int,
        run: int,
        sweep: int,
        memory: object,
    ) -> None: ...
    def own(self, index: int, owner: Callable[[int], object] | None, /) -> None: ...
    def keep(self) -> None: ...
    def sweep(self, cq: int, /) -> int: ...
    def tell(self) -> None: ...
    @property
    def untold(self) -> int: ...
    draining: bool
    deferred: bool
    stopped: bool
    def drain(self) -> int | None: ...

@final
class Readable:
    """What the loop calls when a completion channel is readable."""

    def __init__(self, reader: Reader, slow: Callable[[], None]) -> None: ...
    def run(self) -> None: ...

@final
class StreamCalls:
    """The data path of one stream."""

    attention: Callable[[], object]
    protocol: Any
    run: Callable[..., Any]
    other: Callable[[int], object]
    failed: Callable[[BaseException], object]
    rest: Callable[[Any, int], None]
    elsewhere: Callable[[], None]
    def __init__(
        self, stream: int, write: int, read: int, wakeup: Wakeup, memory: object
    ) -> None: ...
    def write(self, data: object, /) -> None: ...
    def cut(self, length: int, /) -> bytes | None: ...
    def __call__(self, news: int, /) -> None: ...
    def ask(self, length: int, /) -> bool: ...
    def done(self) -> None: ...

def alarm_open() -> int: ...
def alarm_set(fd: int, when: float, /) -> None: ...

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

    def __init__(self, channel: int, event: int, next: int) -> None: ...
    def next(self) -> tuple[int, int, int, int, bytes, _Numbers | None] | int | None: ...
    @staticmethod
    def ends(id: int, /) -> tuple[tuple[str, int], tuple[str, int]] | None: ...
