"""The classes of both sides of a test, by its API and kind."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.cli.perf.kinds import ClientSide, ServerSide
from aiordma.cli.perf.messages import MessageClient, MessageServer
from aiordma.cli.perf.native import NativeClient, NativeServer
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.stream_protocols import ProtocolClient, ProtocolServer
from aiordma.cli.perf.streams import StreamClient, StreamServer

__all__ = ["client_side", "server_side"]

_CLIENTS: dict[str, Callable[[Plan, str], ClientSide]] = {
    "connection": MessageClient,
    "native": NativeClient,
    "protocol": ProtocolClient,
    "streams": StreamClient,
}
_SERVERS: dict[str, Callable[[Plan], ServerSide]] = {
    "connection": MessageServer,
    "native": NativeServer,
    "protocol": ProtocolServer,
    "streams": StreamServer,
}


def client_side(plan: Plan, host: str) -> ClientSide:
    """The client of a plan."""
    return _CLIENTS[plan.api](plan, host)


def server_side(plan: Plan) -> ServerSide:
    """The server of a plan."""
    return _SERVERS[plan.api](plan)
