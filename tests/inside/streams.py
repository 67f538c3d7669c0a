"""Private parts of aiordma/streams/ that tests ask for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from aiordma import RdmaServer, RdmaTransport
from aiordma.link.admission import Place, Places
from aiordma.streams.outgoing import Outgoing
from aiordma.streams.stream_port import StreamPort


def port_of(transport: object) -> StreamPort:
    """What a stream stands on."""
    return cast("StreamPort", cast("Any", transport)._port)


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
