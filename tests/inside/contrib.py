"""Private parts of aiordma/contrib/ that tests ask for."""

from __future__ import annotations

from aiordma import Connection, ConnectionConfig
from aiordma.contrib import dask
from aiordma.contrib.dask import RdmaComm


def interface() -> str:
    """Name of the network interface of the device."""
    return next(iter(dask._interfaces()))


def pieces_of(data: memoryview) -> list[memoryview]:
    """The pieces of a frame."""
    return list(dask._pieces_of(data))


def settings() -> ConnectionConfig:
    """The settings of connections, out of dask's configuration."""
    return dask._config()


def connection_of(comm: RdmaComm) -> Connection:
    """The connection of a comm."""
    return comm._connection
