"""Message: what `recv()` returns, over the registered memory in which it arrived."""

from __future__ import annotations

from aiordma._ffi.fast import Message

__all__ = ["Message"]
