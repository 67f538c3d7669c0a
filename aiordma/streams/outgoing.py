"""Outgoing: what a stream has still to send, from `write` to the completion.

Theory of operation
    Bytes go from the caller into a registered ring and from there to the peer; what does not fit
    waits in the backlog, as the caller's own `bytes` objects or as copies.  Whatever waits is
    joined into messages as large as the ring, the peer's buffer and the limit allow, so that many
    small writes become few messages when the peer is slow.

    Messages complete in the order in which they were posted, so that a queue of them is all the
    accounting that the ring needs.
"""

from __future__ import annotations

from collections import deque

from aiordma.rsocket.machine import Machine, Post
from aiordma.streams.stream_port import StreamPort

__all__ = ["Outgoing"]

# A message is at most this part of the ring, so that one is filled while another is on its way.
_PARTS = 4


class Outgoing:
    """The sending half of a stream.

    Args:
        port: Posts.
        machine: Says what may be posted.

    Attributes:
        size: Bytes that wait and are not in the ring yet.
        progress: Counts messages that have completed.
    """

    __slots__ = (
        "_backlog", "_free", "_head", "_largest", "_machine", "_port", "_total", "_under_way",
        "progress", "size",
    )  # fmt: skip

    def __init__(self, port: StreamPort, machine: Machine) -> None:
        self._port = port
        self._machine = machine
        self._total = self._free = len(port.send)
        self._largest = max(1, self._total // _PARTS)
        self._head = 0
        self._under_way: deque[tuple[Post, int]] = deque()
        self._backlog: deque[memoryview] = deque()
        self.size = 0
        self.progress = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or keep for later; the caller may change `data` afterwards."""
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        done = 0
        if not self.size:
            while done < len(view) and (room := self._room()):
                done += self._send(view[done : done + room])
            if done == len(view):
                return
        rest = view[done:]
        if not isinstance(data, bytes):
            rest = memoryview(bytes(rest))
        self._backlog.append(rest)
        self.size += len(rest)

    def flush(self) -> bool:
        """Send as much of what waits as is possible now; whether any was."""
        before = self.size
        while self.size and (room := self._room()):
            self._send_backlog(min(room, self.size))
        return self.size != before

    def control(self) -> None:
        """Post the protocol's own messages that are due."""
        while (post := self._machine.next_control()) is not None:
            self._under_way.append((post, 0))
            self._port.post(post)

    def completed(self) -> None:
        """The oldest message has reached the peer's adapter."""
        post, length = self._under_way.popleft()
        self._free += length
        self.progress += 1
        self._machine.on_sent(post)

    def clear(self) -> None:
        """Forget what waits."""
        self._backlog.clear()
        self.size = 0

    def _room(self) -> int:
        """Bytes that the next message can carry."""
        return min(self._machine.room, self._free, self._total - self._head, self._largest)

    def _send(self, piece: memoryview) -> int:
        self._port.send[self._head : self._head + len(piece)] = piece
        return self._post(len(piece))

    def _send_backlog(self, length: int) -> None:
        ring, at, end = self._port.send, self._head, self._head + length
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
        self._post(length)

    def _post(self, length: int) -> int:
        post = self._machine.write(length)
        head = self._head
        self._head = (head + length) % self._total
        self._free -= length
        self._under_way.append((post, length))
        self._port.post(post, head)
        return length
