"""A datagram transport on an adapter of the test's own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiordma.datagram.config import DatagramConfig, Key
from aiordma.datagram.destinations import Destination
from aiordma.datagram.port import DatagramOwner
from aiordma.datagram.transport import RdmaDatagramTransport
from aiordma.verbs.ah import AHAttributes, gid_of
from tests.inside.datagram import callbacks_of, set_way, start

from ..conftest import settle
from ..verbs.test_grh import ipv4

if TYPE_CHECKING:
    import pytest


class FakeHandle:
    """As much of an address handle as a destination uses."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.attr = AHAttributes(dgid=gid_of(key[1]))
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakePort:
    """The adapter: sends go to `sent` while `room` lasts, and complete when the test says so."""

    def __init__(self) -> None:
        self.mtu = 1024
        self.number = 4
        self.pinned_bytes = 5000
        self.room = 1000
        self.sending = 0
        self.sockname = ("10.0.0.9", 5)
        self.sent: list[tuple[bytes, Key]] = []
        self.posted: list[int] = []
        self.slots: dict[int, bytes] = {}
        self.closed = self.forked = False
        self.failure: BaseException | None = None
        self.receiving = False

    def describe(self) -> dict[str, Any]:
        return {"device": "fake0", "qpn": 17}

    def at_close(self, function: Callable[[], None]) -> None:
        self.closing = function

    def start(self, owner: DatagramOwner) -> None:
        self.on_received, self.on_sent, self.on_restarted, self.on_failed = callbacks_of(owner)

    def fail(self, cause: BaseException) -> None:
        self.failure = cause
        self.on_failed()

    def receive(self) -> None:
        self.receiving = True

    def post_send(self, data: Any, ah: FakeHandle, qpn: int, qkey: int) -> bool:
        assert not ah.closed
        if not self.room:
            return False
        self.room -= 1
        self.sending += 1
        self.sent.append((bytes(data), ah.key))
        return True

    def complete(self, count: int = 1) -> None:
        for _ in range(count):
            self.room += 1
            self.sending -= 1
            self.on_sent()

    def arrive(self, slot: int, data: bytes, qpn: int = 3, host: str = "10.0.0.1") -> None:
        self.slots[slot] = bytes(20) + ipv4(host, "10.0.0.9") + data
        size = len(self.slots[slot])
        self.on_received(slot, (0, 0, 128, 0, size, 0, 1, qpn, 1, 0, 0, 0, 0))

    def received(self, slot: int, length: int) -> memoryview:
        return memoryview(self.slots[slot])[:length]

    def post_recv(self, slots: Any) -> None:
        self.posted += slots

    def close(self) -> None:
        self.closed = True
        self.closing()

    async def wait_closed(self) -> None:
        assert self.closed


class Protocol(asyncio.DatagramProtocol):
    """Writes down its calls; `on` holds what it does in them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.on: dict[str, Callable[..., None]] = {}

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args) if args else name)
        if name in self.on:
            self.on[name](*args)

    def connection_made(self, transport: Any) -> None:
        self._note("made")

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._note("received", data)

    def error_received(self, exc: Exception) -> None:
        self._note("error", type(exc).__name__)

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self._note("lost", exc)


def transport_on(port: Any, **options: Any) -> RdmaDatagramTransport:
    """A transport of the running loop on a fake port."""
    return RdmaDatagramTransport(asyncio.get_running_loop(), port, DatagramConfig(**options))


class Bench:
    """One transport; destinations are found when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.looking: dict[Key, deque[asyncio.Future[None]]] = {}
        set_way(monkeypatch, self._way)
        self.port = FakePort()
        self.transport = transport_on(self.port, **options)
        self.protocol = Protocol()
        self.calls = self.protocol.calls
        self.reports: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: self.reports.append(c))

    async def _way(self, destination: Destination) -> None:
        answer = asyncio.get_running_loop().create_future()
        self.looking.setdefault(destination.key, deque()).append(answer)
        await answer
        handle: Any = FakeHandle(destination.key)
        destination.ah = handle
        destination.found_at = asyncio.get_running_loop().time()

    async def start(self) -> Bench:
        await start(self.transport, self.protocol)
        assert self.calls == ["made"]
        assert self.port.receiving
        self.calls.clear()
        return self

    async def find(self, where: tuple[str, int], exc: OSError | None = None) -> None:
        await self.find_key(("service", *where), exc)

    async def find_key(self, key: Key, exc: OSError | None = None) -> None:
        await settle()
        answer = self.looking[key].popleft()
        if exc is None:
            answer.set_result(None)
        else:
            answer.set_exception(exc)
        await settle()

    @property
    def sent(self) -> list[bytes]:
        return [data for data, _ in self.port.sent]
