"""The byte channels between a guest and the runner; none of them ever blocks the runner."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Mapping
from typing import Any

from .errors import InfrastructureError
from .terminal import Escape

#: Atomic for a pipe, so that a write that `poll` allows never blocks.
_CHUNK = select.PIPE_BUF

#: Bytes to a device that the guest has not read. The device is a terminal, which throttles its
#: source when too many wait; with so few it never does.
_AHEAD = 3072


class Output:
    """One stream from the guest to a descriptor of the runner, with at most one chunk in between.

    It never blocks, so a reader that stops reading cannot hold up signals and the time limit; the
    guest is held up instead.
    """

    def __init__(self, source: socket.socket, target: int) -> None:
        self.source = source
        self.target = target
        self.open: bool = True
        self.received: int = 0
        self._pending = b""

    @property
    def idle(self) -> bool:
        """Whether everything that came in has gone out."""
        return not self._pending

    def interest(self) -> tuple[int, int]:
        """Return the descriptor and the event to wait for."""
        if self._pending:
            return self.target, select.POLLOUT
        return self.source.fileno(), select.POLLIN

    def step(self) -> None:
        """Move as many bytes as is possible, once the event is there.

        Raises:
            BrokenPipeError: the reader is gone.
            InfrastructureError: the output cannot be written.
        """
        if self._pending:
            try:
                self._pending = self._pending[os.write(self.target, self._pending[:_CHUNK]) :]
            except BlockingIOError:
                # A terminal whose other user has made it non-blocking; `poll` reports it writable.
                return
            except BrokenPipeError:
                raise
            except OSError as error:
                raise InfrastructureError(
                    f"the output of the command cannot be written: {error.strerror}"
                ) from None
            return
        self._pending = receive(self.source)
        self.received += len(self._pending)
        if not self._pending:
            self.open = False


class Input:
    """Standard input of the runner on its way to the guest, with at most one chunk in between.

    The guest gets frames, a length of four bytes and so many bytes; the frame of length 0 is the
    end. The end of the channel itself would be the end of the guest's device.

    Attributes:
        open: the source has not ended.
        escaped: the user wants the run to end.
        taken: bytes of frames that the guest says it has read; the owner keeps it.
    """

    def __init__(self, source: int, channel: socket.socket, escape: Escape | None) -> None:
        """Begin with an empty chunk.

        Args:
            source: the descriptor to read.
            channel: gets the frames.
            escape: told of each key, if the source is a terminal.
        """
        self._source = source
        self._channel = channel
        self._escape = escape
        self._pending = b""
        self._framed = 0  # bytes of all frames
        self.open: bool = True
        self.escaped: bool = False
        self.taken: int = 0

    @property
    def _room(self) -> int:
        """Bytes of the next frame, without its length."""
        return _AHEAD - (self._framed - self.taken) - 4

    def interest(self) -> tuple[int, int] | None:
        """Return the descriptor and the event to wait for.

        None after the end, and while the guest has as much to read as it can hold.
        """
        if self._pending:
            return self._channel.fileno(), select.POLLOUT
        return (self._source, select.POLLIN) if self.open and self._room > 0 else None

    def step(self) -> None:
        """Move as many bytes as is possible, once the event is there."""
        if self._pending:
            try:
                sent = self._channel.send(self._pending, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # The guest is gone, which is told elsewhere.
                self._pending, self.open = b"", False
                return
            self._pending = self._pending[sent:]
            return
        try:
            data = os.read(self._source, self._room)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal that has been hung up
        self.open = bool(data)
        self.escaped |= self._escape is not None and self._escape.add(data)
        self._pending = len(data).to_bytes(4, "big") + data
        self._framed += len(self._pending)


def receive(source: socket.socket) -> bytes:
    """Return the bytes that have arrived, or none when the other end has gone."""
    try:
        return source.recv(65536)
    except ConnectionResetError:
        # A guest that was killed leaves unread bytes of ours behind.
        return b""


class Control:
    """The conversation with `guest_init.py`, whose head describes it.

    Attributes:
        open: the guest has not closed its end.
        ready: its first process runs.
        started: the command is about to run.
        status: that of the command, once it has ended.
        counts: bytes of standard output and standard error that belong to the status.
        error: the reason why the command could not be run.
        taken: bytes of the runner's input that the guest has read.
    """

    def __init__(self, channel: socket.socket, request_line: bytes) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._request = request_line
        self._incoming = bytearray()
        self._outgoing = b""
        self._sent = self._read = 0  # bytes; those that the guest says it has read
        self.open: bool = True
        self.ready: bool = False
        self.started: bool = False
        self.status: int | None = None
        self.counts: list[int] = [0, 0]
        self.error: str | None = None
        self.taken: int = 0

    def interest(self) -> int:
        """Return the events to wait for."""
        return select.POLLIN | (select.POLLOUT if self._outgoing and self._room else 0)

    @property
    def _room(self) -> int:
        """Bytes that the guest's device has room for."""
        return _AHEAD - (self._sent - self._read)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; `step` sends it."""
        self._outgoing += json.dumps(message).encode() + b"\n"

    def step(self) -> None:
        """Receive and send as much as is possible without blocking."""
        try:
            data = self._channel.recv(65536)
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.open = False
        else:
            if not data:
                self.open = False
            self._incoming += data
        self._handle_lines()
        if self._outgoing and self._room and self.open:
            try:
                sent = self._channel.send(self._outgoing[: self._room])
                self._outgoing = self._outgoing[sent:]
                self._sent += sent
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # Not the reader of our output, whose going away is a verdict of its own.
                self.open = False

    def _handle_lines(self) -> None:
        while b"\n" in self._incoming:
            line, _, rest = self._incoming.partition(b"\n")
            self._incoming = rest
            message = json.loads(line)
            if "ready" in message:
                self.ready = True
                self._outgoing += self._request
            self.started |= "started" in message
            self.status = message.get("exit", self.status)
            self.counts = message.get("bytes", self.counts)
            self.error = message.get("error", self.error)
            self.taken += message.get("taken", 0)
            self._read += message.get("read", 0)
