"""LargeMessages: the large messages of one connection in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.large.exposure import Exposer
from aiordma.endpoint.large.fetch import Fetcher
from aiordma.endpoint.large.landings import Landings
from aiordma.endpoint.link import Link, memory_log
from aiordma.endpoint.outcome import Outcome
from aiordma.endpoint.receiving import Receiver
from aiordma.endpoint.sending import Sender
from aiordma.endpoint.wire import (
    KNOWS_CHECKSUMS,
    Hello,
    protocol_error,
)

__all__ = ["LargeMessages"]


class LargeMessages:
    """The large messages of one connection in both directions.

    Each direction is made when its first message comes, because most connections have none.

    Attributes:
        fetcher: What fetches messages of the peer; None before the first.
        landings: The memory of messages that are written, in both directions.
    """

    __slots__ = (
        "_config", "_exposer", "_hello", "_link", "_outcome", "_reads", "_receiver", "_sender",
        "fetcher", "landings",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        sender: Sender,
        receiver: Receiver,
        outcome: Outcome,
        config: ConnectionConfig,
    ) -> None:
        self._link = link
        self._sender = sender
        self._receiver = receiver
        self._outcome = outcome
        self._config = config
        self._reads = 0  # how many READs the peer serves at a time
        self._hello: Hello | None = None  # the peer's
        self._exposer: Exposer | None = None
        self.fetcher: Fetcher | None = None
        self.landings: Landings = Landings(link)

    @property
    def exposer(self) -> Exposer:
        """What exposes messages to the peer; made at first use."""
        if self._exposer is None:
            self._link.note("has its first large message to send", log=memory_log)
            self._exposer = Exposer(
                self._link, self._sender, self._outcome, self._config, self._receiver.window
            )
            if self._hello is not None:
                self._exposer.agree(self._hello)
        return self._exposer

    @property
    def checked(self) -> bool:
        """Whether the peer sends checksums of its large messages."""
        hello = self._hello
        knows = hello is not None and bool(hello.flags & KNOWS_CHECKSUMS)
        return knows and self._link.common.checks

    def agree(self, hello: Hello, reads: int) -> None:
        """Apply the peer's half of the handshake; `reads`: how many READs it serves at a time."""
        self._hello = hello
        self._reads = min(self._config.read_depth, reads)

    def announce(self, length: int, body: bytes, imm: int | None) -> None:
        """Handle an announcement of the peer."""
        if not self._reads:
            # A READ would never begin, and all work requests behind it would wait.
            text = "the peer announced a large message and serves no RDMA reads"
            self._link.fail(protocol_error(text))
            return
        if self._config.check_large and not self.checked:
            text = "the peer's library knows no checksums of large messages, check_large is True"
            self._link.fail(protocol_error(text))
            return
        if self.fetcher is None:
            try:
                self._link.qp._expect(self._config.read_depth)
            except OSError as exc:
                self._link.fail(exc)
                return
            self._link.note("has its first large message to receive", log=memory_log)
            self.fetcher = self._receiver.fetcher = Fetcher(
                self._link, self._sender, self._receiver, self._config, self._reads,
                checked=self.checked,
            )  # fmt: skip
        self.fetcher.announce(length, body, imm)

    async def drained(self) -> None:
        """Wait until the peer has read all messages that were announced."""
        if self._exposer is not None:
            await self._exposer.drained()

    def refuse(self, failure: Callable[[], BaseException]) -> None:
        """Have sends that wait for their turn raise what `failure` makes."""
        if self._exposer is not None:
            self._exposer.refuse(failure)

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Have all sends raise what `failure` makes, because the connection is over."""
        if self._exposer is not None:
            self._exposer.fail(failure)

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel the tasks that fetch messages, because the connection is over; return them."""
        return [] if self.fetcher is None else self.fetcher.stop()
