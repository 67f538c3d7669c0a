"""FrameCarrier: a connection as its requests see it (`requests.wire.Carrier`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from aiordma._core import Message
from aiordma.endpoint.link import Link
from aiordma.endpoint.outcome import Outcome
from aiordma.endpoint.receiving import Receiver
from aiordma.link.source import source_of
from aiordma.requests.budget import RequestBudget, Share

__all__ = ["FrameCarrier"]


class FrameCarrier:
    """Carries the frames of requests as messages.

    Args:
        link: The adapter's side.
        receiver: Has the messages of the peer.
        outcome: Whether the connection is over.
        send: Sends a message, with an immediate or None.
        require_size: Raises if the peer takes no message of this size.
        budget: Of the bytes of requests; None of a connection that no listener has made.
        connection: The connection, weakly, as of all of its parts.
        timeout: Seconds that a call waits, if the program does not say; None for no limit.
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
        budget: RequestBudget | None,
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
        return self._link.state.send_buffer

    @property
    def _frame_reader(self) -> Callable[[], Coroutine[Any, Any, Message]]:
        return functools.partial(self._link.state.receiving, self._receiver)

    @property
    def _frame_room(self) -> int:
        return self._link.state.eager_size

    @property
    def _request_share(self) -> Share | None:
        if self._budget is None:
            return None
        return Share(self._budget, source_of(self._link.cm_id.destination_address))

    def _break_requests(self, cause: BaseException) -> None:
        self._link.fail(cause)

    def _frame_failed(self, code: int) -> None:
        self._link.check(code)

    def is_closing(self) -> bool:
        """Whether the connection is closed, closing or lost."""
        return self._outcome.decided
