"""Message: what `recv()` returns, over the registered memory in which it arrived."""

from __future__ import annotations

from typing import Any, Self

from aiordma._ffi.fast import MessageBase

__all__ = ["Message"]


class Message(MessageBase):
    """A received message.  Offers the buffer protocol: `bytes(m)`, `memoryview(m)`, numpy.

    Ownership: the bytes lie in memory of the connection, which is used again after `release()`,
    after a `with` block, or when the last reference goes.  A message whose buffer is exported
    cannot be released; one that outlives its connection stays readable.  `len()` tells the bytes,
    also after the release.

    Attributes:
        imm: The sender's 32-bit immediate, or None.
    """

    __slots__ = ("__weakref__",)

    def __bytes__(self) -> bytes:
        return bytes(self._exported())

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        try:
            return self._exported() == memoryview(other)  # type: ignore[arg-type]
        except TypeError:
            return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = " released" if self._released else ""
        imm = "" if self.imm is None else f" imm={self.imm:#x}"
        return f"<Message {len(self)} bytes{imm}{state}>"
