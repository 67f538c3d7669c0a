"""dask: the scheme `rdma://` of Dask's distributed, over `Connection`s.

Needs distributed: `pip install aiordma[dask]`.  distributed finds `RdmaBackend` by an entry point,
when the scheme is used first; nothing has to be imported.

Theory of operation
    A message of distributed is a list of frames.  Its first message on the connection, the head,
    has a word for each frame, and the bytes of the short frames.  A longer frame follows by itself,
    in pieces of equal size, which the peer's adapter reads out of the sender's memory right into
    that of the received frame.  So a short message is a single message of the connection, and a
    long frame has no limit of its size.

    A received frame lies in memory of its own, which is writable, as that of other backends is: an
    array that is made of it keeps no memory of the connection, and no other frame.  When nothing
    refers to it any more, the memory serves another frame: see dask_memory.py.  The frames
    that distributed has cut out of a single buffer get a common piece of memory, in which
    distributed finds them side by side, and merges them without a copy.  A message with a single
    short frame is decoded where it lies: nothing of it is kept.

    No device of the kernel has a loopback address, which distributed uses for a local cluster whose
    program names no host.  The backend uses the address of a device instead, and a listener
    there aborts connections from other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import itertools
import logging
import struct
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import dask.config
import psutil
from dask.utils import parse_bytes, parse_timedelta
from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import (
    BaseListener,
    Comm,
    CommClosedError,
    Connector,
    FatalCommClosedError,
)
from distributed.comm.registry import Backend
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import host_array
from distributed.utils import ensure_ip, ensure_memoryview, get_ip, get_ip_interface, nbytes

from aiordma.cm.address import is_local, is_loopback, look_up
from aiordma.contrib.dask_memory import FrameMemory
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.connect import connect
from aiordma.endpoint.connection import Connection
from aiordma.endpoint.listener import Listener, listen
from aiordma.errors import (
    DeviceNotFoundError,
    ForkedError,
    LibraryMissingError,
    MessageTooLargeError,
    NotSupportedError,
    RdmaError,
    RdmaPermissionError,
    errno_error,
)
from aiordma.interfaces import has_address
from aiordma.link.limits import ListenerLimits
from aiordma.link.transport_socket import address_of
from aiordma.loop.lasting import until_done
from aiordma.loop.limit import Limit
from aiordma.loop.running import from_finalizer
from aiordma.loop.wait_line import WaitLine
from aiordma.verbs.device import SYSFS, devices, why_unavailable

__all__ = ["RdmaBackend", "RdmaComm", "RdmaConnector", "RdmaListener"]

_log = logging.getLogger("distributed.comm.rdma")

PREFIX = "rdma://"
#: Bytes from which on a frame follows the head by itself, in memory of its own.
SEPARATE_BYTES = 1 << 15
#: Largest piece of a frame, bytes.
PIECE_BYTES = 4 << 20
#: Pieces under way at a time.
_AHEAD = 4
# Of a word: bits above the length of the frame.
_SEPARATE = 1 << 63  # the frame follows the head
_JOINED = 1 << 62  # it lies behind the frame before, in the same memory
_OWN = 1 << 61  # it is in the head, and gets memory of its own at the receiver
_LENGTH = _OWN - 1
#: A buffer in the head shares its memory with so many bytes of other frames, or less.
_SHARED_BYTES = 2048
#: Bytes of the head, and of all frames, of a message before the handshake of distributed.
_STRANGERS_BYTES = 1 << 20
_HEAD = struct.Struct("<QQ")  # bytes of the head, frames
_SINGLE = struct.Struct("<QQQ")  # the same, and the word of the only frame
# Errors of a connect that another attempt meets again.
_FATAL = (
    DeviceNotFoundError, ForkedError, LibraryMissingError, NotSupportedError, RdmaPermissionError,
)  # fmt: skip


# Settings


def _setting(name: str, default: Any) -> Any:
    return dask.config.get(f"distributed.comm.rdma.{name}", default)


def _seconds(name: str, default: str) -> float:
    return float(parse_timedelta(_setting(name, default), default="seconds"))


@functools.lru_cache(8)
def _config_of(keepalive_s: float, idle_s: float, wait: str, spin_us: float) -> ConnectionConfig:
    return ConnectionConfig(
        receive_buffer_size=_AHEAD * PIECE_BYTES,  # so that all pieces under way are fetched
        max_message_size=PIECE_BYTES,
        keepalive_s=keepalive_s,
        idle_timeout_s=idle_s,
        wait=wait,
        spin_us=spin_us,
    )


_FRAMES = FrameMemory(0)


def _config() -> ConnectionConfig:
    """The settings of connections, out of dask's configuration; and that of the memory of all."""
    _FRAMES.most_bytes = parse_bytes(_setting("keep", "64 MiB"))
    return _config_of(
        _seconds("keepalive", "10 s"),
        _seconds("idle-timeout", "5 minutes"),
        _setting("wait", "event"),
        float(_setting("spin-us", 50)),
    )


# Addresses


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # the entries of a table that are not used
        return ""


def _interfaces() -> Iterator[str]:
    """Names of the network interfaces of RDMA devices; some may come twice."""
    cards = {
        info.address: name
        for name, infos in psutil.net_if_addrs().items()
        for info in infos
        if info.family == psutil.AF_LINK
    }
    for port in sorted(SYSFS.glob("*/ports/*")):
        for entry in sorted((port / "gid_attrs" / "ndevs").glob("*")):
            if name := _text_of(entry):
                yield name
        for folder in sorted((port.parents[1] / "device" / "net").glob("*")):
            yield folder.name
        # The first GID of an iWARP port is the hardware address of its interface.
        digits = _text_of(port / "gids" / "0").replace(":", "")[:12]
        if name := cards.get(":".join(digits[n : n + 2] for n in range(0, 12, 2)), ""):
            yield name


def _hosts_of_gids() -> Iterator[str]:
    """The IPv4 addresses of this machine among the GIDs of RoCE devices."""
    for device in devices():
        with contextlib.suppress(OSError), device.open() as context:
            for entry in context.gid_table():
                mapped = IPv6Address(entry.gid).ipv4_mapped
                if mapped is not None and has_address(str(mapped)):
                    yield str(mapped)


def _device_host() -> str:
    """An address of this machine that belongs to an RDMA device.

    Raises:
        DeviceNotFoundError: There is none.
        ValueError: The interface of the configuration does not exist, or has no IPv4 address.
    """
    if interface := _setting("interface", None):
        return str(get_ip_interface(interface))
    for host in _hosts_of_gids():
        return host
    for name in _interfaces():
        try:
            host = str(get_ip_interface(name))
        except ValueError:
            continue  # without an IPv4 address
        if not is_loopback((host, 0)):
            return host
    why = why_unavailable() or "no network interface of an RDMA device has an IPv4 address"
    hint = "`rdma link` and `ip address` list them; or name one by distributed.comm.rdma.interface"
    raise errno_error(errno.ENODEV, why, hint)


async def _served(host: str, port: int) -> str:
    """The host; for a loopback name or address, the address of a device."""
    if all(is_loopback(address) for address in await look_up(host, port)):
        return _device_host()
    return host


def _resolved(host: str) -> str:
    """The numeric address of a host, as `_served`; blocks while it is looked up."""
    host = ensure_ip(host)
    return _device_host() if is_loopback((host, 0)) else host


def _refuse_encryption(address: str, arguments: dict[str, Any]) -> None:
    """Raise if the program asks for TLS.

    Raises:
        RuntimeError: It does.
    """
    if arguments.get("require_encryption") or arguments.get("ssl_context") is not None:
        msg = (
            f"encryption required by Dask configuration, refusing communication from/to "
            f"{PREFIX + address!r}: rdma:// has no TLS; use tls://, or rdma:// without "
            "`security` on a network that you trust"
        )
        raise RuntimeError(msg)


# Connections


def _raise_closed(comm: object, exc: BaseException) -> NoReturn:
    """Raise the exception of distributed for an error of aiordma.

    Raises:
        FatalCommClosedError: Another attempt would fail as well.
        CommClosedError: Otherwise.
    """
    kind = FatalCommClosedError if isinstance(exc, _FATAL) else CommClosedError
    msg = f"in {comm}: {type(exc).__name__}: {exc}"
    raise kind(msg) from exc


def _abandon(connection: Connection, loop: asyncio.AbstractEventLoop, text: str) -> None:
    """End the connection of a comm that the program has forgotten; in any thread."""
    if not connection.is_closing():
        _log.warning("Closing dangling connection in %s", text)
        from_finalizer(loop, connection.abort)


class RdmaComm(Comm):
    """A comm over one `Connection`; distributed's `connect` and listeners make it.

    Args:
        connection: The connection, which is the comm's from now on.
        local_addr: Address of this side, with the scheme.
        peer_addr: Address of the peer, likewise.
        deserialize: Whether `read` deserializes the frames.
    """

    max_shard_size: ClassVar[int] = parse_bytes(dask.config.get("distributed.comm.shard"))

    def __init__(
        self, connection: Connection, local_addr: str, peer_addr: str, deserialize: bool = True
    ) -> None:
        self._closed = False
        super().__init__(deserialize=deserialize)
        self._connection = connection
        self._local_addr = local_addr
        self._peer_addr = peer_addr
        self._writing = False  # a message has several pieces: one write at a time
        self._writes: WaitLine[None] = WaitLine()  # the others
        self._written = 0  # pieces that the peer has
        self._most_bytes: int | None = None  # of a message; None: any
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        # Alive until the connection is closed, or aborted.
        self._finalizer = weakref.finalize(self, _abandon, connection, self._loop, repr(self))
        self._finalizer.atexit = False

    @property
    def local_address(self) -> str:
        """Address of this side, with the scheme."""
        return self._local_addr

    @property
    def peer_address(self) -> str:
        """Address of the peer, with the scheme."""
        return self._peer_addr

    @property
    def extra_info(self) -> dict[str, Any]:
        """Facts about the connection: `Connection.get_extra_info` explains them."""
        names = ("backend", "device", "port", "gid", "transport", "mtu", "sockname", "peername")
        return {name: self._connection.get_extra_info(name) for name in names}

    # Messages

    async def read(self, deserializers: Any = None) -> Any:
        """The next message.

        Args:
            deserializers: Functions by name, for distributed's `deserialize`.

        Raises:
            CommClosedError: The connection is over, or the peer has sent something else.

        Cancellation: the comm is aborted, because a part of the message may have been received.
        """
        if self._closed:
            raise CommClosedError(f"in {self}: closed by this side")
        try:
            frames = await self._receive()
        except (RdmaError, OSError, struct.error, ValueError, MemoryError) as exc:
            self.abort()
            _raise_closed(self, exc)
        except BaseException:
            self.abort()
            raise
        try:
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=deserializers,
                allow_offload=self.allow_offload,
            )
        except EOFError as exc:
            self.abort()
            raise CommClosedError(f"in {self}: truncated data") from exc

    async def _receive(self) -> list[memoryview]:
        """The frames of the next message."""
        message = memoryview(await self._connection.recv())
        size, count = _HEAD.unpack_from(message)
        if count == 1 and _SINGLE.unpack_from(message)[2] == len(message) - _SINGLE.size:
            return [message[_SINGLE.size :]]
        self._check(size)
        head = await self._gathered(size, message)
        message.release()
        words = struct.unpack_from(f"<{count}Q", head, _HEAD.size)
        self._check(sum(word & _LENGTH for word in words))
        frames: list[memoryview] = []
        offset = _HEAD.size + 8 * count
        joined: list[int] = []  # lengths of frames that lie in the same memory behind the head
        for word in words:
            length, kind = word & _LENGTH, word & (_SEPARATE | _JOINED)
            if joined and kind != _SEPARATE | _JOINED:
                frames += await self._receive_joined(joined)
                joined = []
            if kind & _SEPARATE:
                if not length or (kind & _JOINED and not joined):
                    msg = "a frame behind the head is empty, or joined to none"
                    raise ValueError(msg)
                joined.append(length)
                continue
            frame = head[offset : offset + length]
            if word & _OWN:  # or an array would keep the memory of all, as long as it lives
                shared, frame = frame, host_array(length)
                frame[:] = shared
            frames.append(frame)
            offset += length
        if joined:
            frames += await self._receive_joined(joined)
        if offset != size:
            msg = f"a head of {size} bytes does not fit its {count} frames"
            raise ValueError(msg)
        return frames

    def _check(self, size: int) -> None:
        """Refuse (ValueError) too large a message from a peer that has not shaken hands."""
        if self._most_bytes is not None and size > self._most_bytes:
            msg = f"{size} bytes before the handshake"
            raise ValueError(msg)

    async def _receive_joined(self, lengths: Sequence[int]) -> Iterator[memoryview]:
        """Frames that follow the head, side by side in the same memory."""
        memory = await self._gathered(sum(lengths))
        ends = itertools.accumulate(lengths)
        return (memory[end - length : end] for end, length in zip(ends, lengths, strict=True))

    async def _gathered(self, size: int, first: memoryview | None = None) -> memoryview:
        """Receive bytes into memory of their own.

        Args:
            size: Number of bytes.
            first: The beginning of them, which has been received.

        Returns:
            The memory, which is writable.

        Raises:
            ValueError: The peer's messages do not add up to that many bytes.
        """
        memory = _FRAMES.take(size)
        filled = 0
        if first is not None:
            filled = len(first)
            memory[:filled] = first
        while filled < size:
            try:
                piece = await self._connection.recv_into(memory[filled:])
            except MessageTooLargeError as exc:
                piece = exc.size
            if not 0 < piece <= size - filled:
                msg = f"a piece of {piece} bytes, where {size - filled} are missing"
                raise ValueError(msg)
            filled += piece
        return memory

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Send a message; returns when the memory of its frames may be changed again.

        It waits while the peer does not read, and for the writes of other tasks that came before.

        Args:
            msg: The message.
            serializers: Names of serializers, for distributed's `dumps`.
            on_error: What to do when a serializer fails, likewise.

        Returns:
            Bytes of the frames.

        Raises:
            CommClosedError: The connection is over.

        Cancellation: the comm is aborted, because a part of the message may have been sent, unless
        this still waits for another write.
        """
        if self._closed:
            raise CommClosedError(f"in {self}: closed by this side")
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=serializers,
            on_error=on_error,
            context={
                "sender": self.local_info,
                "recipient": self.remote_info,
                **self.handshake_options,
            },
            frame_split_size=self.max_shard_size,
        )
        if self._writing:
            await self._writes.wait(self._next_write)
        self._writing = True
        try:
            return await self._send(frames)
        except (RdmaError, OSError) as exc:
            self.abort()
            _raise_closed(self, exc)
        except BaseException:
            self.abort()
            raise
        finally:
            self._next_write()

    def _next_write(self, _: None = None) -> None:
        """Let the next write in line go on."""
        self._writing = self._writes.grant(None)

    async def _send(self, frames: list[Any]) -> int:
        if len(frames) == 1 and (length := nbytes(frames[0])) < SEPARATE_BYTES - _SINGLE.size:
            size = _SINGLE.size + length
            await self._connection.send(b"".join((_SINGLE.pack(size, 1, length), frames[0])))
            return int(length)
        words: list[int] = []
        short: list[Any] = []
        pieces: list[memoryview] = []
        before: object = None  # the buffer of the frame before, if that follows the head
        in_head = 0
        buffers: list[int] = []  # in the head, whose bytes live on at the receiver
        for frame in frames:
            length = nbytes(frame)
            buffer = frame.obj if isinstance(frame, memoryview) else frame
            joined = buffer is before
            if length and (joined or length >= SEPARATE_BYTES):
                words.append(length | _SEPARATE | (_JOINED if joined else 0))
                pieces += _pieces_of(_bytes_of(frame))
                before = buffer
            else:
                # Bytes are what was pickled or compressed: they are gone when they are read.
                if not isinstance(buffer, bytes):
                    buffers.append(len(words))
                words.append(length)
                short.append(_bytes_of(frame))
                before = None
                in_head += length
        # The first may keep the head, if that is little more.
        if buffers and in_head - words[buffers[0]] <= _SHARED_BYTES:
            del buffers[0]
        for n in buffers:
            words[n] |= _OWN
        size = _HEAD.size + 8 * len(words) + sum(map(len, short))
        start = struct.pack(f"<QQ{len(words)}Q", size, len(words), *words)
        head = memoryview(b"".join((start, *short)))
        await self._send_pieces([*_pieces_of(head), *pieces])
        return sum(word & _LENGTH for word in words)

    async def _send_pieces(self, pieces: list[memoryview]) -> None:
        """Send pieces, several of them at a time; they arrive in order."""
        loop = asyncio.get_running_loop()
        # With the one that is awaited: what it raises when this coroutine is closed is nobody's.
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for n, piece in enumerate(pieces):
                # A short message may arrive before a large message of another task that waits.
                most = 0 if len(piece) < SEPARATE_BYTES else _AHEAD - 1
                while len(under_way) > most:
                    await under_way[0]
                    under_way.popleft()
                    self._written += 1
                if not most or (n == len(pieces) - 1 and not under_way):
                    await self._connection.send(piece)
                    self._written += 1
                else:
                    under_way.append(loop.create_task(self._connection.send(piece)))
            while under_way:
                await under_way[0]
                under_way.popleft()
                self._written += 1
        except BaseException as exc:
            for task in under_way:
                task.add_done_callback(lambda each: each.cancelled() or each.exception())
            self._connection.abort()  # which ends them
            if not isinstance(exc, GeneratorExit):  # else the coroutine is closed, and cannot wait
                await until_done(under_way)
            raise

    # End

    async def close(self) -> None:
        """Close in good order: messages whose `write` has begun still arrive.  Idempotent.

        It waits for these writes as long as the peer takes their pieces.

        Cancellation: becomes `abort()`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await self._finish_writes()
            await self._connection.close()
        except BaseException:
            self._connection.abort()
            raise
        finally:
            self._finalizer.detach()

    async def _finish_writes(self) -> None:
        """Wait for the writes that have begun, while they get on."""
        seconds = self._connection.config.close_timeout_s
        before = -1
        while self._writing and before != self._written and not self._connection.is_closing():
            before = self._written
            with contextlib.suppress(TimeoutError), Limit(seconds):
                await self._writes.wait(self._next_write)
                self._next_write()

    def abort(self) -> None:
        """End the connection at once.  Idempotent; in any thread, as the collector may call it."""
        self._closed = True
        if self._finalizer.detach() is None:
            return
        if threading.get_ident() == self._thread:
            self._connection.abort()
        else:
            from_finalizer(self._loop, self._connection.abort)

    def closed(self) -> bool:
        """Whether the comm is closed, or the connection is over."""
        return self._closed or self._connection.is_closing()


def _bytes_of(frame: Any) -> memoryview:
    """The bytes of a frame.

    By a cast, if possible, as `ensure_memoryview` makes a view of a view: with these, CPython
    before 3.13 has crashed after comms whose writes were canceled.
    """
    view = memoryview(frame)
    if view.c_contiguous:
        with contextlib.suppress(TypeError):  # it is empty, or its items are of several numbers
            return view.cast("B")
    return ensure_memoryview(view)


def _pieces_of(data: memoryview) -> Iterator[memoryview]:
    """The bytes in pieces of equal size: a short rest would cost a message of its own."""
    count = -(-len(data) // PIECE_BYTES)
    size = -(-len(data) // count)
    return (data[n : n + size] for n in range(0, len(data), size))


class RdmaConnector(Connector):
    """Connects to addresses of `rdma://`."""

    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: Any
    ) -> RdmaComm:
        """Connect to a listener.

        Args:
            address: Host and port, without the scheme.
            deserialize: Whether `RdmaComm.read` deserializes the frames.
            connection_args: Those of distributed's `Security`; TLS is refused.

        Raises:
            FatalCommClosedError: RDMA is not available here, or not in this process.
            CommClosedError: The connection was not made.
            RuntimeError: The program asks for encryption.
            ValueError: The address has no port.

        Cancellation: the connect is undone.
        """
        _refuse_encryption(address, connection_args)
        host, port = parse_host_port(address)
        limit = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"), "seconds")
        try:
            host = await _served(host, port)
            connection = await connect(host, port, config=_config(), timeout=limit)
        except (RdmaError, OSError) as exc:
            _raise_closed(PREFIX + address, exc)
        local = PREFIX + unparse_host_port(*connection.get_extra_info("sockname")[:2])
        return RdmaComm(connection, local, PREFIX + address, deserialize)


class RdmaListener(BaseListener):
    """Listens on an address of `rdma://`.

    Args:
        address: Host and port, without the scheme.  No host, `0.0.0.0` and `[::]`: all addresses.
            A loopback host: an address of a device, for connections from this machine only.
        comm_handler: Called with each comm.
        deserialize: Whether `RdmaComm.read` deserializes the frames.
        allow_offload: Whether large messages are (de)serialized in a thread.
        default_host: Host of `contact_address` if the listener has all addresses.
        default_port: Port of an address without a port.
        connection_args: Those of distributed's `Security`; TLS is refused.

    Attributes:
        prefix: The scheme.

    Raises:
        RuntimeError: The program asks for encryption.
        ValueError: The address is malformed.
    """

    prefix: ClassVar[str] = PREFIX

    def __init__(
        self,
        address: str,
        comm_handler: Callable[[RdmaComm], Awaitable[None] | None],
        deserialize: bool = True,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        **connection_args: Any,
    ) -> None:
        super().__init__()
        _refuse_encryption(address, connection_args)
        host, port = parse_host_port(address, default_port)
        self.host: str = host
        self.port: int = port
        self.default_host = default_host
        self.comm_handler = comm_handler
        self.deserialize = deserialize
        self.allow_offload = allow_offload
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._own_machine = False

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: The port is taken (EADDRINUSE), or no RDMA device has the address.
            LibraryMissingError: RDMA is not available here.

        Cancellation: it does not listen.
        """
        host = self.host
        if host not in ("", "0.0.0.0", "::"):
            host = await _served(host, self.port)
            self._own_machine = host != self.host
        self._listener = await listen(
            host,
            self.port,
            backlog=int(dask.config.get("distributed.comm.socket-backlog")),
            config=_config(),
            limits=_LIMITS,
        )
        self._spawn(self._accept(self._listener))

    def stop(self) -> None:
        """Stop listening; comms that were handed over go on.  Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            _log.error("a listener of %s: %r", PREFIX, exc, exc_info=exc)

    async def _accept(self, listener: Listener) -> None:
        async for connection in listener:
            self._spawn(self._handle(connection))

    async def _handle(self, connection: Connection) -> None:
        peer, own = (connection.get_extra_info(name) for name in ("peername", "sockname"))
        if self._own_machine and not is_local(address_of(peer)):
            _log.warning("refused %s: the listener is for this machine alone", peer[0])
            connection.abort()
            return
        if self._listener is None:
            # `abort_handshaking_comms` has run already, and the client would wait for its answer.
            connection.abort()
            return
        local, address = (PREFIX + unparse_host_port(*each[:2]) for each in (own, peer))
        comm = RdmaComm(connection, local, address, self.deserialize)
        comm.allow_offload = self.allow_offload
        comm._most_bytes = _STRANGERS_BYTES
        try:
            await self.on_connection(comm)
            comm._most_bytes = None
        except CommClosedError:
            _log.info("Connection from %s closed before handshake completed", address)
            return
        except Exception as exc:  # whatever distributed makes of a stranger's bytes
            comm.abort()
            _log.warning("%s is no peer of this cluster: the handshake failed: %r", address, exc)
            _log.debug("the handshake with %s", address, exc_info=exc)
            return
        except BaseException:
            comm.abort()
            raise
        handled = self.comm_handler(comm)
        if inspect.isawaitable(handled):
            await handled

    def _bound(self) -> tuple[str, int]:
        """Host and port; if there are several, those of IPv4."""
        if self._listener is None:
            raise ValueError("invalid operation on non-started RdmaListener")
        names = sorted(self._listener.socknames, key=lambda name: ":" in name[0])
        return names[0][:2]

    @property
    def listen_address(self) -> str:
        """The address that it listens on, with the scheme."""
        return PREFIX + unparse_host_port(*self._bound())

    @property
    def contact_address(self) -> str:
        """An address for peers, with the scheme; an RDMA device's, if it listens on all."""
        host, port = self._bound()
        if host in ("0.0.0.0", "::"):
            host = self.default_host or _device_host()
        return PREFIX + unparse_host_port(host, port)


# The workers of a machine all come from one source.
_LIMITS = ListenerLimits(max_half_open=128)


class RdmaBackend(Backend):
    """The backend of `rdma://`, which distributed makes."""

    def get_connector(self) -> RdmaConnector:
        """A connector."""
        return RdmaConnector()

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[RdmaComm], Awaitable[None] | None],
        deserialize: bool,
        **connection_args: Any,
    ) -> RdmaListener:
        """A listener; the arguments are those of `RdmaListener`."""
        return RdmaListener(loc, handle_comm, deserialize, **connection_args)

    def get_address_host(self, loc: str) -> str:
        """The host of an address without the scheme."""
        return parse_host_port(loc)[0]

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        """Host and port of an address without the scheme."""
        return parse_host_port(loc)

    def resolve_address(self, loc: str) -> str:
        """The address with a numeric host; for loopback, that of a device."""
        host, port = parse_host_port(loc)
        return unparse_host_port(_resolved(host), port)

    def get_local_address_for(self, loc: str) -> str:
        """The local host from which the address is reached."""
        return unparse_host_port(get_ip(_resolved(parse_host_port(loc)[0])), None)
