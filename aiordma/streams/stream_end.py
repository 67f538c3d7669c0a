"""StreamEnd: the wait for sent bytes at a stream's end, and how the connection is ended.

After an end in the band the peer needs no other, so the queue pair goes to the error state at once;
otherwise the connection manager disconnects.  On iWARP it always does: a hard end would lose bytes
that the adapter has taken and not yet delivered.
"""

from __future__ import annotations

import errno

from aiordma.errors import ConnectionLostError, lost_error
from aiordma.link.ending import Ending, LastSteps
from aiordma.logs import log_of
from aiordma.rsocket.machine import Machine
from aiordma.streams.stream_config import StreamConfig
from aiordma.streams.stream_port import StreamPort

__all__ = ["StreamEnd", "lost", "vanished"]

_log = log_of("stream")


def lost(cause: BaseException) -> BaseException:
    """The exception for a program whose connection ended for this cause."""
    if isinstance(cause, ConnectionLostError):
        return cause
    return lost_error(cause)


def vanished() -> ConnectionLostError:
    """The exception for a peer that disconnected without sending the end of its stream."""
    text = "the peer disconnected without an end of the stream: its process ended, or it aborted"
    error = ConnectionLostError(errno.ECONNRESET, text)
    error.hint = (
        "did the peer's process end, by a signal perhaps? see its exit status, and its log: its "
        "library may have found that this side broke the protocol"
    )
    return error


class StreamEnd:
    """The end of one stream: its cause, its word in the band, and the wait for sent bytes.

    Args:
        port: The adapter's side.
        machine: Knows whether the end was sent in the band.
        config: Times.

    Attributes:
        cause: The reason of the loss, or None; not a failure if the end was announced before.
        said: Whether this side sends the end in the band, behind the posted bytes.
        leaving: Whether the loop ends, and the stream only waits for the posted bytes.
    """

    __slots__ = (
        "_arrived", "_config", "_ending", "_linger_s", "_machine", "_port", "cause", "leaving",
        "said",
    )  # fmt: skip

    said: bool
    leaving: bool

    def __init__(self, port: StreamPort, machine: Machine, config: StreamConfig) -> None:
        self._port = port
        self._machine = machine
        self._config = config
        self._ending = Ending(port)
        self._linger_s: float | None = None
        self._arrived = False
        self.cause: BaseException | None = None
        self.said = self.leaving = False

    def say(self) -> None:
        """Announce the end behind the posted bytes; the caller posts it."""
        if not self.said:
            self.said = True
            self._machine.disconnect()

    def peer_left(self) -> None:
        """The connection manager has reported that the connection is down."""
        self._ending.peer_left()

    def arrived(self) -> None:
        """The peer's adapter has all bytes that it will ever have."""
        self._arrived = True
        self._ending.wake()

    def hurry(self, linger_s: float | None = None) -> float:
        """Limit the wait for `arrived` to so many seconds, by default `StreamConfig.linger_s`.

        Returns:
            The seconds, which the first call decides.
        """
        if self._linger_s is None:
            self._linger_s = self._config.linger_s if linger_s is None else linger_s
        return self._linger_s

    def begin(self) -> None:
        """Close the connection once the posted bytes have arrived; idempotent."""
        self._ending.begin(LastSteps(self._leave))

    async def wait(self) -> None:
        """Wait until everything was given back.  Cancellation: ends the wait."""
        await self._ending.wait()

    async def _leave(self) -> bool:
        await self._linger()
        return not self._machine.disconnected or self._port.context.is_iwarp

    async def _linger(self) -> None:
        """Let the posted bytes arrive."""
        port, ending = self._port, self._ending
        progress = port.state.progress
        while not (self._arrived or self._machine.disconnected or ending.left or port.failure):
            if ending.canceled:
                self.hurry()
            short = self._linger_s
            if short == 0:
                return
            if await ending.event(self._config.close_timeout_s if short is None else short):
                continue
            moved, progress = progress != port.state.progress, port.state.progress
            if short is not None or not moved:
                _log.info("queue pair %d: sent bytes have not arrived", port.qp.num)
                return
