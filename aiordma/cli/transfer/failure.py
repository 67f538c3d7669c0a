"""The errors of a file that is not copied."""

from __future__ import annotations

__all__ = ["PeerFailedError", "TransferError"]


class TransferError(Exception):
    """A file was not copied.

    Attributes:
        reason: The reason, a `Reason`, for programs.
        text: The reason, for people.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        self.text = text

    def __str__(self) -> str:
        return self.text


class PeerFailedError(TransferError):
    """The peer has broken off the transfer, and has sent a reason."""
