"""Private parts of aiordma/service/ that tests ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiordma import Pool, Server
from aiordma.endpoint.outcome import Outcome
from aiordma.requests.wire import stopping_error
from aiordma.service import pool as pool_module
from aiordma.service import server as server_module
from aiordma.service import way as way_module
from aiordma.service import ways as ways_module

if TYPE_CHECKING:
    import pytest

__all__ = [
    "Outcome",
    "cancel_handlers",
    "name_within",
    "pools_connect_by",
    "prove_after",
    "stopping_error",
    "tell_of_handlers_after",
    "users_of",
]


def pools_connect_by(patch: pytest.MonkeyPatch, connect: Callable[..., Any]) -> None:
    """Have pools make their connections by this function."""
    patch.setattr(pool_module, "connect", connect)


def prove_after(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have a connection of a pool count as one that worked after so many seconds."""
    patch.setattr(way_module, "_PROVEN_S", seconds)


def name_within(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have a function that names addresses for a pool take so many seconds at most."""
    patch.setattr(ways_module, "_NAMING_S", seconds)


def tell_of_handlers_after(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have a server that stops tell of the handlers that run on so many seconds later."""
    patch.setattr(server_module, "_QUIET_S", seconds)


def cancel_handlers(server: Server) -> None:
    """As at a second signal."""
    server._cancel_handlers()


def users_of(pool: Pool) -> int:
    """How many uses of connections are counted, and tasks in line."""
    core = pool._core
    assert core is not None
    return sum(member.users for member in core._members) + len(core.line)
