"""FrameCarrier: sends and receives the frames of requests over a connection."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from aiordma._core import Message, MessageState
from aiordma.endpoint.link import Link
from aiordma.endpoint.outcome import Outcome
from aiordma.endpoint.receiving import Receiver
from aiordma.link.source import source_of
from aiordma.memory.governor import REQUESTS, Budget, Lease

__all__ = ["FrameCarrier"]


class FrameCarrier:
    """Sends and receives the frames of requests as messages (a `requests.wire.Carrier`).

    Args:
        link: The adapter's side of the connection.
        receiver: What receives the messages of the peer.
        outcome: Whether the connection is over.
        send: Sends a message, with an immediate or None.
        require_size: Raises if the peer does not accept a message of this size.
        budget: The listener's budget for requests; None for a connection without a listener.
        connection: A weak reference to the connection, as in all of its parts.
        timeout: The time limit of a request for which the program sets none, in seconds, or None.
    """

    __slots__ = (
        "_budget", "_connection", "_link", "_outcome", "_receiver", "_request_timeout_s",
        "_require_size", "_send_frame",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        receiver: Receiver,
        outcome: Outcome,
        send: Callable[[Any, int | None], Coroutine[Any, Any, None]],
        require_size: Callable[[int], None],
        budget: Budget | None,
        connection: Callable[[], Any],
        timeout: float | None,
    ) -> None:
        self._connection = connection
        self._request_timeout_s = timeout
        self._link = link
        self._receiver = receiver
        self._outcome = outcome
        self._send_frame = send
        self._require_size = require_size
        self._budget = budget

    @property
    def _frame_sender(self) -> Callable[[bytes, None], int]:
        return self._link.state.send

    @property
    def _message_state(self) -> MessageState:
        return self._link.state

    def _next_frame(self) -> Message | None:
        return self._receiver.take()

    @property
    def _frame_room(self) -> int:
        return self._link.state.eager_size

    @property
    def _request_lease(self) -> Lease | None:
        if self._budget is None:
            return None
        return self._budget.lease(REQUESTS, 0, source_of(self._link.cm_id.destination_address))

    def _break_requests(self, cause: BaseException) -> None:
        self._link.fail(cause)

    def _frame_failed(self, code: int) -> None:
        self._link.check(code)

    def is_closing(self) -> bool:
        """Whether the connection is being closed, or is closed or lost."""
        return self._outcome.decided

    def _note_stopping(self) -> None:
        self._outcome.stopping = True
