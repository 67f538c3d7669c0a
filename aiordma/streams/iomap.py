"""Mappings of a stream: memory that one end names and the other writes to, outside of the stream.

These are the `riomap` and `riowrite` of `rsocket(7)`.  An end that sets
`StreamConfig.iomap_slots` takes that many mappings from its peer, and may write to them, by RDMA
WRITE from registered memory.  The peer's program notices a write by looking at its memory, or by a
message that follows in the stream.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiordma.arguments import whole
from aiordma.errors import ConnectionLostError
from aiordma.loop import fork
from aiordma.loop.uncopied import Uncopied
from aiordma.rsocket.iomap import Mapping
from aiordma.rsocket.machine import Machine
from aiordma.streams.stream_port import StreamPort
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion, check_memory
from aiordma.verbs.wr import SGE

__all__ = ["MappedRegion", "StreamIomap"]

_WRITABLE = Access.LOCAL_WRITE | Access.REMOTE_WRITE

_LAST_OFFSET = (1 << 63) - 1


class MappedRegion(Uncopied):
    """Memory of this end that the peer may write to; made by `StreamIomap.map`.

    Attributes:
        region: The registered memory; its bytes are `region.view`.
        offset: The peer's number for the first byte.
    """

    __slots__ = ("__weakref__", "_machine", "_port", "_slot", "offset", "region")

    def __init__(
        self, port: StreamPort, machine: Machine, region: MemoryRegion, slot: int, offset: int
    ) -> None:
        self._port = port
        self._machine = machine
        self._slot = slot
        self.region: MemoryRegion = region
        self.offset: int = offset
        fork.guard_public(self)

    def close(self) -> None:
        """End the peer's right to write (`riounmap`); idempotent.

        `await region.wait_closed()` waits until that is done.  The peer is not informed, and a
        write that it makes afterwards ends the connection: the programs have to agree before.
        """
        if not self.region.closed:
            self._machine.withdraw(self._slot)
            self._port.memory.mapped.remove(self.region)
            self.region.close()

    def __enter__(self) -> MappedRegion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class StreamIomap(Uncopied):
    """The mappings of both ends of a stream; `RdmaTransport.iomap`.

    All of it ends with the connection.
    """

    __slots__ = ("__weakref__", "_control", "_machine", "_port")

    def __init__(self, port: StreamPort, machine: Machine, control: Callable[[], None]) -> None:
        self._port = port
        self._machine = machine
        self._control = control
        fork.guard_public(self)

    async def map(self, buffer: Any, offset: int | None = None) -> MappedRegion:
        """Let the peer write to memory of this end (`riomap`).

        The peer knows of the mapping once it has received anything that is written to the stream
        after this call.

        Args:
            buffer: A writable buffer, or a number of bytes to be allocated.
            offset: The peer's number for the first byte, 0 to 2**63 - 1; None for its address.

        Raises:
            OSError: ENOBUFS, the peer takes no more mappings; or as `MemoryRegion`.
            ValueError: The offset is out of range, or as `MemoryRegion`.
            ConnectionLostError: The connection is over, or `write_eof` was called.

        Cancellation: ends the wait; nothing is mapped.
        """
        if offset is not None:
            offset = whole("offset", offset, 0, _LAST_OFFSET)
        check_memory(buffer, _WRITABLE)
        self._check_open()
        region = await MemoryRegion.register(self._port.pd, buffer, _WRITABLE)
        try:
            self._check_open()
            name = region.addr if offset is None else offset
            mapping = Mapping(name, region.addr, region.rkey, region.length)
            slot = self._machine.publish(mapping)
        except BaseException:
            region.close()
            raise
        self._port.memory.mapped.append(region)
        self._control()
        return MappedRegion(self._port, self._machine, region, slot, name)

    async def register(self, buffer: Any) -> MemoryRegion:
        """Register memory to write from; it lasts until it or the connection is closed.

        A region that the program drops before is closed, with a ResourceWarning.

        Args:
            buffer: A writable buffer, or a number of bytes to be allocated.

        Raises:
            OSError, ValueError: As `MemoryRegion`.
            ConnectionLostError: The connection is over.

        Cancellation: ends the wait; nothing is registered.
        """
        check_memory(buffer, Access.LOCAL_WRITE)
        self._check_open()
        region = await MemoryRegion.register(self._port.pd, buffer)
        try:
            self._check_open()
        except ConnectionLostError:
            region.close()
            raise
        self._port.memory.sources.add(region)
        return region

    async def write(self, source: MemoryRegion | SGE, offset: int) -> None:
        """Write to the peer's memory (`riowrite`); returns when the peer's adapter has the bytes.

        The peer receives what is written to the stream afterwards after these bytes.

        Args:
            source: Memory registered by `register`, or a piece of it.
            offset: The peer's number for the first byte to be written, as in its `Mapping`.

        Raises:
            ValueError: The peer has published no mapping that holds all of it.
            RemoteAccessError: The mapping has ended; so has the connection.
            ConnectionLostError: The connection is over.

        Cancellation: ends the wait; the bytes may still be written.
        """
        self._check_open()
        addr, key = self._machine.iomap.place(offset, len(source))
        await self._port.qp.write(source, addr, key)

    def mappings(self) -> list[Mapping]:
        """The mappings that the peer has published, including those that have ended.

        Raises:
            ProtocolError: A mapping of the peer makes no sense.
        """
        return self._machine.iomap.mappings()

    def _check_open(self) -> None:
        if self._port.closed or not self._machine.writable:
            raise ConnectionLostError(errno.EPIPE, "nothing can be sent any more")
