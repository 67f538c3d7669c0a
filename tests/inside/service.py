"""Private parts of aiordma/service/ that tests ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiordma import Pool
from aiordma.service import pool as pool_module
from aiordma.service import server as server_module

if TYPE_CHECKING:
    import pytest


def pools_connect_by(patch: pytest.MonkeyPatch, connect: Callable[..., Any]) -> None:
    """Have pools make their connections by this function."""
    patch.setattr(pool_module, "connect", connect)


def prove_after(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have a connection of a pool count as one that worked after so many seconds."""
    patch.setattr(pool_module, "_PROVEN_S", seconds)


def tell_of_handlers_after(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have a server that stops tell of the handlers that run on so many seconds later."""
    patch.setattr(server_module, "_QUIET_S", seconds)


def users_of(pool: Pool) -> int:
    """How many uses of connections are counted, and tasks in line."""
    core = pool._core
    assert core is not None
    return sum(member.users for member in core._members) + len(core._line)


def connections_of(pool: Pool) -> list[Any]:
    """The connections that the pool has."""
    assert pool._core is not None
    return [member.connection for member in pool._core._members]
