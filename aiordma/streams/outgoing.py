"""Outgoing: what a stream has still to send, from `write` to the completion.

Theory of operation
    Bytes go from the caller into a registered ring and from there to the peer, in C
    (`_ffi/stream.c`).  What does not fit waits here, in the backlog, as the caller's own `bytes`
    objects or as copies.  Whatever waits is joined into messages as large as the ring, the peer's
    buffer and the limit allow, so that many small writes become few messages when the peer is slow.
"""

from __future__ import annotations

from collections import deque

from aiordma._ffi import lib
from aiordma.streams.lane import LaneMachine
from aiordma.streams.stream_port import StreamPort

__all__ = ["Outgoing"]


class Outgoing:
    """The sending half of a stream.

    Args:
        port: Posts.
        machine: Says what may be posted.

    Attributes:
        size: Bytes that wait and are not in the ring yet.
    """

    __slots__ = ("_backlog", "_lane", "_machine", "_port", "size")

    def __init__(self, port: StreamPort, machine: LaneMachine) -> None:
        self._port = port
        self._lane = port.lane
        self._machine = machine
        self._backlog: deque[memoryview] = deque()
        self.size = 0

    @property
    def progress(self) -> int:
        """Messages that have completed."""
        return int(self._lane.progress)

    def keep(self, data: bytes | bytearray | memoryview, sent: int) -> bool:
        """Keep for later what was not sent, if there is such; the caller may change `data`."""
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        rest = view[sent:]
        if not rest:
            return False
        if not isinstance(data, bytes):
            rest = memoryview(bytes(rest))
        self._backlog.append(rest)
        self.size += len(rest)
        return True

    def flush(self) -> bool:
        """Send as much of what waits as is possible now; whether any was."""
        before = self.size
        while self.size and (room := lib.aio_stream_room(self._lane)):
            self._send_backlog(min(room, self.size))
        return self.size != before

    def control(self) -> None:
        """Post the protocol's own messages that are due."""
        while (post := self._machine.next_control()) is not None:
            self._port.post(post)

    def clear(self) -> None:
        """Forget what waits."""
        self._backlog.clear()
        self.size = 0

    def _send_backlog(self, length: int) -> None:
        ring, at = self._port.send, int(self._lane.head)
        end = at + length
        while at < end:
            first = self._backlog[0]
            count = min(len(first), end - at)
            ring[at : at + count] = first[:count]
            at += count
            if count == len(first):
                self._backlog.popleft()
            else:
                self._backlog[0] = first[count:]
        self.size -= length
        self._port.check(lib.aio_stream_send(self._lane, length))
