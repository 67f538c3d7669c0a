"""Batch: many READs and WRITEs of one connection, posted in chains, and awaited once.

Theory of operation
    `read` and `write` only note an operation, in C (`_core/batch.c`), after the checks that a
    single operation has: one that is refused raises there, and the others are not affected.

    `submit` posts chains of work requests.  C posts the next chain when one has completed, so that
    the task sleeps until all is done, unless other tasks wait for the number of an operation.  Then
    C leaves the batch to this file, which waits in line with everybody else.  A batch never has
    more than two chains in the send queue.  A chain has half of the `one_sided_depth` operations,
    at most `OPERATION_CHAIN`, and at most 1 MiB.

    A chain that copies bytes has a region of 64 KiB of the connection's pool.  It is taken when the
    chain has a number, as for a single operation: however many batches wait, they have no region.

    The peer may end the exposure of memory while operations wait, so C looks again before each
    post, and leaves out those of such memory: they have failed, and the connection goes on.  The
    owner of memory is checked at the call.  If the peer has not said yet which memory is its own,
    `submit` first waits for that.

    When an operation fails, the connection ends, and all that was posted comes back, one way or
    another.  So `submit` first waits for the other chain, and then says what is known of each
    operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from aiordma import _core
from aiordma._core import LARGEST_COPY, LARGEST_REQUEST, OPERATION_CHAIN, REFUSED_REVOKED, Chain
from aiordma.arguments import Buffer, whole
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.one_sided import OneSided, check_remote, stale_error
from aiordma.endpoint.outcome import Outcome
from aiordma.errors import (
    BatchError,
    BatchLostError,
    CompletionError,
    ConnectionLostError,
    FlushedError,
    RdmaError,
    ResourceClosedError,
    read_incomplete_error,
)
from aiordma.loop.uncopied import Uncopied
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.enums import Access, Opcode
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.wr import SGE

__all__ = ["Batch"]

_CHAINS = 2  # under way at a time: one is being carried out while the other one is filled
_READ, _WRITE = int(Opcode.RDMA_READ), int(Opcode.RDMA_WRITE)
# As enum item_state of batch.c has them.
_WAITS, _POSTED, _DONE, _LOST, _CLOSED, _REVOKED, _UNKNOWN = range(7)


class _UnderWay(NamedTuple):
    chain: Chain
    region: MemoryRegion | None


class Batch(Uncopied):
    """READs and WRITEs of a connection, which are posted together and awaited once.

    `Connection.batch` makes it.  As a context manager it submits what was added when the block
    ends; if the block raises, nothing is posted.  Without a block, `submit` does it.  A batch is
    submitted once.

    Each operation takes 50 to 75 bytes until the end of the batch.  A READ without `into` also
    takes the object with its bytes, once it is posted; a buffer that is no `bytes` takes a
    memoryview, some 200 bytes.  A batch uses at most 128 KiB of registered memory.

    Order: the WRITEs of a batch take place in the order in which they were added, and a READ sees
    what the WRITEs before it have written.  A WRITE may overtake a READ that was added before it:
    do not write to memory that the same batch reads, and do not write from memory that the same
    batch reads into.  A batch that is submitted after the end of another sees what that has done.
    """

    __slots__ = (
        "__weakref__", "_c", "_check", "_count", "_failed", "_link", "_one_sided", "_outcome",
        "_results", "_submitted", "_unproven",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        outcome: Outcome,
        one_sided: OneSided,
        config: ConnectionConfig,
        check: Callable[[], None],
    ) -> None:
        self._link = link
        self._outcome = outcome
        self._one_sided = one_sided
        self._check = check
        self._submitted = False
        self._count = 0  # once it was submitted, and C has forgotten them
        self._failed: list[int] = []
        # Owners of memory who may not be the peer, which has not said who it is; for each the
        # first operation.
        self._unproven: dict[int, Opcode] = {}
        self._results: list[Any] | None = None
        outcome.require_open()
        one_sided.operations.allow()
        limit = max(1, min(config.one_sided_depth // _CHAINS, OPERATION_CHAIN))
        self._c = _core.Batch(link.state, limit, not link.context.is_iwarp)

    def __len__(self) -> int:
        """How many operations were added."""
        return self._count or self._c.count

    def read(
        self,
        remote: RemoteRegion,
        into: Buffer | MemoryRegion | SGE | None = None,
        *,
        offset: int = 0,
        size: int | None = None,
    ) -> int:
        """Add an RDMA READ, into memory of the program, or of `size` bytes, which are its result.

        Args:
            remote: The peer's memory, as the peer has named it.
            into: A writable buffer of up to 64 KiB, which is filled completely, or a region or
                `SGE` of up to 1 MiB of registered memory.  It stays exported or registered until
                the batch has ended, and nothing else may use it from `submit` on.
            offset: The first byte to read, counted from the start of `remote`.
            size: Without `into`, the number of bytes, up to 64 KiB.

        Returns:
            The place of the operation in the batch, from 0, which is the index of its result.

        Raises:
            TypeError: Both or neither of `into` and `size` are given.
            ValueError: The bytes are not all inside `remote`, or too many for a batch: read those
                by `Connection.read`.
            PermissionError: `remote` is not exposed for reading.
            StaleRegionError: `remote` is not memory of the peer, or its exposure has ended, as far
                as the peer has said.
            BufferError: `into` is read-only.
            RuntimeError: The batch was submitted before.
            ConnectionLostError, ResourceClosedError: The connection is over, or `into` is closed.

        If it raises, nothing was added.
        """
        if (into is None) is (size is None):
            msg = "a read of a batch takes either `into`, or `size` for a result of so many bytes"
            raise TypeError(msg)
        number = self._c.add(_READ, remote, into, offset, 0 if size is None else size)
        if number is None:
            return self._refused(Opcode.RDMA_READ, remote, into, offset, size)
        return number

    def write(
        self, remote: RemoteRegion, data: Buffer | MemoryRegion | SGE, *, offset: int = 0
    ) -> int:
        """Add an RDMA WRITE.

        Args:
            remote: The peer's memory, as the peer has named it.
            data: A buffer of up to 64 KiB, or a region or `SGE` of up to 1 MiB of registered
                memory.  It is not copied before its turn comes, so it must not change until the
                batch has ended, and stays exported or registered until then.
            offset: Where to put the first byte, counted from the start of `remote`.

        Returns:
            The place of the operation in the batch, from 0.

        It raises as `read` does, with the right to write; then nothing was added.
        """
        number = self._c.add(_WRITE, remote, data, offset, 0)
        if number is None:
            return self._refused(Opcode.RDMA_WRITE, remote, data, offset, 0)
        return number

    def _refused(
        self, opcode: Opcode, remote: RemoteRegion, memory: Any, offset: int, size: int | None
    ) -> int:
        """Raise what is wrong with an operation that C has not added; or add it in another form."""
        self._check()
        self._require_new()
        check_remote(remote)
        reads = opcode == Opcode.RDMA_READ
        made = reads and memory is None
        local = None if made else self._one_sided._local(memory, writable=reads)
        try:
            length = whole("size", size) if local is None else len(local)
            right = Access.REMOTE_READ if reads else Access.REMOTE_WRITE
            remote.check(offset, length, right)
            self._outcome.require_open()
            if reads and length:
                self._one_sided._require_reads(opcode)
            _check_size(length, registered=isinstance(local, SGE))
            proven = not remote.owner or self._link.state.knows_peer
            if proven:
                self._one_sided.refuse_stale(remote.owner, remote.generation, opcode)
            # C knows no subclasses, and refuses what is unproven.
            plain = RemoteRegion(remote.addr, remote.length, remote.rkey, remote.rights)
            generation = remote.generation if remote.owner else 0
            number = self._c.add(
                int(opcode), plain, local, whole("offset", offset), length, generation
            )
        finally:
            if isinstance(local, memoryview):
                local.release()
        if number is None:
            raise self._one_sided.operations.lost()
        if not proven:
            self._unproven.setdefault(remote.owner, opcode)
        return number

    def _require_new(self) -> None:
        if self._submitted:
            msg = "the batch was submitted: begin another one"
            raise RuntimeError(msg)

    @property
    def results(self) -> list[Any]:
        """The result of each operation, in the order in which they were added.

        For a READ with `size` it is `bytes`; for other operations, the number of bytes moved.

        Raises:
            RuntimeError: The batch has not been submitted, or not all of it was done.
        """
        if self._results is None:
            msg = "a batch has results after it was submitted, and all of it was done"
            raise RuntimeError(msg)
        return self._results

    async def submit(self) -> list[Any]:
        """Post all operations, and wait until they are done.

        Returns:
            `results`.

        Raises:
            RuntimeError: The batch was submitted before.
            BatchError: Some operations were not done; it names them, and its `__cause__` is the
                exception that a single operation would have raised.  `BatchLostError` if that is a
                ConnectionLostError.  The connection is over, unless each operation that was not
                done had its local region closed meanwhile, or its remote memory withdrawn.
            StaleRegionError: Memory is not the peer's, as it said only after the operation was
                added; nothing was posted.
            TimeoutError: The peer has not said for 30 seconds which memory is its own; nothing was
                posted.
            ConnectionLostError, ResourceClosedError: The connection was over before the first post.
            OSError: There is no memory to copy through; nothing was posted.

        Cancellation: ends the wait.  What was posted, at most `one_sided_depth` operations, goes
        on, and may take place; the rest is not posted.  Local memory stays exported or registered,
        and may be written to, until the adapter is done with it.
        """
        self._check()
        self._require_new()
        self._submitted = True
        self._count = self._c.count
        cause: BaseException | None = None
        try:
            self._c.begin()
            if self._unproven:
                if not self._link.state.knows_peer:
                    await self._one_sided.ask_identity()
                for owner, opcode in self._unproven.items():
                    self._one_sided.refuse_stale(owner, 0, opcode)
            try:
                with self._outcome.explaining():
                    cause = await self._run()
            except (RdmaError, OSError) as exc:
                cause = exc
            states = self._c.states()
            if states.count(_DONE) < len(states):
                raise self._error(states, cause)
            self._results = self._c.results()
        finally:
            del cause  # its traceback has this frame
            self._c.discard()
        return self._results

    async def _run(self) -> BaseException | None:
        """Post chains until all operations are done, or one has failed; return the first cause."""
        operations, pool = self._one_sided.operations, self._link.buffers.pool
        under_way: deque[_UnderWay] = deque()
        cause: BaseException | None = None
        try:
            while True:
                while cause is None and self._c.left and len(under_way) < _CHAINS:
                    try:
                        # With a chain under way there is no need to wait in line.
                        number = (
                            operations.free_number() if under_way else await operations.number()
                        )
                        if number is None:
                            break
                        posted = await self._post(number)
                    except (RdmaError, OSError) as exc:
                        if not under_way:
                            raise
                        cause = exc
                        break
                    if posted is not None:
                        under_way.append(posted)
                        if posted.chain.code:
                            cause = operations.lost()
                if not under_way:
                    return cause
                chain, region = under_way[0]
                try:
                    await chain
                except FlushedError:
                    cause = cause or operations.lost()
                except CompletionError as exc:
                    cause = cause or exc
                    if chain.failed_item is not None:
                        self._failed.append(chain.failed_item)
                if chain.code:
                    self._link.check(chain.code)
                    cause = cause or operations.lost()
                under_way.popleft()
                if region is not None:
                    (pool.drop if cause else pool.give)(region)
        finally:
            del cause  # its traceback has this frame
            self._c.stop()
            for _, region in under_way:
                if region is not None:
                    pool.drop(region)  # not `give`, because the adapter may still use it

    async def _post(self, number: int) -> _UnderWay | None:
        """Post a chain; None if what was left needed no request."""
        operations, pool = self._one_sided.operations, self._link.buffers.pool
        region: MemoryRegion | None = None
        chain: Chain | int | None = None
        try:
            if self._c.copies:
                region = await pool.take(LARGEST_COPY)
            chain = self._c.post(number, region)
        finally:
            if not isinstance(chain, Chain):
                operations.release_number(number)
                if region is not None:
                    pool.give(region)
        if isinstance(chain, Chain):
            self._link.check(chain.code)
            return _UnderWay(chain, region)
        if chain is not None:
            self._link.check(chain)  # the post has failed, and with it the connection
        elif not self._c.left:
            return None
        raise operations.lost()

    def _error(self, states: bytes, cause: BaseException | None) -> BaseException:
        """The exception of a batch that was not done completely."""
        places: dict[int, list[int]] = {state: [] for state in range(_UNKNOWN + 1)}
        for place, state in enumerate(states):
            places[state].append(place)
        if cause is not None and len(places[_WAITS]) == len(states):
            return cause
        if cause is None and places[_LOST]:
            cause = read_incomplete_error()
        elif cause is None and places[_REVOKED]:
            cause = stale_error(REFUSED_REVOKED, "batch", "what concerns it was not posted")
        elif cause is None:
            cause = ResourceClosedError("the local region was closed before the batch used it")
        failed = sorted({*self._failed, *places[_LOST], *places[_CLOSED], *places[_REVOKED]})
        unknown = sorted({*places[_UNKNOWN], *places[_POSTED]} - set(failed))
        text = (
            f"of {len(states)} operations of a batch {len(places[_DONE])} were done, "
            f"{len(failed)} failed, {len(unknown)} are unknown, and {len(places[_WAITS])} were not "
            f"posted: {cause}"
        )
        kind = BatchLostError if isinstance(cause, ConnectionLostError) else BatchError
        error = kind(getattr(cause, "errno", None), text)
        error.done, error.failed, error.unknown = places[_DONE], failed, unknown
        error.unposted, error.results = places[_WAITS], self._c.results()
        error.__cause__ = cause
        return error

    async def __aenter__(self) -> Self:
        self._require_new()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Submit, if the block has not raised, and has not submitted."""
        if kind is None and not self._submitted:
            await self.submit()
        elif not self._submitted:
            self._submitted = True
            self._c.discard()


def _check_size(length: int, *, registered: bool) -> None:
    most = LARGEST_REQUEST if registered else LARGEST_COPY
    if length > most:
        what = "registered memory" if registered else "memory that is not registered"
        msg = (
            f"an operation of a batch has up to {most} bytes of {what}, not {length}: use read() "
            "and write() of the connection"
        )
        raise ValueError(msg)
