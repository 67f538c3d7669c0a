"""Outbox: datagrams on their way from `sendto` to the adapter.

A datagram goes to the adapter at once if its destination is known, no datagram waits before it and
a slot is free.  Otherwise it is copied, and waits: for its destination to be found, then in one
line for slots.  The bytes that wait are counted, and bounded.

Datagrams that wait for a source to be found are counted separately, and take at most half of the
room: as peers that forge their addresses cause such waits, these neither pause the protocol nor
stop datagrams for the program's own destinations.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Any

from aiordma.datagram.config import DatagramConfig, Key
from aiordma.datagram.destinations import Destination, Destinations
from aiordma.datagram.groups import Groups
from aiordma.datagram.port import DatagramPort
from aiordma.errors import errno_error
from aiordma.link.tally import DatagramCounts

__all__ = ["Outbox"]

_HEADER = 8  # added to the bytes of each datagram in `size`, so that empty ones count


class Outbox:
    """The datagrams that wait to be sent, and their destinations.

    Args:
        port, groups, config, counts: The endpoint's.
        error: Called with the cause when datagrams are lost.
        moved: Called when datagrams wait, have gone to the adapter, or were given up.

    Attributes:
        size: Bytes that wait, except those that wait for a source to be found.
    """

    __slots__ = (
        "_counts", "_error", "_line", "_loop", "_moved", "_port", "_room", "_unanswered",
        "destinations", "size",
    )  # fmt: skip

    def __init__(
        self,
        port: DatagramPort,
        groups: Groups,
        config: DatagramConfig,
        counts: DatagramCounts,
        error: Callable[[OSError], None],
        moved: Callable[[], None],
    ) -> None:
        self.destinations: Destinations = Destinations(
            port, groups, config, self._on_found, self._on_not_found
        )
        self._loop = asyncio.get_running_loop()
        self._port = port
        self._counts = counts
        self.size: int = 0
        self._room = config.max_buffer_size
        self._error = error
        self._moved = moved
        self._line: deque[tuple[bytes, Destination]] = deque()
        self._unanswered = 0  # bytes that wait for a source to be found

    @property
    def empty(self) -> bool:
        """Whether no datagram waits, here or in the adapter."""
        return not self._line and not self._port.sending and not self.destinations.busy

    @property
    def waiting(self) -> bool:
        """Whether anything waits for a slot."""
        return bool(self._line)

    @property
    def held(self) -> int:
        """Bytes that wait, including those that wait for a source to be found."""
        return self.size + self._unanswered

    def send(self, data: Any, key: Key) -> None:
        """Send contiguous bytes; copies them.  A dropped datagram is reported, in a later turn."""
        try:
            destination = self.destinations.get(key)
        except OSError as exc:
            self._counts.dropped += 1
            self._loop.call_soon(self._error, exc)
            return
        if not self._line and self._post(data, destination):
            return
        size = len(data) + _HEADER
        waiting = self.held
        unanswered = destination.ah is None and destination.is_source
        if waiting + size > self._room or (
            unanswered and self._unanswered + size > self._room // 2
        ):
            full = errno_error(errno.ENOBUFS, f"{waiting} bytes wait to be sent")
            self._counts.dropped += 1
            self._loop.call_soon(self._error, full)
            return
        if destination.ah is None:
            destination.pending.append(bytes(data))
        else:
            self._enqueue(bytes(data), destination)
        if unanswered:
            self._unanswered += size
        else:
            self.size += size
            self._moved()

    def _post(self, data: Any, destination: Destination) -> bool:
        ah = destination.ah
        if ah is None:
            return False
        if not self._port.post_send(data, ah, destination.qpn, destination.qkey):
            return False
        counts = self._counts
        counts.sent += 1
        counts.bytes_sent += len(data)
        return True

    def _enqueue(self, data: bytes, destination: Destination) -> None:
        self._line.append((data, destination))
        destination.queued += 1

    def flush(self) -> None:
        """Send the datagrams that wait, in order, as long as there are slots."""
        while self._line:
            data, destination = self._line[0]
            if destination.ah is None:  # it was lost meanwhile, and that was reported
                self._counts.dropped += 1
            elif not self._post(data, destination):
                break
            if not self._line:  # the post has failed: the endpoint is over, and all is dropped
                return
            self._line.popleft()
            destination.queued -= 1
            self.size -= len(data) + _HEADER
        self._moved()

    def _on_found(self, destination: Destination) -> None:
        while destination.pending:
            data = destination.pending.popleft()
            self._enqueue(data, destination)
            if destination.is_source:
                self._unanswered -= len(data) + _HEADER
                self.size += len(data) + _HEADER
        self.flush()

    def _on_not_found(self, destination: Destination, exc: OSError) -> None:
        self._counts.dropped += len(destination.pending)
        while destination.pending:
            size = len(destination.pending.popleft()) + _HEADER
            if destination.is_source:
                self._unanswered -= size
            else:
                self.size -= size
        self._error(exc)
        self._moved()

    def clear(self) -> None:
        """Drop all datagrams, and stop looking for destinations."""
        self._counts.dropped += len(self._line) + self.destinations.pending
        self._line.clear()
        self.destinations.close()
