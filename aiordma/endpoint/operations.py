"""Operations: requests of the program on the peer's memory, from the post to the end.

Theory of operation
    An operation is posted, and its completion taken, in C (`_core/operation.c`, `_core/message.c`);
    the task that awaits it is resumed by the drain, without a future.  Operations that fail come to
    Python.

    There are `one_sided_depth` of them.  A task that finds none free waits in line, and gets the
    number of the next that ends; while there is a line no other task gets a number.

    A connection wakes the loop for solicited messages of the peer, and for its own completions only
    while a task waits for them (`Link.listen`).  That is asked for with the first operation and
    given up a while after the last: each change costs a system call.

    An operation that is flushed before the connection's end is known ends with the connection, so
    that its error has the cause, and the program's next call finds the connection lost, too.

    The local memory is retained until the completion, or until the queue pair is gone.
"""

from __future__ import annotations

import errno
import functools
import weakref

from aiordma._core import MessageState, Operation
from aiordma.endpoint.config import ConnectionConfig
from aiordma.endpoint.link import Link
from aiordma.endpoint.outcome import Outcome
from aiordma.errors import ConnectionLostError, completion_error, os_error
from aiordma.loop.timers import Timer, call_later
from aiordma.loop.wait_line import WaitLine
from aiordma.verbs.enums import WCStatus
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.wc import WCRecord

__all__ = ["Operations"]

_LINGER_S = 0.5
_FLUSHED = int(WCStatus.WR_FLUSH_ERR)
_IWARP_HINT = "iWARP does not say why; an access that the peer's adapter refuses ends like this"


def _transferred(region: MemoryRegion, _: object) -> None:
    region._transferred()


def _rest(reference: weakref.ref[Operations]) -> None:
    operations = reference()
    if operations is not None:
        operations._rest()


class Operations:
    """Those of one connection, beside those that C posts alone (`MessageState.read`, `write`).

    Args:
        link: The adapter's side.
        config: Depth.
        outcome: Makes the exception for a connection that is over.
    """

    __slots__ = (
        "__weakref__", "_c", "_depth", "_line", "_link", "_outcome", "_resting",
        "_unexplained",
    )  # fmt: skip

    def __init__(
        self,
        link: Link,
        config: ConnectionConfig,
        outcome: Outcome,
    ) -> None:
        self._link = link
        self._c: MessageState = link.state
        self._depth = config.one_sided_depth
        self._outcome = outcome
        self._line: WaitLine[int] | None = None  # made for the first task that waits
        self._unexplained: list[int] = []  # flushed; these end with the connection
        self._resting: Timer | None = None  # set while the link listens

    async def posted(
        self,
        opcode: int,
        region: MemoryRegion,
        addr: int,
        size: int,
        where: int,
        rkey: int,
        compare_add: int = 0,
        swap: int = 0,
    ) -> Operation:
        """Post one request, when there is room.

        Args:
            opcode: A number of `Opcode`.
            region: The local memory; it stays registered until the operation has ended.
            addr: Where it begins in there, an address.
            size: Bytes; 0 for a WRITE of nothing.
            where: The peer's address.
            rkey: The peer's key.
            compare_add: Of an atomic; of a WRITE with immediate that.
            swap: Of an atomic.

        Raises:
            ConnectionLostError, ResourceClosedError: The connection is over.

        Cancellation: nothing is posted.
        """
        self._attend()
        number = await self._number() if self._line or not self._c.n_operations_free else -1
        operation = self._c.operate(
            number, opcode, addr, size, where, rkey, compare_add, swap, region
        )
        if isinstance(operation, Operation):
            return operation
        if number >= 0:
            self._give(number)
        if operation is None:
            region._require()
            raise self.lost()  # it is over since
        raise self._refused(operation)

    async def _number(self) -> int:
        """Wait in line for the number of an operation."""
        if self._line is None:
            self._line = WaitLine()
            self._c.room = self._room
        number = self._line.wait(self._give)
        self._c.operations_wanted = True
        try:
            return await number
        except BaseException:
            self._room()
            raise

    def _give(self, number: int) -> None:
        """A number is free again."""
        self._c.give_number(number)
        self._room()

    def _room(self) -> None:
        """Hand out free numbers to the tasks that wait."""
        c = self._c
        line = self._line
        while line and line.next_size and c.n_operations_free:
            line.grant(c.take_number())
        c.operations_wanted = bool(line)

    def _refused(self, code: int) -> BaseException:
        """The adapter took no request: the connection cannot go on."""
        self._link.fail(os_error(code, "ibv_post_send"))
        return self.lost()

    def on_ended(self, number: int, record: WCRecord) -> None:
        """The completion of an operation that C has left to Python: it failed, or one before it."""
        error = None
        if record[1] == _FLUSHED and not self._outcome.decided:
            self._unexplained.append(number)
            return
        if record[1]:
            error = completion_error(
                record[1], operation="one-sided operation", vendor_err=record[3], qp_num=record[6]
            )
        self._end(number, error)

    def _end(self, number: int, error: BaseException | None) -> None:
        region = self._c.ended(number, error)
        if region is not None:
            region._transferred()
        if self._line:
            self._room()

    def explained(self) -> None:
        """The connection is over, and why is known."""
        flushed, self._unexplained = self._unexplained, []
        for number in flushed:
            self._end(number, completion_error(WCStatus.WR_FLUSH_ERR))

    def _drop(self) -> None:
        """The queue pair is being destroyed: end what the adapter has not flushed.

        The memory stays registered until it is gone.
        """
        if self._resting is not None:
            self._resting.cancel()
        qp = self._link.qp
        self._c.forget_done()
        for number in range(self._depth):
            region = self._c.ended(number, completion_error(WCStatus.WR_FLUSH_ERR))
            if region is not None:
                qp._gone.add_done_callback(functools.partial(_transferred, region))
        if self._line is not None:
            self._line.fail(self.lost)
            self._line = None
            del self._c.room  # which leads here
        if self._resting is not None:
            self._link.completions.expect(answers=False)

    def lost(self) -> BaseException:
        """Not the operation failed, but the connection before it."""
        failure = self._outcome.reason()
        if failure is None:
            failure = ConnectionLostError(errno.ECONNRESET, "the connection is lost")
        if isinstance(failure, ConnectionLostError) and self._link.context.is_iwarp:
            failure.hint = _IWARP_HINT
        return failure

    # Attention

    def _attend(self) -> None:
        """Have the link listen."""
        if not self._c.n_operations:
            self._c.allow_operations(self._depth)
            self._link.at_close(self._drop)
            self._c.may_read = self._link.qp._rules.read_depth != 0
        self._c.attended = True
        if self._resting is None and not self._link.closed:
            self._link.completions.listen()
            self._link.completions.expect(answers=True)
            self._set_timer()

    def _set_timer(self) -> None:
        # Weak: a connection that its program forgets is collected at once.
        self._resting = call_later(
            self._link.loop, _LINGER_S, functools.partial(_rest, weakref.ref(self))
        )

    def _rest(self) -> None:
        """Have it listen no more, if nothing has happened in the meantime."""
        if self._link.closed:
            return
        if self._c.attended or self._c.operating:
            self._c.attended = False
            self._set_timer()
        else:
            self._resting = None
            self._link.completions.expect(answers=False)
            self._link.completions.unlisten()
