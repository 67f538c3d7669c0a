"""Landings: memory that a peer writes large messages to, each in one request.

Theory of operation
    A message that exceeds a slot costs a request, an acknowledgement and two completions for each
    of its fragments, or three messages and a READ.  So a side offers its peer a landing: registered
    memory, to which the peer writes a message with one RDMA WRITE with immediate.  The write uses
    up a receive, so that credits count it as any message.  `recv()` copies the message out of the
    landing, and the next frame to the peer says that the landing is free.  A message that finds the
    landing taken, or too small, goes as without it.

    Landings are made when a message of the peer would have used one, out of the budgets of large
    messages; a larger message gets a larger landing, and the smaller ones stay, because the peer
    may be writing there.  The sender copies a message to memory of its own, the stage, before it
    is written: the program may change its bytes as soon as `send()` returns.

    The peer may write to a landing at any time, as it may to the ring of a stream.  So a message is
    what was copied, and nothing else that a program has lies in that memory.
"""

from __future__ import annotations

from aiordma._core import LANDING_SIZE, LANDINGS
from aiordma.endpoint.link import Link
from aiordma.memory.byte_budget import AHEAD
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion

__all__ = ["LANDING_SIZES", "Landings"]

#: Bytes of the landings, by their numbers; 0 is none.
LANDING_SIZES = (0, *(LANDING_SIZE << 2 * number for number in range(LANDINGS)))
_LANDS = Access.LOCAL_WRITE | Access.REMOTE_WRITE


class Landings:
    """The landings of one connection, and its stage; they live as long as its queue pair.

    Args:
        link: The adapter's side.
    """

    __slots__ = ("_link",)

    def __init__(self, link: Link) -> None:
        self._link = link

    def allow(self, sent: int, received: int) -> None:
        """Use landings: both sides know them.

        Args:
            sent: Bytes of the largest message that this side writes to a landing of the peer.
            received: Bytes of the largest message for which this side makes a landing.
        """
        self._link.state.written_size = min(sent, LANDING_SIZES[-1])
        self._link.state.landed_size = min(received, LANDING_SIZES[-1])

    def look(self) -> None:
        """Make what C has found missing: a landing for the peer's messages, a stage for its own.

        Without memory for it messages go as before, and later messages try again.
        """
        state = self._link.state
        if wanted := state.landing_wanted:
            state.landing_wanted = 0
            self._offer(wanted)
        if state.stage_size < (size := LANDING_SIZES[state.peer_landing]):
            if made := self._registered(size, Access.LOCAL_WRITE):
                region, _ = made
                state.set_stage(region.addr, region.lkey, size)

    def _offer(self, wanted: int) -> None:
        state = self._link.state
        number = next(n for n, size in enumerate(LANDING_SIZES) if size >= wanted)
        if made := self._registered(LANDING_SIZES[number], _LANDS):
            region, view = made
            if not state.landing:
                self._link.open_access(Access.REMOTE_WRITE)
            self._link.check(state.land(number, region.addr, region.rkey, view))

    def _registered(self, size: int, access: Access) -> tuple[MemoryRegion, memoryview] | None:
        """Memory that is registered until the queue pair is gone; None if it cannot be had."""
        buffers = self._link.buffers
        if not buffers.account.try_take(AHEAD, size, keep=True):
            return None
        try:
            region = MemoryRegion(self._link.pd, size, access)
        except OSError:
            buffers.account.give(size)
            return None
        buffers.pin(region)
        view = region.view
        region.close()  # when the pin has ended
        return region, view
