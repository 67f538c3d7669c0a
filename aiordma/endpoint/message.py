"""Message: what `recv()` returns, over the registered memory in which it arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from aiordma._ffi.buffer import BufferExporter

__all__ = ["Message"]


class Message(BufferExporter):
    """A received message.  Offers the buffer protocol: `bytes(m)`, `memoryview(m)`, numpy.

    Ownership: the bytes lie in memory of the connection, which is used again after `release()`,
    after a `with` block, or when the last reference goes.  A message whose buffer is exported
    cannot be released; one that outlives its connection stays readable.

    Attributes:
        imm: The sender's 32-bit immediate, or None.
    """

    __slots__ = ("__weakref__", "_give_back", "_length", "_view", "imm")

    def __init__(
        self,
        view: memoryview,
        imm: int | None = None,
        give_back: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._view: memoryview | None = view
        self._length = view.nbytes
        self._give_back = give_back
        self.imm = imm

    def _exported(self) -> memoryview:
        if self._view is None:
            msg = "the message was released"
            raise ValueError(msg)
        return self._view

    def _detach(self) -> None:
        """Move the bytes to memory of their own and give the registered memory back."""
        view, give_back = self._view, self._give_back
        if view is None or give_back is None:
            return
        self._view = memoryview(bytes(view))
        self._give_back = None
        give_back(view)

    def __len__(self) -> int:
        """Bytes, also after the release."""
        return self._length

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

    def release(self) -> None:
        """Give the memory back.  Idempotent.

        Raises:
            BufferError: A memoryview or array still looks at it; release that first.
        """
        view = self._view
        if view is None:
            return
        view.release()
        self._view = None
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(view)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __del__(self) -> None:
        view, give_back = getattr(self, "_view", None), getattr(self, "_give_back", None)
        if view is not None and give_back is not None:
            # Still exported or not: the receiver finds out, and waits for the exports to end.
            self._give_back = None
            give_back(view)

    def __repr__(self) -> str:
        state = " released" if self._view is None else ""
        imm = "" if self.imm is None else f" imm={self.imm:#x}"
        return f"<Message {self._length} bytes{imm}{state}>"
