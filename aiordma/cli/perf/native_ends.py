"""Queue pairs for the measurements of the native layer, connected and with registered memory.

An end has two completion queues: `cq`, which a task waits for and which has a completion channel of
its own, and `other`, which is polled now and then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from aiordma.cli.perf.completions import Completions
from aiordma.cli.perf.control import PerfError
from aiordma.cli.perf.options import Plan
from aiordma.cm.address import Address
from aiordma.cm.connection_id import ConnectionId
from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.cm.enums import EventType
from aiordma.cm.event_channel import EventChannel
from aiordma.cm.qp_transition import QPPolicy
from aiordma.verbs.comp_channel import CompletionChannel
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import MemoryRegion
from aiordma.verbs.pd import ProtectionDomain
from aiordma.verbs.qp import QPInitAttr, QueuePair
from aiordma.verbs.resource import Resource

__all__ = ["End", "Gate", "closed_all", "dialed"]

R = TypeVar("R", bound=Resource)

#: Bytes that may be copied by the post, as perftest asks for in its latency tests.
INLINE = 236
_RIGHTS = {
    "read": Access.REMOTE_READ,
    "write": Access.REMOTE_WRITE,
    "atomic": Access.REMOTE_ATOMIC,
}
# Of the connections: a peer that is gone is noticed, a slow receiver is waited for.
_RETRIES, _RNR_RETRIES = 6, 7
_CLOSE_S = 10.0


def _rights(plan: Plan) -> Access:
    return _RIGHTS.get(plan.test, Access(0))


class End:
    """One queue pair and its resources.

    Args:
        cm_id: Resolved, or of a request; it belongs to the end from now on.
        plan: Sizes and depths.
        waits_for_receives: Whether `cq` is that of the receives; that of the sends otherwise.
    """

    def __init__(self, cm_id: ConnectionId, plan: Plan, *, waits_for_receives: bool) -> None:
        self._parts: list[Resource] = [cm_id]
        self.cm_id = cm_id
        context = cm_id.context
        assert context is not None
        sends = max(plan.tx_depth, 32)
        receives = plan.rx_depth if plan.test == "send" else 1
        # `cq` is for sends or receives, `other` for the rest; its completions may wait.
        waited, other = (receives, sends) if waits_for_receives else (sends, receives)
        try:
            self.pd: ProtectionDomain = self._own(ProtectionDomain(context))
            self.channel: CompletionChannel = self._own(CompletionChannel(context))
            self.cq: CompletionQueue = self._own(CompletionQueue(context, waited, self.channel))
            self.other: CompletionQueue = self._own(CompletionQueue(context, other))
            cm_id.policy = QPPolicy(access=_rights(plan))
            attr = QPInitAttr(
                send_cq=self.other if waits_for_receives else self.cq,
                recv_cq=self.cq if waits_for_receives else self.other,
                max_send_wr=sends,
                max_recv_wr=receives,
                # Software iWARP has no room for so many, and refuses the queue pair.
                max_inline_data=INLINE if plan.metric == "lat" and not context.is_iwarp else 0,
            )
            self.completions: Completions = Completions(
                self.cq, self.channel, plan.wait, alone=plan.qps == 1
            )
            self.qp: QueuePair = self._own(cm_id.create_qp(self.pd, attr))
            access = Access.LOCAL_WRITE | _rights(plan)
            if context.is_iwarp:
                access |= Access.REMOTE_WRITE  # the answer of a read comes in as a write
            self.mr: MemoryRegion = self._own(MemoryRegion(self.pd, max(plan.sizes), access))
        except BaseException:
            self.close()
            raise

    def _own(self, part: R) -> R:
        self._parts.insert(0, part)
        return part

    def close(self) -> None:
        """Give everything back."""
        for part in self._parts:
            part.close()

    async def wait_closed(self, seconds: float) -> None:
        """Until the adapter has nothing of it."""
        for part in self._parts:
            await part.wait_closed(seconds)


def _parameter() -> ConnectionParameter:
    return ConnectionParameter(retry_count=_RETRIES, rnr_retry_count=_RNR_RETRIES)


async def dialed(
    events: EventChannel, address: Address, plan: Plan, make: Callable[[ConnectionId], End]
) -> End:
    """An end that is connected to a `Gate`; `make` makes it before it connects."""
    limit = plan.timeout_s
    cm_id = ConnectionId(events)
    try:
        await cm_id.resolve_addr(address, timeout=limit)
        await cm_id.resolve_route(timeout=limit)
    except BaseException:
        cm_id.close()
        raise
    end = make(cm_id)
    try:
        await cm_id.connect(_parameter(), timeout=limit)
    except BaseException:
        end.close()
        raise
    return end


class Gate:
    """A listening id; makes an end of each request."""

    def __init__(self, host: str, plan: Plan) -> None:
        self._plan = plan
        with contextlib.ExitStack() as undo:
            self.events: EventChannel = EventChannel()
            undo.callback(self.events.close)
            self._listener = ConnectionId(self.events)
            undo.callback(self._listener.close)
            self._listener.bind_addr((host, 0))
            self._listener.listen(plan.qps)
            undo.pop_all()
        self.port: int = self._listener.source_port

    async def accept(
        self, make: Callable[[ConnectionId], End], ready: Callable[[End], None]
    ) -> End:
        """The end of the next request; `ready` posts its first receives."""
        while True:
            event = await self.events.get_event(self._plan.timeout_s)
            if event is None:
                msg = "the client did not connect"
                raise PerfError(msg)
            event.ack()
            if event.type == EventType.CONNECT_REQUEST:
                break
        assert event.connection_id is not None
        end = make(event.connection_id)
        try:
            ready(end)
            await end.cm_id.accept(_parameter(), timeout=self._plan.timeout_s)
        except BaseException:
            end.close()
            raise
        return end

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        self.events.close()

    async def wait_closed(self, seconds: float) -> None:
        """Until the port is free again; its ends are closed."""
        await self.events.wait_closed(seconds)


async def closed_all(parts: Sequence[End | Gate | EventChannel]) -> None:
    """Close all, and wait for their end.

    They are closed before the first wait, so that nothing stays open if a wait fails or is
    canceled.
    """
    for part in parts:
        part.close()
    for part in parts:
        await part.wait_closed(_CLOSE_S)
