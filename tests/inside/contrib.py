"""Private parts of aiordma/contrib/ that tests ask for."""

from __future__ import annotations

from aiordma import Connection
from aiordma.contrib import dask
from aiordma.contrib.dask import RdmaComm


def interface() -> str:
    """Name of the network interface of the device."""
    return next(iter(dask._interfaces()))


def connection_of(comm: RdmaComm) -> Connection:
    """The connection of a comm."""
    return comm._connection
