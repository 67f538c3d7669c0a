"""Private parts of aiordma/_core/ that tests ask for."""

from __future__ import annotations

from aiordma import Message


def is_released(message: Message) -> bool:
    """Whether its memory was given back."""
    return message._released


def exports_of(message: Message) -> int:
    """How many views of its bytes there are."""
    return message._exports
