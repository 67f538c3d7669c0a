"""The compiled module `_fast`; see fast.h."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Generator
from typing import Any, Literal, Protocol, final

class MessageBase:
    """The bytes of a received message, and who gets their memory back."""

    def __init__(
        self,
        view: memoryview,
        imm: int | None = None,
        give_back: Callable[[memoryview], object] | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def imm(self) -> int | None: ...
    @property
    def _released(self) -> bool: ...
    _kept: bool
    def _exported(self) -> memoryview: ...
    def _detach(self) -> None: ...
    def release(self) -> None: ...

class _Keeper(Protocol):
    def on_news(self, bits: int, /) -> None: ...
    def slot_view(self, slot: int, length: int, /) -> memoryview: ...
    def slot_back(self, slot: int, view: memoryview | None, kept: bool, /) -> None: ...
    def _posted_again(self, slot: int, code: int, /) -> None: ...

@final
class Mail:
    """The data path of one connection."""

    room: Callable[[], object]
    def __init__(
        self,
        lane: int,
        send: int,
        next: int,
        back: int,
        operate: int,
        receiver: _Keeper,
        type: type[MessageBase],
        parked: Wakeup,
    ) -> None: ...
    def send(self, data: object, /) -> int: ...
    def take(self) -> MessageBase | Literal[False] | None: ...
    def message(self, slot: int, length: int, imm: int | None, /) -> MessageBase: ...
    def news(self, bits: int, /) -> None: ...
    def operate(
        self,
        number: int,
        opcode: int,
        addr: int,
        length: int,
        lkey: int,
        remote_addr: int,
        rkey: int,
        compare_add: int,
        swap: int,
        region: Any,
        /,
    ) -> Operation | int | None: ...
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
class Operation(Wakeup):
    """A READ, WRITE or atomic under way; awaited by one task."""

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
        news: dict[int, Callable[[int], None]],
    ) -> None: ...
    def drain(self) -> int | None: ...

@final
class StreamCalls:
    """The data path of one stream."""

    def __init__(
        self, stream: int, write: int, read: int, attention: Callable[[], object]
    ) -> None: ...
    def write(self, data: object, /) -> int | None: ...
    def cut(self, length: int, /) -> bytes | None: ...
    def pull(self) -> bytes | None: ...
    def ask(self, length: int, /) -> bool: ...
    def done(self) -> None: ...
