"""AtomicResults: whether the adapter has written the results of atomics.

Over a network that loses or reorders packets, Soft-RoCE may report success for an atomic that has
no answer yet (docs/surprises.md): the memory for the result is unchanged.  So that memory is filled
with random bytes before the post, and a completed atomic whose memory still has them is an error.
A peer that knew the bytes could make the requester see an error, and no more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from aiordma.errors import result_lost_error
from aiordma.verbs.wr import ATOMICS, SendWR

__all__ = ["AtomicResults"]


class AtomicResults:
    """The memory for the results of a list of atomics; made before the list is posted.

    Memory that Python does not see, such as a GPU's, is neither filled nor looked at.

    Args:
        requests: Checked.  Several may name the same memory: then it is enough that one result has
            come, as nobody can know whose it is.
    """

    __slots__ = ("_marked",)

    def __init__(self, requests: Sequence[SendWR]) -> None:
        self._marked: dict[int, tuple[int, memoryview, bytes]] = {}
        for index, request in enumerate(requests):
            if request.opcode not in ATOMICS:
                continue
            (piece,) = request.sg_list
            view = piece.mr._look()
            if view is None or view.readonly:
                continue
            mark = os.urandom(8)
            result = view[piece.offset : piece.offset + 8]
            result[:] = mark
            self._marked[piece.mr.addr + piece.offset] = index, result, mark

    def require(self, operation: str = "") -> None:
        """Raise unless all results are there; the requests have completed.

        Args:
            operation: Its name, unless the atomics are a list.

        Raises:
            ResultLostError: Names the first that is missing.
        """
        for index, result, mark in self._marked.values():
            if result == mark:
                if operation:
                    raise result_lost_error(operation)
                raise result_lost_error(f"an atomic (request {index} of its list)", index)
