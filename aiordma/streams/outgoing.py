"""Outgoing: the bytes that a stream has still to send, from `write` to the completion.

Theory of operation
    Bytes go from the caller into a registered ring and from there to the peer, in C
    (`_core/stream.c`).  Bytes that do not fit wait here, in the backlog: small pieces are joined, a
    large piece is the caller's own `bytes` object or a copy.  The backlog is sent in messages as
    large as the ring, the peer's buffer and the limit allow, so that many small writes become few
    messages when the peer is slow.
"""

from __future__ import annotations

from collections import deque

from aiordma.rsocket.machine import Machine
from aiordma.streams.stream_port import StreamPort

__all__ = ["Outgoing"]

#: Bytes: a smaller piece is joined with the piece before it, until that has so many.
_SMALL = 4096
_JOINED = 1 << 16


class Outgoing:
    """The sending half of a stream.

    Args:
        port: Posts.
        machine: Posts the messages of the protocol.

    Attributes:
        size: Bytes that wait and are not in the ring yet.
        ended: The program has said that it sends no more.
        lasts: The program has closed the stream, and bytes still wait.
        late: Calls of `write` that came after the end.
        in_vain: A call of `write` came although the peer was known to have closed.
    """

    __slots__ = (
        "_backlog", "_machine", "_port", "_state", "ended", "in_vain", "lasts", "late", "size",
    )  # fmt: skip

    size: int
    late: int
    ended: bool
    lasts: bool
    in_vain: bool

    def __init__(self, port: StreamPort, machine: Machine) -> None:
        self._port = port
        self._state = port.state
        self._machine = machine
        self._backlog: deque[memoryview | bytearray] = deque()
        self.size = self.late = 0
        self.ended = self.lasts = self.in_vain = False

    def keep(self, data: bytes | bytearray | memoryview, sent: int) -> bool:
        """Keep unsent bytes, copied if `data` can change; return whether there are any."""
        if not sent and type(data) is bytes and len(data) < _SMALL:
            rest: bytes | memoryview = data
        else:
            view = memoryview(data)
            if view.format != "B" or view.ndim != 1:
                view = view.cast("B")
            rest = view[sent:]
        length = len(rest)
        if not length:
            return False
        if length < _SMALL:
            # An object for each of many small writes would be a hundred times their bytes.
            last = self._backlog[-1] if self._backlog else None
            if type(last) is bytearray and len(last) < _JOINED:
                last += rest
            else:
                self._backlog.append(bytearray(rest))
        else:
            self._backlog.append(memoryview(rest if type(data) is bytes else bytes(rest)))
        self.size += length
        return True

    def flush(self) -> bool:
        """Send as much of the backlog as is possible now; return whether any was sent."""
        before = self.size
        while self.size:
            offset, room = self._state.next_place()
            if room:
                self._send_backlog(offset, min(room, self.size))
            elif not self._port.memory.widen_send(self._state):
                break
        return self.size != before

    def control(self) -> None:
        """Post the protocol's own messages that are due."""
        self._port.check(self._machine.post_control())

    def clear(self) -> None:
        """Drop the backlog."""
        self._backlog.clear()
        self.size = 0

    def _send_backlog(self, at: int, length: int) -> None:
        ring = self._port.memory.send
        end = at + length
        while at < end:
            first = self._backlog[0]
            count = min(len(first), end - at)
            with memoryview(first) as view:
                ring[at : at + count] = view[:count]
            at += count
            if count == len(first):
                self._backlog.popleft()
            elif type(first) is bytearray:
                del first[:count]
            else:
                self._backlog[0] = first[count:]
        self.size -= length
        self._port.check(self._state.send_from_ring(length))
