"""DatagramPort: the adapter's side of a datagram endpoint.

Theory of operation
    One queue pair of type UD serves the endpoint, whatever its peers.  Three kinds of ids stand
    around it:

    - the home id, bound to the local address, gives the queue pair its port and its key, and is
      the member of multicast groups;
    - the listener, if the endpoint has an address of its own, answers each request with the number
      of the queue pair, and forgets it: no request costs anything afterwards;
    - destinations ask with ids of their own (datagram.destinations).

    As with connections, one entry of the channel's slot table serves all, and the sub-index of a
    wr_id tells the slot.

    A receive slot belongs to the endpoint until it has looked at the datagram, and only then goes
    back to the adapter.  So what waits for the program is bounded, and what finds no receive posted
    is dropped by the adapter, as it is the way of datagrams.

    A send that cannot leave, because the network device is down or the route is gone, puts the
    queue pair into the error state.  A datagram endpoint does not end with a datagram: when
    everything posted has come back, the queue pair is reset, and begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Iterable
from typing import Any

from aiordma.cm.address import Address
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.description import describe
from aiordma.cm.enums import EventType, PortSpace
from aiordma.cm.event_channel import EventChannel
from aiordma.datagram.config import DatagramConfig
from aiordma.datagram.slots import RECV, RecvSlots, SendSlots
from aiordma.errors import NotSupportedError, cm_error, completion_error, os_error, plain_error
from aiordma.link.dialing import shared_channel
from aiordma.loop import fork
from aiordma.loop.slots import SUB_SHIFT
from aiordma.loop.workers import call_blocking
from aiordma.verbs.ah import GRH, AddressHandle
from aiordma.verbs.comp_channel import CompletionChannel, shared_completions
from aiordma.verbs.context import Context
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import QPAttrMask, QPState, QPType
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.resource import Resource
from aiordma.verbs.wc import WCRecord

__all__ = ["DatagramPort"]

_log = logging.getLogger("aiordma")
_DESTROY_S = 5.0
_FLUSH_GRACE_S = 0.5


async def _memory(pd: ProtectionDomain, size: int) -> MemoryRegion:
    """Pinning takes time with the size, so it is done off the loop."""
    return await call_blocking(lambda: MemoryRegion(pd, size), undo=MemoryRegion.close)


class DatagramPort:
    """Queue pair, slots and ids of one endpoint; made by `open`.

    Attributes:
        channel: The event channel of its ids.
        home: The id that is bound to the local address.
        mtu: Bytes that a datagram may have.
    """

    __slots__ = (
        "__weakref__", "_base", "_cause", "_completions", "_cq", "_listener", "_loop",
        "_on_failed", "_on_received", "_on_restarted", "_on_sent", "_qp_handle", "_recv",
        "_releases", "_send", "_timer", "channel", "closed", "context", "home", "mtu", "pd", "qp",
    )  # fmt: skip

    def __init__(self, channel: EventChannel, home: ConnectionId, context: Context) -> None:
        self.channel = channel
        self.home = home
        self.context = context
        self.closed = False
        self._base = 0
        self._listener: ConnectionId | None = None
        self._loop = asyncio.get_running_loop()
        self._cause: OSError | None = None  # why there has to be a new beginning
        self._timer: asyncio.TimerHandle | None = None
        self._releases: list[Callable[[], None]] = []
        self.mtu = context.query_port(home.port_num).active_mtu.in_bytes

    # What `open` sets.
    pd: ProtectionDomain
    qp: QueuePair
    _completions: CompletionChannel
    _cq: CompletionQueue
    _recv: RecvSlots
    _send: SendSlots

    @classmethod
    async def open(
        cls, host: str, listen_on: Address | None, config: DatagramConfig
    ) -> DatagramPort:
        """Allocate everything on the device that has the address `host`.

        Args:
            host: Numeric local address of a device.
            listen_on: Where clients can ask for the endpoint; None for nowhere.
            config: Depths.

        Raises:
            NotSupportedError: The device speaks iWARP.
            OSError: No device has the address, the port is taken, or out of resources.

        Cancellation: what was made is destroyed.
        """
        with contextlib.ExitStack() as undo:
            channel, release = shared_channel()
            undo.callback(release)
            home = ConnectionId(channel, PortSpace.UDP)
            undo.callback(home.close)
            home.bind_addr((host, 0))
            context = home.context
            assert context is not None
            if context.is_iwarp:
                msg = f"{context.name} speaks iWARP, which has no datagrams"
                raise NotSupportedError(errno.EOPNOTSUPP, msg)
            port = cls(channel, home, context)
            await port._build(config, undo)
            if listen_on is not None:
                port._listener = ConnectionId(channel, PortSpace.UDP)
                undo.callback(port._listener.close)
                port._listener._sink = port._on_request
                port._listener.bind_addr(listen_on)
            undo.pop_all()
        port._releases.append(release)
        fork.guard(port)
        return port

    async def _build(self, config: DatagramConfig, undo: contextlib.ExitStack) -> None:
        context = self.context
        self._completions, release = shared_completions(context)
        undo.callback(release)
        self._releases.append(release)
        self.pd = ProtectionDomain(context)
        undo.callback(self.pd.close)
        room = GRH.SIZE + self.mtu
        incoming = await _memory(self.pd, config.recv_depth * room)
        undo.callback(incoming.close)
        self._recv = RecvSlots(incoming, config.recv_depth, room)
        outgoing = await _memory(self.pd, config.send_depth * self.mtu)
        undo.callback(outgoing.close)
        self._send = SendSlots(outgoing, config.send_depth, self.mtu)
        depth = config.recv_depth + config.send_depth
        self._cq = CompletionQueue(context, depth, self._completions)
        undo.callback(self._cq.close)
        attr = QPInitAttr(
            send_cq=self._cq, max_send_wr=config.send_depth, max_recv_wr=config.recv_depth,
            qp_type=QPType.UD,
        )  # fmt: skip
        self.qp = self.home.create_qp(self.pd, attr, (incoming, outgoing))
        undo.callback(self.qp.close)
        self._qp_handle = self.qp._require()

    def start(
        self,
        on_received: Callable[[int, WCRecord], None],
        on_sent: Callable[[], None],
        on_restarted: Callable[[OSError], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """Set the handlers; from now on datagrams can be sent."""
        self._on_received = on_received
        self._on_sent = on_sent
        self._on_restarted = on_restarted
        self._on_failed = on_failed
        self._base = self._completions.table.add(self)
        self.home._sink = self._on_home_event
        self._cq.manage()

    def receive(self) -> None:
        """Post all receives, and let clients ask."""
        self.post_recv(range(self._recv.count))
        if self._listener is not None:
            self._listener.listen(0)

    @property
    def sockname(self) -> Address:
        """Local (address, port); the port can be asked for if the endpoint has its own address."""
        bound = self._listener or self.home
        source = bound.source
        assert source is not None
        return source

    # Completions

    def __call__(self, record: WCRecord) -> None:
        """One of its requests has completed."""
        sub = (record[0] >> SUB_SHIFT) & 0xFFFF
        slot, good = sub & ~RECV, not record[1]
        if sub & RECV:
            self._recv.filled(slot)
            if good:
                self._on_received(slot, record)
            else:
                self._recv.keep((slot,))
        else:
            self._send.done(slot)
            if good:
                self._on_sent()
        if not good:
            self._break(sub, record)
        if self._cause is not None and not self._recv and not self._send:
            self._loop.call_soon(self._restart)

    def _break(self, sub: int, record: WCRecord) -> None:
        """The queue pair is in the error state, and all that is posted comes back."""
        if self._cause is not None or self.closed:
            return
        operation = "receive" if sub & RECV else "send"
        first = completion_error(
            record[1], operation=operation, vendor_err=record[3], qp_num=record[6]
        )
        # Soft-RoCE flushes even the request that failed, so that the status tells little.
        text = f"a datagram could not leave ({first.status_name}): `ip link`, `ip route`"
        self._cause = plain_error(errno.ENETDOWN, text)
        self._cause.__cause__ = first
        self._timer = self._loop.call_later(_FLUSH_GRACE_S, self._restart)

    def _restart(self) -> None:
        cause, self._cause = self._cause, None
        if cause is None or self.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        try:
            self.qp.modify(QPAttrMask.STATE, qp_state=QPState.RESET)
            self.home._start_qp(self.qp)
        except OSError as exc:
            self.fail(exc)
            return
        # Completions from before the reset that arrive late belong to no slot.
        self._completions.table.remove(self._base)
        self._base = self._completions.table.add(self)
        self._send.all_done()
        self.post_recv(self._recv.take_all())
        self._on_restarted(cause)

    def fail(self, cause: BaseException) -> None:
        """The queue pair can do nothing more."""
        if not self.closed:
            self._on_failed(cause)

    # Posting

    @property
    def sending(self) -> int:
        """Datagrams that the adapter has."""
        return len(self._send)

    def post_send(self, data: Any, ah: AddressHandle, qpn: int, qkey: int) -> bool:
        """Copy a datagram and send it; False if no send slot is free now.

        Args:
            data: Contiguous bytes, at most `mtu`.
            ah: The way to the receiver.
            qpn: Its queue pair.
            qkey: Its key.
        """
        if self._send.full or self.closed or self._cause is not None:
            return False
        code = self._send.post(self._qp_handle, self._base, data, ah, qpn, qkey)
        if code:
            self.fail(os_error(code, "ibv_post_send"))
        return True

    def post_recv(self, slots: Iterable[int]) -> None:
        """Give receive slots to the adapter, in one chain."""
        if self.closed:
            return
        if self._cause is not None:
            self._recv.keep(slots)
            return
        code = self._recv.post(self._qp_handle, self._base, slots)
        if code:
            self.fail(os_error(code, "ibv_post_recv"))

    def received(self, slot: int, length: int) -> memoryview:
        """Header and datagram in a receive slot."""
        return self._recv.view(slot, length)

    # Events

    def _on_request(self, event: ConnectionEvent) -> bool:
        """A client asks for the endpoint."""
        if event.type != EventType.CONNECT_REQUEST:
            return self._on_home_event(event)
        asking = event.connection_id
        assert asking is not None
        try:
            if asking.context is self.context:
                asking._answer_service(b"", self.qp)
            else:
                asking.reject()
        except OSError as exc:
            _log.debug("a client that asked for %s has gone: %s", self.sockname, exc)
        asking.close()
        return True

    def _on_home_event(self, event: ConnectionEvent) -> bool:
        if event.type == EventType.DEVICE_REMOVAL:
            self.fail(cm_error(event.type.name, event.status))
        return True

    # End

    @property
    def forked(self) -> bool:
        """Whether it was made by a process that this one was forked from."""
        return self._qp_handle is None

    def poison_after_fork(self) -> None:
        """In a forked child: the rings are shared with the parent, so nothing may be posted."""
        self.closed = True
        self._qp_handle = None

    def close(self) -> None:
        """Give everything back; the C calls run in the reaper.  Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        pins = self._send.pinned()

        def let_go(_: object) -> None:
            for ah in pins:
                ah._let_go()

        self.qp._gone.add_done_callback(let_go)
        if self._base:
            self._completions.table.remove(self._base)
        for resource in self._resources():
            resource.close()
        for release in self._releases:
            release()

    def _resources(self) -> list[Resource]:
        listener = [] if self._listener is None else [self._listener]
        memory = [self._recv.mr, self._send.mr]
        return [*listener, self.qp, self._cq, *memory, self.pd, self.home]

    async def wait_closed(self) -> None:
        """Wait until the adapter holds nothing any more, for a bounded time."""
        try:
            async with asyncio.timeout(_DESTROY_S):
                for resource in self._resources():
                    try:
                        await resource.wait_closed()
                    except OSError as exc:
                        _log.warning("%r: %s", resource, exc)
        except TimeoutError:
            _log.warning("queue pair %d: destroying it takes long", self.qp.num)

    def describe(self) -> dict[str, Any]:
        """Device, port, GID and so on, as `get_extra_info` tells them."""
        return {**describe(self.home, self.context, self.qp), "mtu": self.mtu}
