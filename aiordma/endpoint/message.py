"""Message: the result of `recv()`, over the registered memory in which it arrived."""

from __future__ import annotations

from aiordma._core import Loan, Message

__all__ = ["Message", "lent"]


def lent(view: memoryview) -> memoryview | Loan:
    """The object that keeps `view` while the adapter reads it, which may go on behind its caller.

    Bytes of a message are lent to the library: it can be released meanwhile, and its memory goes
    back when the last loan has ended.
    """
    owner = view.obj
    if isinstance(owner, Message) and not owner._released:
        return owner._lend(view)
    return view
