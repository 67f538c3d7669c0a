"""Private parts of aiordma/streams/ that tests ask for."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import itertools
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from aiordma import RdmaServer, RdmaStreamReader, RdmaTransport, StreamConfig
from aiordma.link.acceptor import Request
from aiordma.link.admission import Place, Places
from aiordma.loop import registry
from aiordma.memory import governor
from aiordma.streams import plan, policy
from aiordma.streams.outgoing import Outgoing
from aiordma.streams.stream_port import StreamPort
from aiordma.verbs.mr import MemoryRegion

if TYPE_CHECKING:
    import pytest


_numbers = itertools.count(1)


def with_depths(config: StreamConfig, *, recv: int = 100, send: int = 60) -> StreamConfig:
    """The same settings, for streams with so many messages under way each way."""
    # Plans are found by equal settings: a microsecond makes these others.
    seconds = config.close_timeout_s + 1e-6 * next(_numbers)
    config = dataclasses.replace(config, close_timeout_s=seconds)
    with mock.patch.object(plan, "RECV_DEPTH", recv), mock.patch.object(plan, "SEND_DEPTH", send):
        for iwarp in (False, True):
            plan.plan_of(config, iwarp=iwarp)
    return config


def port_of(transport: object) -> StreamPort:
    """What a stream stands on."""
    return cast("StreamPort", cast("Any", transport)._port)


def knows_end(reader: RdmaStreamReader) -> bool:
    """Whether a reader knows of the end, with bytes before it or without."""
    return reader._eof


def buffered(reader: RdmaStreamReader) -> bytes:
    """The bytes that lie in a reader, and not in the ring."""
    return bytes(reader._buffer)


def in_the_ring(reader: RdmaStreamReader) -> int:
    """How many bytes have arrived that the reader does not have."""
    return cast("Any", reader)._transport._in.state.readable  # type: ignore[no-any-return]


def lose_end(transport: Any) -> None:
    """As if a KeyboardInterrupt had come before the report of the end was scheduled."""
    transport._over = True


def when_confirmed(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Have it called when a client has confirmed, before the connection gets a protocol."""
    answer = RdmaServer._answer

    async def then_call(server: RdmaServer, transport: RdmaTransport, request: Request) -> None:
        await answer(server, transport, request)
        call()

    monkeypatch.setattr(RdmaServer, "_answer", then_call)


def takes_mappings(transport: Any) -> bool:
    """Whether the peer has slots for mappings."""
    return bool(transport._machine.iomap._taken)


def active_of(server: RdmaServer) -> int:
    """How many of its connections there are."""
    return len(server._clients)


def tls_places_of(server: RdmaServer) -> Places:
    """The places of clients that turn to TLS."""
    return server._tls_places


async def begin_tls(server: RdmaServer, transport: RdmaTransport) -> Place:
    """As if a connection went over to TLS: wait for the place of its handshake."""
    return await RdmaServer._tls_begins(server, transport)


def backlog_of(outgoing: Outgoing) -> Collection[memoryview | bytearray]:
    """The pieces that wait and are not in the ring yet."""
    return outgoing._backlog


def connect_of_switch(
    factory: Callable[[], asyncio.BaseProtocol],
    hosts: list[str],
    port: int,
    options: dict[str, Any],
) -> Awaitable[Any]:
    """Connect as a loop under the switch does, to the first host that answers."""
    return policy._connect(factory, hosts, port, options)


def refuse_larger_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream gets memory for a larger ring from now on."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "no memory that may be pinned")

    monkeypatch.setattr(MemoryRegion, "slab", refuse)


def limit_steps(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Slots and rings that come with traffic have `size` bytes, of loops that have had none."""
    monkeypatch.setattr(governor, "left", lambda _: lambda: size)


def bytes_of_steps() -> int:
    """Bytes of slots and rings that have come with traffic, of the running loop."""
    entry = registry._entries_of(asyncio.get_running_loop()).get("growth")
    return entry.shared.used if entry else 0
