"""Landings: memory that the peer writes messages to; and the stage, to write messages from."""

from __future__ import annotations

from aiordma.endpoint.config import (
    LANDING_SIZES,
)
from aiordma.endpoint.link import Link, memory_log
from aiordma.memory.governor import KEPT
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion

__all__ = ["Landings"]


_LANDS = Access.LOCAL_WRITE | Access.REMOTE_WRITE


class Landings:
    """The landings of one connection, and its stage.  They exist as long as its queue pair.

    Args:
        link: The adapter's side of the connection.
    """

    __slots__ = ("_link", "_offered")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._offered = False

    def provide(self, wanted: int, number: int) -> None:
        """Make what C has found missing: a landing for the peer's messages, a stage for its own.

        If there is no memory for it, messages are sent without it, and a later one tries again.

        Args:
            wanted: Bytes of a message for which a landing is wanted; 0 if none is.
            number: The peer's landing that is larger than the stage; 0 if none is.
        """
        if wanted:
            self._offer(wanted)
        size = LANDING_SIZES[number]
        if number and (made := self._registered(size, Access.LOCAL_WRITE)):
            region, _ = made
            self._link.state.set_stage(region.addr, region.lkey, size)

    def _offer(self, wanted: int) -> None:
        number = next(n for n, size in enumerate(LANDING_SIZES) if size >= wanted)
        if made := self._registered(LANDING_SIZES[number], _LANDS):
            region, view = made
            self._link.note("has a landing of %d bytes", region.length, log=memory_log)
            if not self._offered:
                self._link.open_access(Access.REMOTE_WRITE)
            self._offered = True
            state = self._link.state
            self._link.check(state.offer_landing(number, region.addr, region.rkey, view))

    def _registered(self, size: int, access: Access) -> tuple[MemoryRegion, memoryview] | None:
        """Memory that stays registered until the queue pair is gone; None if there is none."""
        buffers = self._link.buffers
        lease = buffers.account.lease(KEPT, size)
        if lease is None:
            return None
        try:
            region = lease.register(lambda: MemoryRegion(self._link.pd, size, access))
        except OSError:
            lease.release()
            return None
        buffers.pin(region)
        view = region.view
        region.close()  # has an effect when the pin ends
        return region, view
