"""What a shared receive queue is, who takes its receives, and one of them."""

from __future__ import annotations

import asyncio
import errno
import itertools
from dataclasses import dataclass
from typing import Protocol

from aiordma.errors import os_error
from aiordma.verbs.comp_channel import shared_queues
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.wc import WCRecord, WorkCompletion

__all__ = ["Receive", "SRQAttributes", "Taker", "free_number"]

_numbers = itertools.count()
_MAX_QUEUES = 1 << 16


@dataclass(frozen=True, slots=True)
class SRQAttributes:
    """Attributes of a shared receive queue (`ibv_query_srq(3)`, same names)."""

    max_wr: int
    max_sge: int
    srq_limit: int


class Taker(Protocol):
    """A queue pair that takes its receives here."""

    def _receive_failed(self, record: WCRecord) -> None:
        """One of its receives has completed with an error."""


class Receive:
    """One posted receive."""

    __slots__ = ("caller_id", "future", "regions")

    def __init__(self, regions: tuple[MemoryRegion, ...], caller_id: int | None) -> None:
        self.regions = regions
        self.caller_id = caller_id
        self.future: asyncio.Future[WorkCompletion] | None = None


def free_number() -> int:
    """A number that no living shared queue has; ids have 16 bits for it."""
    for number in itertools.islice(_numbers, _MAX_QUEUES):
        if number % _MAX_QUEUES not in shared_queues:
            return number % _MAX_QUEUES
    raise os_error(errno.ENOMEM, "ibv_create_srq", detail="(65,536 shared receive queues)")
