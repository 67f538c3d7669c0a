"""Whether a buffer is exported, which is how a registration of it shows."""

from __future__ import annotations

__all__ = ["exported"]


def exported(buffer: bytearray) -> bool:
    """Whether it cannot be resized."""
    try:
        buffer.append(0)
    except BufferError:
        return True
    buffer.pop()
    return False
