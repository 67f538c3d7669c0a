"""Parts of a shared receive queue: its attributes, its takers, and one receive."""

from __future__ import annotations

import asyncio
import errno
import itertools
from dataclasses import dataclass
from typing import Any, Protocol

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_pointer
from aiordma.arguments import whole
from aiordma.errors import completion_error, os_error
from aiordma.verbs.comp_channel import shared_queues
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.wc import WCRecord, WorkCompletion

__all__ = ["Receive", "SRQAttributes", "Taker", "create", "free_number"]

_numbers = itertools.count()
_MAX_QUEUES = 1 << 16


@dataclass(frozen=True, slots=True)
class SRQAttributes:
    """Attributes of a shared receive queue (`ibv_query_srq(3)`, same names)."""

    max_wr: int
    max_sge: int
    srq_limit: int


def create(
    pd: ProtectionDomain, max_wr: int, max_sge: int, token: int
) -> tuple[Any, SRQAttributes]:
    """A new queue, whose events carry `token`, and what the device really gave.

    Raises:
        ValueError: A size is not positive.
        OSError: Above the device's limits (EINVAL), or out of resources.
    """
    device = pd.context.attributes
    for name, value, most in (
        ("max_wr", max_wr, device.max_srq_wr),
        ("max_sge", max_sge, device.max_srq_sge),
    ):
        if whole(name, value) <= 0:
            msg = f"{name} has to be positive, not {value}"
            raise ValueError(msg)
        if value > most:
            detail = f"({name} {value} is above the device's limit of {most})"
            raise os_error(errno.EINVAL, "ibv_create_srq", detail=detail)
    init = ffi.new("struct ibv_srq_init_attr *")
    init.srq_context = ffi.cast("void *", token)
    init.attr.max_wr = max_wr
    init.attr.max_sge = max_sge
    ffi.errno = 0  # not every driver gives a reason
    handle = check_pointer(lib.ibv_create_srq(pd._require(), init), "ibv_create_srq")
    return handle, SRQAttributes(init.attr.max_wr, init.attr.max_sge, 0)


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

    def tell(self, record: WCRecord) -> None:
        """It has completed: its future gets the completion, or the error."""
        if self.future is None or self.future.done():
            return
        if record[1] == 0:
            self.future.set_result(WorkCompletion.from_record(record))
        else:
            details = {"vendor_err": record[3], "qp_num": record[6]}
            self.future.set_exception(completion_error(record[1], operation="recv", **details))


def free_number() -> int:
    """A number that no living shared queue has; ids have 16 bits for it."""
    for number in itertools.islice(_numbers, _MAX_QUEUES):
        if number % _MAX_QUEUES not in shared_queues:
            return number % _MAX_QUEUES
    raise os_error(errno.ENOMEM, "ibv_create_srq", detail="(65,536 shared receive queues)")
