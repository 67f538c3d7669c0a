"""A large message that was announced, and the interface of what fetches it."""

from __future__ import annotations

from typing import Protocol

from aiordma._core import Message
from aiordma.memory.governor import Lease

__all__ = ["Fetches", "Large"]


class Large:
    """A large message of the peer, from its announcement until the program has received it.

    Args:
        length: The size in bytes.
        lands: Whether it may be read directly into memory of the program.

    Attributes:
        message: The message; None until it has been fetched.
        waits: Whether it is not decided yet into what memory it is read.
        taken: Whether a task in `recv_into` is filling a buffer of the program with it.
        lease: The lease of its memory, until the program has received it; None if there is none.
    """

    __slots__ = ("lands", "lease", "length", "message", "taken", "waits")

    def __init__(self, length: int, *, lands: bool = False) -> None:
        self.length: int = length
        self.lands: bool = lands
        self.message: Message | None = None
        self.lease: Lease | None = None
        self.waits: bool = True
        self.taken: bool = False


class Fetches(Protocol):
    """What the receiver needs of the `Fetcher`."""

    def on_read(self, number: int) -> None:
        """Note that a READ of a large message has completed."""

    def taken(self, large: Large) -> None:
        """Note that the program has received a large message."""

    def wanted(self) -> None:
        """Fetch the first large message, because the program waits for it."""

    async def read_into(self, large: Large, view: memoryview) -> bool:
        """Read a message into memory of the program; False if it is no longer the next one."""
