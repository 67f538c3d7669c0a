"""TransportBase: what a stream transport tells of itself, and asyncio's own part of it."""

from __future__ import annotations

from asyncio import constants, transports
from collections.abc import Callable
from typing import Any

from aiordma.link.ending import Ending
from aiordma.rsocket.machine import Machine
from aiordma.streams.incoming import Incoming
from aiordma.streams.iomap import StreamIomap
from aiordma.streams.outgoing import Outgoing
from aiordma.streams.stream_port import StreamPort

__all__ = ["TransportBase"]


# The base class is where asyncio keeps `pause_writing` and its water marks, and what its
# `loop.sendfile` asks for.
class TransportBase(transports._FlowControlMixin):
    """The parts of `RdmaTransport` that decide nothing."""

    # What the base class has and its type stub does not tell.
    _extra: dict[str, Any]
    _maybe_pause_protocol: Callable[[], None]
    _maybe_resume_protocol: Callable[[], None]
    _protocol_paused: bool

    _start_tls_compatible = True  # for loop.start_tls
    _sendfile_compatible = constants._SendfileMode.FALLBACK

    _closing: bool
    _ending: Ending
    _in: Incoming
    _machine: Machine
    _out: Outgoing
    _over: bool
    _port: StreamPort
    _protocol: Any

    def writelines(self, list_of_data: Any) -> None:
        """Send all of `list_of_data`, an iterable of bytes-like objects, joined."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """Yes."""
        return True

    def get_write_buffer_size(self) -> int:
        """Bytes that wait; those that the adapter has been given do not count."""
        return self._out.size

    def is_closing(self) -> bool:
        """Whether the end has begun."""
        return self._closing

    def is_reading(self) -> bool:
        """Whether the protocol is given bytes as they come."""
        return not self._closing and not self._in.paused

    def get_protocol(self) -> Any:
        """The protocol that is called."""
        return self._protocol

    @property
    def iomap(self) -> StreamIomap:
        """Memory that the two ends name to each other and write to, past the stream."""
        return StreamIomap(self._port, self._machine, self._out.control)

    def __repr__(self) -> str:
        state = "closed" if self._over else "closing" if self._closing else "open"
        peer = self._extra.get("peername")
        return f"<RdmaTransport {state} peer={peer} device={self._port.context.name}>"

    async def wait_closed(self) -> None:
        """Wait until the adapter holds nothing of the connection any more; bounded after the end.

        asyncio's transports have no such method: their descriptors are closed at once.

        Cancellation: ends the wait.
        """
        await self._ending.wait()
