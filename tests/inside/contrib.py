"""Private parts of aiordma/contrib/ that tests ask for."""

from __future__ import annotations

from typing import Any

from aiordma import Connection, ConnectionConfig
from aiordma.contrib import dask
from aiordma.contrib import numpy as arrays
from aiordma.contrib.dask import RdmaComm
from aiordma.contrib.dask_memory import FrameMemory


def header_of(array: Any) -> bytes:
    """The header with which an array is sent."""
    return arrays._described(array)[0]


def read_header(message: bytes) -> tuple[Any, tuple[int, ...]]:
    """The dtype and the shape in a header."""
    header, _ = arrays._read(memoryview(message))
    return header.dtype, header.shape


def arrived_of(connection: Connection) -> Any:
    """The array of which the header has arrived, and which was not received."""
    return arrays._ends_of(connection).arrived


def interface() -> str:
    """Name of the network interface of the device."""
    return next(iter(dask._interfaces()))


def pieces_of(data: memoryview) -> list[memoryview]:
    """The pieces of a frame."""
    return list(dask._pieces_of(data))


def bytes_of_frame(frame: Any) -> memoryview:
    """The bytes that a frame is sent by."""
    return dask._bytes_of(frame)


def settings() -> ConnectionConfig:
    """The settings of connections, out of dask's configuration."""
    return dask._config()


def connection_of(comm: RdmaComm) -> Connection:
    """The connection of a comm."""
    return comm._connection


def idle_of(frames: FrameMemory) -> list[int]:
    """Bytes of each piece of memory that is kept, the oldest first."""
    return [len(each) for each in frames._idle]


def idle_frames() -> list[int]:
    """Of the memory of frames of this process."""
    return idle_of(dask._FRAMES)


def lock_of(frames: FrameMemory) -> Any:
    """What is held while pieces are kept or taken."""
    return frames._lock
