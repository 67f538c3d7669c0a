"""BringUp: a queue pair that the program connects itself, without the connection manager.

Theory of operation
    Each end takes its queue pair to INIT, sends the other end its address over a channel of the
    program's own, and takes the queue pair through RTR to RTS with the address that it received.
    The path MTU has to be the same at both ends, and no end may start more reads than the other
    serves: so an address carries the limits of its end, and each end takes the lower of the two.

    The kernel looks for the neighbor within the change to RTR, and waits for it.  So a thread makes
    that change, and goes on when its caller is canceled or waits no longer.  Until it has ended,
    the queue pair cannot be RESET: it would be connected to a peer that was given up.

    No event reports that the peer is gone: a receive would wait for ever.  The program's channel
    shows it, and `QueuePair.to_error` then ends the requests.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import ClassVar, Self

from aiordma.arguments import check_kind, check_seconds, fitting, whole
from aiordma.errors import ConnectTimeoutError, ProtocolError, os_error, prefix_subject
from aiordma.interfaces import eui_64, has_address
from aiordma.loop.limit import Limit
from aiordma.loop.uncopied import Uncopied
from aiordma.loop.workers import call_blocking, connecting
from aiordma.verbs.ah import AHAttributes
from aiordma.verbs.context import Context, GidEntry
from aiordma.verbs.enums import MTU, Access, GIDType, LinkLayer, QPState, QPType
from aiordma.verbs.qp import QueuePair
from aiordma.verbs.qp_changes import QPChanges, check_changes, to_c

__all__ = ["BringUp", "BringUpConfig", "QPAddress"]

# Magic, flags, path MTU, reads, LID, GID, number, PSN.
_ADDRESS = struct.Struct("!4sBBBxH16sII")
_HAS_GID, _HAS_READS = 1, 2
_MAGIC = b"aiqp"
_READY = b"aiqp ready"
_MAPPED = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


@dataclass(frozen=True, slots=True, kw_only=True)
class QPAddress:
    """The address of a queue pair, for the program at the other end.

    `bytes()` packs it into `SIZE` bytes for a peer that uses `from_bytes`; for other programs the
    fields travel in a format of their choice.

    Attributes:
        qp_num: Number of the queue pair, 24 bits.
        psn: Number of the first packet that it sends, 24 bits.
        gid: GID of its port, 16 bytes; empty on InfiniBand without a global header.
        lid: Local id of its port on InfiniBand, 0 on RoCE.
        path_mtu: The largest path MTU that its end can have; None if the peer does not say.
        reads: Reads and atomics that it serves at a time; None if the peer does not say.
    """

    SIZE: ClassVar[int] = _ADDRESS.size

    qp_num: int
    psn: int = 0
    gid: bytes = b""
    lid: int = 0
    path_mtu: MTU | None = None
    reads: int | None = None

    def __post_init__(self) -> None:
        fitting("qp_num", self.qp_num, 24)
        fitting("psn", self.psn, 24)
        fitting("lid", self.lid, 16)
        if self.path_mtu is not None:
            whole("path_mtu", self.path_mtu, MTU.MTU_256, MTU.MTU_4096)
        if self.reads is not None:
            fitting("reads", self.reads, 8)
        check_kind("gid", self.gid, bytes, none=False)
        if len(self.gid) not in (0, 16):
            msg = f"a GID has 16 bytes, not {len(self.gid)}"
            raise ValueError(msg)

    def __bytes__(self) -> bytes:
        flags = _HAS_GID * bool(self.gid) | _HAS_READS * (self.reads is not None)
        return _ADDRESS.pack(
            _MAGIC, flags, self.path_mtu or 0, self.reads or 0, self.lid, self.gid or bytes(16),
            self.qp_num, self.psn,
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Unpack an address that `bytes()` has packed.

        Args:
            data: The bytes, as the peer has sent them.

        Raises:
            ProtocolError: The bytes are not an address.
        """
        try:
            magic, flags, mtu, reads, lid, gid, qp_num, psn = _ADDRESS.unpack(data)
            if magic == _MAGIC:
                return cls(
                    qp_num=qp_num,
                    psn=psn,
                    gid=gid if flags & _HAS_GID else b"",
                    lid=lid,
                    path_mtu=MTU(mtu) if mtu else None,
                    reads=reads if flags & _HAS_READS else None,
                )
        except (struct.error, ValueError):
            pass  # bytes of another program are no address either
        raise _no_address(data)


def _no_address(data: bytes) -> ProtocolError:
    return ProtocolError(f"not the address of a queue pair: {bytes(data[:64])!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BringUpConfig:
    """Settings of a queue pair that the program connects itself.

    Attributes:
        port_num: Port of the device, from 1.
        gid_index: Index of the port's GID; None for the first that other machines can reach: on
            RoCE a GID of version 2, of IPv4 if there is one, and link-local ones last; on
            InfiniBand the first.
        pkey_index: Index in the port's table of partition keys.
        access: RC and UC: accesses that the peer has; by default reads and writes.  Atomics need
            REMOTE_ATOMIC, too.
        path_mtu: Path MTU; None for the lower MTU of both ports.  A peer whose program has a
            fixed path MTU needs the same here.
        psn: Number of the first packet; None for a random number.
        timeout: Exponent e of the acknowledgement timeout 4.096 us * 2**e; 14 is 67 ms.
        retry_cnt: RC: retries after a timeout, 0 to 7.  On Soft-RoCE 7 means for ever: a dead peer
            is then never noticed.
        rnr_retry: RC: retries after receiver-not-ready, 0 to 6; 7 for ever.
        min_rnr_timer: Code of the delay that the peer is asked for when no receive is posted; see
            `aiordma.verbs.rnr_timer`.  12 is 0.64 ms.
        max_rd_atomic: Reads and atomics of this end under way at a time; None for the device's
            limit.  Never more than the peer serves, if its address says how many.
        max_dest_rd_atomic: Reads and atomics of the peer served at a time; None for the device's
            limit.
        qkey: UD: key that datagrams have to carry.
        hop_limit: Routers that packets may pass.
        traffic_class: Priority.
        sl: Service level.
    """

    port_num: int = 1
    gid_index: int | None = None
    pkey_index: int = 0
    access: Access = Access.REMOTE_READ | Access.REMOTE_WRITE
    path_mtu: MTU | None = None
    psn: int | None = None
    timeout: int = 14
    retry_cnt: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 12
    max_rd_atomic: int | None = None
    max_dest_rd_atomic: int | None = None
    qkey: int = 0x11111111
    hop_limit: int = 64
    traffic_class: int = 0
    sl: int = 0

    def __post_init__(self) -> None:
        whole("port_num", self.port_num, 1, 255)
        if self.gid_index is not None:
            fitting("gid_index", self.gid_index, 8)
        if self.path_mtu is not None:
            whole("path_mtu", self.path_mtu, MTU.MTU_256, MTU.MTU_4096)
        if self.psn is not None:
            fitting("psn", self.psn, 24)
        for name in ("max_rd_atomic", "max_dest_rd_atomic"):
            if getattr(self, name) is not None:
                fitting(name, getattr(self, name), 8)
        for name, bits in (("hop_limit", 8), ("traffic_class", 8), ("sl", 4)):
            fitting(name, getattr(self, name), bits)
        check_changes({
            "pkey_index": self.pkey_index, "qp_access_flags": self.access,
            "timeout": self.timeout, "retry_cnt": self.retry_cnt, "rnr_retry": self.rnr_retry,
            "min_rnr_timer": self.min_rnr_timer, "qkey": self.qkey,
        })  # fmt: skip


_DEFAULT = BringUpConfig()


class _Move:
    """A change of the state that a thread makes, if its caller still waits when the thread begins.

    Attributes:
        under_way: Whether its caller waits for it, or the thread is making it.
    """

    __slots__ = ("_attr", "_begun", "_ended", "_left", "_mask")

    def __init__(self, changes: QPChanges) -> None:
        self._attr, self._mask = to_c(changes)
        self._begun = self._left = self._ended = False

    @property
    def under_way(self) -> bool:
        # A caller that waits has more to do when the thread has ended. After one that has left, a
        # thread that begins in this moment sees so, and does nothing.
        return not self._left or (self._begun and not self._ended)

    def make(self, qp: QueuePair) -> None:
        """Make it; in the thread."""
        self._begun = True
        try:
            if not self._left:
                qp._retain()  # the C object outlives the call, whatever happens to its caller
                try:
                    qp._modify(self._attr, self._mask)
                finally:
                    qp._let_go()
        finally:
            self._ended = True

    def leave(self, qp: QueuePair) -> None:
        """The caller waits no more; a thread that has begun goes on."""
        self._left = True
        if not self.under_way:
            qp._moving = None


class BringUp(Uncopied):
    """A queue pair that the program connects to a peer without the connection manager.

    Making the object takes the queue pair to INIT, so that receives can be posted, and determines
    its address.  `connect` takes it to RTS with the address of the peer.  In between the program
    sends its own address and receives the peer's; `exchange` does all of it over a stream.

    Args:
        qp: A queue pair of type RC, UC or UD in RESET, as it is made.
        config: Settings.

    Raises:
        TypeError: Not a queue pair, or not a `BringUpConfig`.
        NotSupportedError: The device is iWARP, which connects a queue pair over a TCP connection of
            its own: use `aiordma.cm.ConnectionId`.
        OSError: There is no such port, GID or partition key, or the queue pair is not in RESET
            (EINVAL).

    Attributes:
        qp: The queue pair.
        config: The settings.
        address: Its address, for the peer.
        gid_index: Index of the GID in it.
    """

    __slots__ = ("address", "config", "gid_index", "qp")

    def __init__(self, qp: QueuePair, config: BringUpConfig = _DEFAULT) -> None:
        check_kind("qp", qp, QueuePair, none=False)
        check_kind("config", config, BringUpConfig, none=False)
        context = qp.pd.context
        if context.is_iwarp:
            detail = "(iWARP connects a queue pair by the connection manager only: ConnectionId)"
            raise os_error(errno.EOPNOTSUPP, "ibv_modify_qp", detail=detail)
        if (state := qp.state) is not QPState.RESET:
            detail = f"(the queue pair is in {state.name}, not in RESET)"
            raise os_error(errno.EINVAL, "ibv_modify_qp", detail=detail)
        port = context.query_port(config.port_num)
        self.qp: QueuePair = qp
        self.config: BringUpConfig = config
        self.gid_index: int = (
            _reachable_gid(context, config.port_num, port.link_layer)
            if config.gid_index is None
            else config.gid_index
        )
        gid = context.query_gid(config.port_num, self.gid_index).gid
        reads = _lower(config.max_dest_rd_atomic, min(context.attributes.max_qp_rd_atom, 255))
        self.address: QPAddress = QPAddress(
            qp_num=qp.num,
            psn=secrets.randbits(24) if config.psn is None else config.psn,
            gid=gid,
            lid=port.lid,
            path_mtu=config.path_mtu or port.active_mtu,
            reads=reads,
        )
        changes: QPChanges = {
            "qp_state": QPState.INIT, "pkey_index": config.pkey_index, "port_num": config.port_num
        }  # fmt: skip
        if qp.qp_type == QPType.UD:
            changes["qkey"] = config.qkey
        else:
            changes["qp_access_flags"] = config.access
        qp.modify(**changes)

    async def connect(self, peer: QPAddress | None = None, *, timeout: float = 5.0) -> None:
        """Take the queue pair from INIT to RTS.

        A packet that arrives before the peer's queue pair is ready to receive is lost (RC repeats
        it): so begin to send when the peer has said that it is connected, too.

        Args:
            peer: Address of the peer; None for datagrams, each of which names its receiver.
            timeout: Seconds in which the neighbor has to answer.

        Raises:
            TypeError: `peer` is not a `QPAddress`, or is missing for RC or UC.
            ValueError: `peer` was given for datagrams.
            ConnectTimeoutError: The neighbor did not answer in time.
            RdmaOSError: The kernel is still busy with an earlier call, even if that was canceled
                or timed out (EBUSY).
            OSError: The device refused (EINVAL), or no way leads to the peer.

        Cancellation, and every error: the queue pair is left in between; close it, or start again
        with `qp.modify(qp_state=QPState.RESET)`, which raises RdmaOSError as long as the
        kernel looks for the neighbor.
        """
        check_seconds("timeout", timeout, zero=True, none=False)
        to_receive, to_send = self._changes(peer)
        qp = self.qp
        qp._refuse_while_moving()
        move = qp._moving = _Move(to_receive)
        limit = Limit(timeout)
        try:
            with limit:
                await call_blocking(lambda: move.make(qp), undo=lambda _: None, pool=connecting)
        except TimeoutError as exc:
            if isinstance(exc, ConnectTimeoutError) or not limit.expired:
                raise
            msg = f"no answer from the neighbor of queue pair {qp.num} within {timeout} s"
            raise ConnectTimeoutError(errno.ETIMEDOUT, msg) from exc
        except OSError as exc:
            if exc.errno == errno.ENODATA:  # the GID was there when the address was made
                gid = socket.inet_ntop(socket.AF_INET6, self.address.gid)
                name, port = qp.pd.context.name, self.config.port_num
                prefix_subject(exc, f"GID {gid}, index {self.gid_index} of port {port} of {name}")
            raise
        finally:
            move.leave(qp)
        qp.modify(**to_send)

    async def exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        timeout: float = 10.0,
    ) -> QPAddress:
        """Connect to the program at the other end of a stream, which calls this, too.

        Each end sends its address, and then says that its queue pair is connected: after this both
        ends can send.  Nothing else is read from the stream, which stays the program's own.  When
        the stream ends, the peer is gone.

        Args:
            reader: The stream's reader.
            writer: The stream's writer.
            timeout: Seconds for the whole exchange.

        Returns:
            The address of the peer.

        Raises:
            TypeError: Not a reader and a writer; nothing was sent.
            ProtocolError: The other end sent something else.
            ConnectTimeoutError: The time was up.
            ConnectionResetError: The other end has closed the stream.
            OSError: As `connect` raises it.

        Cancellation, and every error: as `connect`; the queue pair may be connected to the peer.
        """
        check_seconds("timeout", timeout, none=False)
        for name, stream, call in (("reader", reader, "readexactly"), ("writer", writer, "drain")):
            if not callable(getattr(stream, call, None)):
                msg = f"{name} has to be one of asyncio's streams, not a {type(stream).__name__}"
                raise TypeError(msg)
        limit = Limit(timeout)
        try:
            with limit:
                writer.write(bytes(self.address))
                await writer.drain()
                peer = QPAddress.from_bytes(await reader.readexactly(QPAddress.SIZE))
                await self.connect(None if self.qp.qp_type == QPType.UD else peer, timeout=timeout)
                writer.write(_READY)
                await writer.drain()
                word = await reader.readexactly(len(_READY))
        except TimeoutError as exc:
            if isinstance(exc, ConnectTimeoutError) or not limit.expired:
                raise
            msg = f"the peer of queue pair {self.qp.num} has not connected within {timeout} s"
            raise ConnectTimeoutError(errno.ETIMEDOUT, msg) from exc
        except asyncio.IncompleteReadError as exc:
            if exc.partial and not exc.partial.startswith(_MAGIC):
                raise _no_address(exc.partial) from exc
            msg = "the peer closed the stream before its queue pair was connected"
            raise ConnectionResetError(errno.ECONNRESET, msg) from exc
        if word != _READY:
            msg = f"the peer says {word!r} instead of {_READY!r}"
            raise ProtocolError(msg)
        return peer

    def way_to(self, peer: QPAddress) -> AHAttributes:
        """The way from this port to the peer's, as an address vector; for datagrams, too."""
        check_kind("peer", peer, QPAddress, none=False)
        config = self.config
        return AHAttributes(
            dgid=peer.gid, sgid_index=self.gid_index if peer.gid else 0, dlid=peer.lid,
            hop_limit=config.hop_limit, traffic_class=config.traffic_class, sl=config.sl,
            port_num=config.port_num,
        )  # fmt: skip

    def _changes(self, peer: QPAddress | None) -> tuple[QPChanges, QPChanges]:
        """The changes to RTR and to RTS."""
        config, kind = self.config, self.qp.qp_type
        to_receive: QPChanges = {"qp_state": QPState.RTR}
        to_send: QPChanges = {"qp_state": QPState.RTS, "sq_psn": self.address.psn}
        if kind == QPType.UD:
            if peer is not None:
                msg = "a datagram queue pair has no peer: send with AddressHandle and remote_qpn"
                raise ValueError(msg)
            return to_receive, to_send
        check_kind("peer", peer, QPAddress, none=False)
        assert peer is not None
        to_receive["ah_attr"] = self.way_to(peer)
        to_receive["path_mtu"] = MTU(_lower(self.address.path_mtu, peer.path_mtu))
        to_receive["dest_qp_num"] = peer.qp_num
        to_receive["rq_psn"] = peer.psn
        if kind == QPType.RC:
            most = self.qp.pd.context.attributes.max_qp_init_rd_atom
            reads = min(_lower(config.max_rd_atomic, most), 255)
            to_receive["max_dest_rd_atomic"] = self.address.reads or 0
            to_receive["min_rnr_timer"] = config.min_rnr_timer
            to_send["max_rd_atomic"] = _lower(reads, peer.reads)
            to_send["timeout"] = config.timeout
            to_send["retry_cnt"] = config.retry_cnt
            to_send["rnr_retry"] = config.rnr_retry
        return to_receive, to_send


def _lower(first: int | None, other: int | None) -> int:
    """The lower of two bounds, or the only bound that is known."""
    return min(bound for bound in (first, other) if bound is not None)


def _reachable_gid(context: Context, port_num: int, link_layer: LinkLayer) -> int:
    """The index of the GID by which other machines reach the port.

    A device that network namespaces share has the GIDs of all of them in one table.  With the GID
    of another namespace every call here succeeds, and no answer ever comes.

    Raises:
        OSError: It has none in this network namespace (EADDRNOTAVAIL).
    """
    if link_layer != LinkLayer.ETHERNET:
        return 0
    found = [entry for entry in context.gid_table() if entry.port == port_num]
    if not found:
        detail = f"(port {port_num} of {context.name} has no GID)"
        raise os_error(errno.EADDRNOTAVAIL, "ibv_query_gid_ex", detail=detail)
    here = [entry for entry in found if _is_here(entry)]
    if not here:
        detail = (
            f"(none of the {len(found)} GIDs of port {port_num} of {context.name} belongs to an "
            "interface of this network namespace; gid_index takes any)"
        )
        raise os_error(errno.EADDRNOTAVAIL, "ibv_query_gid_ex", detail=detail)

    def order(entry: GidEntry) -> tuple[bool, bool, bool, int]:
        return (
            entry.type != GIDType.ROCE_V2,
            entry.gid.startswith(_LINK_LOCAL),
            entry.gid[:12] != _MAPPED,
            entry.index,
        )

    return int(min(here, key=order).index)


def _is_here(entry: GidEntry) -> bool:
    """Whether a GID is of an interface of this network namespace, as far as that can be known."""
    try:
        name = socket.if_indextoname(entry.interface) if entry.interface else ""
    except OSError:
        return False
    # Each namespace numbers its interfaces by itself, so that the number alone proves little.  A
    # link-local GID may be made from the hardware's address, and then no interface has it.
    if entry.gid.startswith(_LINK_LOCAL):
        return not name or entry.gid[8:] == eui_64(name) or has_address(f"{entry}%{name}")
    mapped = entry.gid[:12] == _MAPPED
    return has_address(socket.inet_ntop(socket.AF_INET, entry.gid[12:]) if mapped else str(entry))
