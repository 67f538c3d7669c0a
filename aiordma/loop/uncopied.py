"""Uncopied: the base of objects that stand for something of which there is only one.

A copy of a connection would be a second connection over one queue pair: as soon as one of the two
is dropped, its finalizer destroys what the other uses.  A pickle would name handles of this process
to another.  `copy` and `pickle` call the same method, so the rule is here, once.
"""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

__all__ = ["Uncopied"]


class Uncopied:
    """Refuses `copy.copy`, `copy.deepcopy` and `pickle`, with the name of the object's class."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        msg = (
            f"cannot copy or pickle a {name}: it stands for something of this process of which "
            f"there is only one; pass the {name} itself, and in another process make a new one"
        )
        raise TypeError(msg)
