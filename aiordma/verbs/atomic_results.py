"""AtomicResults: whether the adapter has written the results of atomics.

Over a network that loses or reorders packets Soft-RoCE completes atomics with success that have no
answer yet (docs/surprises.md): the memory for the result is as it was.  So it gets random bytes
before the post, and a completed atomic whose memory still has them is an error.  A peer that knew
the bytes could have its requester see an error, and no more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from aiordma.errors import result_lost_error
from aiordma.verbs.wr import ATOMICS, SendWR

__all__ = ["AtomicResults"]


class AtomicResults:
    """The memory for the results of the atomics of a list, from before its post.

    Memory that Python does not see, such as that of a GPU, is left as it is, and not looked at.

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
            operation: Its name, if it is none of a list.

        Raises:
            ResultLostError: The first that is not.
        """
        for index, result, mark in self._marked.values():
            if result == mark:
                if operation:
                    raise result_lost_error(operation)
                raise result_lost_error(f"an atomic (request {index} of its list)", index)
