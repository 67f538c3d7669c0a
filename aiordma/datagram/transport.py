"""RdmaDatagramTransport: asyncio's DatagramTransport over a queue pair of type UD.

Theory of operation
    `sendto` copies the datagram into a send slot or into the outbox (datagram/outbox.py), whose
    water marks pause the protocol; beyond `max_buffer_size` a datagram is dropped and reported.

    A datagram that arrives stays in its receive slot until the loop's next turn, which takes at
    most `_BUDGET` datagrams, so that other tasks run in between.  Then the datagram is copied, its
    slot is posted again, and the protocol is called.  That is outside of the dispatch of
    completions, so that the protocol may close any object.

    It ends once, by close(), abort() or failure.  `connection_lost` follows a turn later.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import time
import warnings
from asyncio import transports
from collections import deque
from collections.abc import Callable
from typing import Any

from aiordma.arguments import seconds_left
from aiordma.cm.address import Address
from aiordma.cm.multicast import group_host
from aiordma.datagram.config import DatagramConfig, Key, key_of
from aiordma.datagram.groups import Groups
from aiordma.datagram.outbox import Outbox
from aiordma.datagram.port import DatagramPort
from aiordma.errors import MessageTooLargeError, errno_error, lost_error, prefix_address
from aiordma.link.adapter_side import reason_of
from aiordma.link.tally import DatagramCounts
from aiordma.link.transport_socket import RdmaTransportSocket, shown
from aiordma.logs import log_of
from aiordma.loop import background, fork
from aiordma.loop.raised import ENDS_THE_LOOP
from aiordma.loop.running import check_loop, check_thread, from_finalizer, running_loop
from aiordma.loop.uncopied import Uncopied
from aiordma.verbs.ah import GRH
from aiordma.verbs.wc import WCRecord

__all__ = ["RdmaDatagramTransport"]

_log = log_of("datagram")
CLOSE_TIMEOUT_S = 5.0  # until sent datagrams have left
_BUDGET = 64  # datagrams for the program before other tasks have a turn
_WARN_AFTER = 5  # calls of sendto() after the end
_MOST_KEYS = 4096
_WHAT = "datagram transport"


# As in asyncio, the first base class has `pause_writing` and the water marks.
class RdmaDatagramTransport(Uncopied, transports._FlowControlMixin, asyncio.DatagramTransport):
    """An endpoint for datagrams; made by `create_datagram_endpoint`.

    As with UDP, a datagram arrives whole and sound, or not at all.  It is lost silently if the
    receiver has no room or is gone, or on the way; the network may also duplicate or reorder
    datagrams.

    `get_extra_info` knows `sockname`, `peername`, `device`, `port` (of the device), `gid`,
    `link_layer`, `transport`, `mtu`, `qpn`, `provider`, `backend`, `number` (in `aiordma.metrics`),
    `opened_at` (seconds since 1970) and `socket`, which is an `RdmaTransportSocket`.
    """

    __slots__ = (
        "__weakref__", "_closing", "_copied", "_counts", "_default", "_ended", "_groups",
        "_info", "_keys", "_lost", "_mtu", "_outbox", "_over", "_peername", "_port", "_protocol",
        "_received", "_scheduled", "_timer",
    )  # fmt: skip

    # Attributes of the base class that its type stub does not have.
    _loop: asyncio.AbstractEventLoop
    _maybe_pause_protocol: Callable[[], None]
    _maybe_resume_protocol: Callable[[], None]

    def __init__(
        self, loop: asyncio.AbstractEventLoop, port: DatagramPort, config: DatagramConfig
    ) -> None:
        self._info = {**port.describe(), "sockname": port.sockname, "peername": None}
        self._info |= {"number": port.number, "opened_at": time.time()}
        self._info["socket"] = RdmaTransportSocket(port.sockname, None, socket.SOCK_DGRAM)
        super().__init__(self._info, loop)
        self._port = port
        self._mtu = port.mtu
        self._groups = Groups(port)
        self._default: Key | None = None  # where datagrams without an address go
        self._peername: Address | None = None
        self._protocol: Any = None
        self._counts = DatagramCounts()
        self._outbox = Outbox(port, self._groups, config, self._counts, self._error, self._on_moved)
        self._received: deque[tuple[int, WCRecord]] = deque()
        self._copied: deque[tuple[bytes, GRH, WCRecord]] = deque()  # out of their slots
        self._scheduled = False
        self._keys: dict[Any, Key] = {}
        self._closing = False
        self._ended = False
        self._lost = 0
        self._timer: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = loop.create_future()
        port.at_close(self._counts.end)
        try:
            port.start(self)
        except BaseException:
            self._ended = True  # nobody has it, to close it
            port.close()
            raise
        fork.guard(self)
        fork.guard_public(self)

    # Set-up, by create_datagram_endpoint

    async def _connect(self, address: Address) -> None:
        """Send to this address only; `sendto` then needs none."""
        key = key_of(address)
        await self._outbox.destinations.find(key)
        self._default = key
        self._peername = (key[1], address[1])
        self._info["peername"] = self._peername
        self._info["socket"] = RdmaTransportSocket(
            self._port.sockname, self._peername, socket.SOCK_DGRAM
        )

    async def _start(self, protocol: Any) -> None:
        """Call `connection_made`, then begin to receive."""
        if self._port.failure is not None:  # `connection_lost` would come before, or never
            raise lost_error(self._port.failure)
        self.set_protocol(protocol)
        started = self._loop.create_future()
        self._loop.call_soon(protocol.connection_made, self)
        self._loop.call_soon(self._listen, started)
        try:
            await started
        finally:
            del started  # its exception has this frame: a cycle

    def _listen(self, started: asyncio.Future[None]) -> None:
        try:
            if not self._closing:
                self._port.receive()
        except OSError as exc:
            prefix_address(exc, *self._port.sockname[:2])
            if not started.done():
                started.set_exception(exc)
            return
        if not started.done():
            started.set_result(None)

    # Sending

    def sendto(self, data: Any, addr: Any = None) -> None:
        """Send a datagram; never blocks.

        Args:
            data: Bytes, at most `get_extra_info("mtu")`; copied before the call returns.
            addr: Numeric (host, port) of a service or a multicast group; or the address that came
                with a datagram, to answer it; None on a connected endpoint.

        A datagram that cannot be sent at once waits in the buffer: see `get_write_buffer_size` and
        the protocol's `pause_writing`.  Failures that are found later, such as a port on which no
        program listens, are reported to the protocol's `error_received`.

        Raises:
            TypeError: `data` is not bytes-like, or `addr` is not an address.
            ValueError: There is no address, or the endpoint is connected to another address.
            MessageTooLargeError: `data` is longer than the port's MTU; it is also a ValueError.
            RuntimeError: The transport's loop runs in another thread; so for all calls here.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            msg = f"data argument must be a bytes-like object, not {type(data).__name__!r}"
            raise TypeError(msg)
        key = self._key(addr)
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        if size > self._mtu:
            msg = f"a datagram of {size} bytes is longer than the port's MTU of {self._mtu}"
            raise MessageTooLargeError(msg)
        if self._closing:
            if self._port.forked:
                raise fork.forked_error(type(self).__name__)
            self._lost += 1
            if self._lost == _WARN_AFTER:
                _log.warning("sendto() on a closed datagram transport")
            return
        if running_loop() is not self._loop:
            check_thread(self._loop, _WHAT)
        if isinstance(data, memoryview):
            data = data.cast("B") if data.c_contiguous else bytes(data)
        self._outbox.send(data, key)

    def _key(self, addr: Any) -> Key:
        if self._peername is not None:
            if addr is not None and tuple(addr)[:2] != self._peername:
                msg = f"Invalid address: must be None or {self._peername}"
                raise ValueError(msg)
            assert self._default is not None
            return self._default
        if addr is None:
            msg = "the endpoint is not connected: sendto() needs an address"
            raise ValueError(msg)
        try:
            return self._keys[addr]
        except (KeyError, TypeError):
            key = key_of(addr)
        if len(self._keys) >= _MOST_KEYS:
            self._keys.clear()
        self._keys[addr] = key
        return key

    def _on_sent(self) -> None:
        if self._outbox.waiting:
            self._outbox.flush()
        elif self._closing:
            self._on_moved()

    def _on_moved(self) -> None:
        self._maybe_pause_protocol()
        self._maybe_resume_protocol()
        if self._closing and self._outbox.empty:
            self._end(None)

    def _on_restarted(self, cause: OSError, lost: int) -> None:
        """Report the posted datagrams as lost, and go on."""
        self._counts.dropped += lost
        self._error(cause)
        self._outbox.flush()

    def _error(self, exc: OSError) -> None:
        if not self._ended:
            self._call("error_received", exc)

    # Receiving

    def _on_received(self, slot: int, record: WCRecord) -> None:
        """Take a receive from the dispatch; the protocol is called in the loop's next turn."""
        self._received.append((slot, record))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        if self._closing:
            return
        batch = [self._received.popleft() for _ in range(min(_BUDGET, len(self._received)))]
        for slot, record in batch:
            view = self._port.received(slot, record[4])
            grh = GRH.parse(view)
            self._copied.append((bytes(view[GRH.SIZE :]), grh, record))
        self._port.post_recv([slot for slot, _ in batch])
        try:
            self._hand_over()
        finally:
            # Also when the protocol has ended the loop, which may run again.
            if (self._received or self._copied) and not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._deliver)

    def _hand_over(self) -> None:
        while self._copied:
            data, grh, record = self._copied.popleft()
            source = self._outbox.destinations.source(grh, record)
            if self._closing:
                return
            if self._is_for_us(grh, source):
                self._counts.received += 1
                self._counts.bytes_received += len(data)
                self._call("datagram_received", data, source)
            else:
                self._counts.ignored += 1

    def _is_for_us(self, grh: GRH, source: Any) -> bool:
        # A group's datagrams from before it was left may still be here.
        if grh.is_multicast and not self._groups.receives(grh.dgid):
            return False
        # As with UDP, a connected endpoint receives from its peer and no other.
        if self._default is not None and self._default[0] == "service":
            return bool(source[:2] == self._default[1:])
        return True

    def _call(self, name: str, *args: Any) -> None:
        """Call a method of the protocol; the loop reports an exception, as for asyncio's own."""
        try:
            getattr(self._protocol, name)(*args)
        except ENDS_THE_LOOP:
            raise
        except BaseException as exc:
            self._loop.call_exception_handler({
                "message": f"protocol.{name}() failed",
                "exception": exc,
                "transport": self,
                "protocol": self._protocol,
            })  # fmt: skip

    # Groups

    async def join_group(
        self, group: str | Address, *, send_only: bool = False, timeout: float = 5.0
    ) -> None:
        """Receive the datagrams of a multicast group (`rdma_join_multicast_ex(3)`).

        The endpoint's own datagrams to the group arrive here, too.  Sending to a group needs no
        call: `sendto` joins as a member that only sends.

        Args:
            group: Numeric IPv4 address of the group.
            send_only: Become a member that only sends; a full member stays a full member.
            timeout: Seconds.

        Raises:
            ValueError: Not a multicast address.
            NotSupportedError: An IPv6 group on RoCE v2.
            ConnectionFailedError: The network refused.
            TimeoutError: The network did not answer.

        Cancellation: the group is left again.
        """
        timeout = seconds_left("timeout", timeout)
        self._refuse_if_closing()
        await self._groups.join(group_host(group), send_only=send_only, timeout=timeout)

    async def leave_group(self, group: str | Address, *, timeout: float = 5.0) -> None:
        """Stop receiving from a multicast group, at once (`rdma_leave_multicast(3)`).

        Args:
            group: Its address.
            timeout: Seconds to wait for the connection manager.

        Raises:
            ValueError: Not a multicast address.
            OSError: EADDRNOTAVAIL, the endpoint is not a member.

        Cancellation: ends the wait; the group is left all the same.
        """
        timeout = seconds_left("timeout", timeout)
        self._refuse_if_closing()
        host = group_host(group)
        self._outbox.destinations.drop(("group", host, 0))
        await self._groups.leave(host, timeout=timeout)

    def _refuse_if_closing(self) -> None:
        check_loop(self._loop, _WHAT)
        if self._closing:
            msg = "the datagram transport is closed"
            raise errno_error(errno.EBADF, msg)

    # Flow control, as of asyncio.WriteTransport

    def get_write_buffer_size(self) -> int:
        """Bytes that wait to be sent, plus 8 for each datagram.

        Answers to senders whose next hop is not known yet do not count: any host can cause them.
        """
        return self._outbox.size

    def set_protocol(self, protocol: Any) -> None:
        """Call another protocol from now on."""
        self._protocol = protocol

    def get_protocol(self) -> Any:
        """The protocol that is called."""
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """A fact about the endpoint, by `name`; `default` for a name that is unknown."""
        fact = super().get_extra_info(name, default)
        return fact if fact is default else shown(name, fact)

    # End

    def is_closing(self) -> bool:
        """Whether the transport is closing or closed."""
        return self._closing

    def close(self) -> None:
        """Receive no more, send the datagrams that wait, then end; idempotent.

        `connection_lost(None)` follows.  A datagram that has not left within 5 seconds is lost.

        Raises:
            RuntimeError: The transport's loop runs in another thread.
        """
        check_thread(self._loop, _WHAT)
        if self._closing:
            return
        self._closing = True
        if not background.at_end(self._loop, self.abort):
            self.abort()  # the loop is ending: the transport cannot wait for completions
            return
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._end, None)
        self._on_moved()

    def abort(self) -> None:
        """End at once; datagrams that wait are lost.  `connection_lost(None)` follows.

        Raises:
            RuntimeError: The transport's loop runs in another thread.
        """
        check_thread(self._loop, _WHAT)
        self._closing = True
        self._end(None)

    def _on_failed(self) -> None:
        """End the transport: the queue pair or the device has failed."""
        cause = self._port.failure
        if self._ended or cause is None:
            return
        if not isinstance(cause, OSError):
            self._loop.call_exception_handler(
                {"message": "datagram endpoint failed", "exception": cause, "transport": self}
            )
        self._closing = True
        self._end(cause)

    def _end(self, cause: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        background.forget(self._loop, self.abort)
        if self._timer is not None:
            self._timer.cancel()
        self._outbox.clear()
        self._received.clear()
        self._copied.clear()
        self._loop.call_soon(self._report_end, cause)

    def _report_end(self, cause: BaseException | None) -> None:
        try:
            if self._protocol is not None:
                self._call("connection_lost", cause)
        finally:
            self._port.close()
            if not self._over.done():
                self._over.set_result(None)

    def poison_after_fork(self) -> None:
        """In a forked child: have a kept bound method `sendto` refuse, too."""
        self._closing = True

    async def wait_closed(self) -> None:
        """Wait until the adapter has released all that the endpoint used; bounded after the end.

        asyncio's transports have no such method: their descriptors are closed at once.

        Cancellation: ends the wait.
        """
        await asyncio.shield(self._over)
        await self._port.wait_closed()

    @property
    def _stage(self) -> str:
        return "closed" if self._ended else "closing" if self._closing else "open"

    def _seen(self) -> dict[str, Any]:
        """The endpoint as `aiordma.metrics` shows it; in any thread, without a C call."""
        port, cause = self._port, self._port.failure
        counts = self._counts.read()
        return {
            **self._info,
            "state": self._stage,
            "cause": None if cause is None else reason_of(cause),
            "datagrams_sent": counts["sent"],
            "bytes_sent": counts["bytes_sent"],
            "datagrams_received": counts["received"],
            "bytes_received": counts["bytes_received"],
            "dropped": counts["dropped"],
            "ignored": counts["ignored"],
            "waiting_to_be_received": len(self._received) + len(self._copied),
            "waiting_to_be_sent": self._outbox.held,
            "pinned_bytes": 0 if port.closed else port.pinned_bytes,
        }

    def __repr__(self) -> str:
        state = self._stage
        peer = f" to {self._peername}" if self._peername else ""
        return f"<RdmaDatagramTransport {state} {self.get_extra_info('sockname')}{peer}>"

    def __del__(
        self, _warn: Callable[..., None] = warnings.warn, _gone: Any = sys.is_finalizing
    ) -> None:
        if getattr(self, "_ended", True) or _gone():
            return
        try:
            _warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=1)
        finally:
            from_finalizer(self._loop, self._port.close)
